"""`diloco-peer plan`: its tables, files and errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from opendiloco.cli import main
from opendiloco.config.run_config import RunConfig
from opendiloco.model.build import sized_skeleton
from opendiloco.quantities import OptimizerState
from opendiloco.workers.needs import needs_of
from opendiloco.workers.options import WorkerOptions

ROOT = Path(__file__).parents[4]
RUN = ROOT / "examples" / "llama-2m.toml"
LINKS = """
[[peers]]
name = "fast"
count = 3
up_mbit = 100.0
down_mbit = 100.0
step_seconds = 0.1
price_per_hour = 1.0
gpu_memory_gb = 0.001

[[peers]]
up_mbit = 10.0
down_mbit = 50.0
tokens_per_second = 1000.0
gpus = 0
price_per_hour = 0.5
"""


@pytest.fixture
def links(tmp_path: Path) -> Path:
    path = tmp_path / "links.toml"
    path.write_text(LINKS, encoding="utf-8")
    return path


def plan(links: Path, *options: str | Path) -> Result:
    return CliRunner().invoke(main, ["plan", str(RUN), "--peers", str(links), *map(str, options)])


def test_it_prints_tables_and_writes_what_is_asked_for(links: Path, tmp_path: Path) -> None:
    figures = tmp_path / "plan.json"
    done = plan(links, "--json", figures)
    assert done.exit_code == 0, done.output
    for words in (
        "parameters in 1 fragment, 4 peers",
        "computes",
        "fast",
        "peer 2",
        "a day",
        "each link needs",
        "sends",
    ):
        assert words in done.output
    assert "too small: fast: needs 0.569 GB of each GPU, and has 0.001 GB" in done.output
    found = json.loads(figures.read_text())
    assert 0 < found["utilisation"] <= 1
    assert found["cost_per_day"] == 24 * 3.5
    assert [peer["formats"] for peer in found["peers"]] == [["int8"], ["int8"]]
    assert set(found["bandwidth_needed"]) == {"0.5", "0.8", "0.9", "0.95", "0.99"}


def test_a_run_that_streams_is_planned_with_its_own_fragments_and_overlap(links: Path, tmp_path: Path) -> None:
    run, figures = tmp_path / "run.toml", tmp_path / "plan.json"
    run.write_text(RUN.read_text() + "\n[streaming]\nlayers_per_fragment = 2\noverlap = 3\n", encoding="utf-8")
    done = CliRunner().invoke(main, ["plan", str(run), "--peers", str(links), "--json", str(figures)])
    assert done.exit_code == 0, done.output
    found = json.loads(figures.read_text())
    assert (found["fragments"], found["overlap"]) == (3, 3), "two of blocks, and one of embeddings"


@pytest.mark.parametrize("kept", ["device", "host"])
def test_memory_is_what_join_holds_against_the_machine(links: Path, tmp_path: Path, kept: OptimizerState) -> None:
    links.write_text(LINKS.replace("price_per", f'optimizer_state = "{kept}"\nprice_per'), encoding="utf-8")
    config = RunConfig.from_toml(RUN)
    needs = needs_of(config, sized_skeleton(config), options=WorkerOptions(optimizer_state=kept))
    assert plan(links, "--json", tmp_path / "plan.json").exit_code == 0
    with_gpu, on_cpu = json.loads((tmp_path / "plan.json").read_text())["memory"]
    assert (with_gpu["main"], with_gpu["gpu"]) == (needs.main_memory, needs.device_memory)
    assert (on_cpu["main"], on_cpu["gpu"]) == (needs.main_memory_on_cpu, None)


def test_a_file_that_cannot_be_written_is_named(links: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = plan(links, "--json", "nowhere/plan.json")
    assert done.exit_code == 6, done.output
    assert "cannot write nowhere/plan.json: No such file or directory." in done.stderr


def test_a_model_that_is_too_small_for_any_link_says_so(links: Path, tmp_path: Path) -> None:
    """Regression: a row of dashes, and no word."""
    run = tmp_path / "run.toml"
    run.write_text((ROOT / "examples" / "tiny.toml").read_text(), encoding="utf-8")
    links.write_text(LINKS.replace("step_seconds = 0.1", 'gpu = "RTX 4090"'), encoding="utf-8")
    done = CliRunner().invoke(main, ["plan", str(run), "--peers", str(links)])
    assert done.exit_code == 0, done.output
    assert "-: no bandwidth suffices" in done.output
    assert "Raise training.inner_steps = 10, or train a larger model." in done.output


def test_only_the_mistakes_in_a_table_are_told(links: Path) -> None:
    """Regression: it was said, too, that there were no peers."""
    links.write_text("[[peers]]\nup = 20\n", encoding="utf-8")
    said = plan(links).stderr
    assert "peers.0.up_mbit: is missing" in said
    assert "at least 1 item" not in said
    links.write_text("peers = []\n", encoding="utf-8")
    assert "peers = []: too few. Give at least 1." in plan(links).stderr


def test_an_unknown_gpu_is_named(links: Path) -> None:
    links.write_text(LINKS.replace("step_seconds = 0.1", 'gpu = "NVIDIA Riva 128"'), encoding="utf-8")
    done = plan(links)
    assert done.exit_code == 3
    assert "peers.0.gpu = 'NVIDIA Riva 128' is not in the table of GPUs. Give step_seconds" in done.stderr


def test_a_mistake_in_the_files_is_found_before_anything_slow_is_loaded(
    links: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opendiloco.model.build", None)  # to import it is an error
    links.write_text(LINKS.replace("count = 3", "count = 0"), encoding="utf-8")
    done = plan(links)
    assert done.exit_code == 3
    assert f"{links}: peers.0.count = 0: too small. Use 1 or more." in done.stderr
