"""`diloco-peer plan`: its tables, files and errors."""

from __future__ import annotations

import importlib.util
import json
import sys
import xml.etree.ElementTree as ElementTree
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

from opendiloco.cli import main
from opendiloco.config.run_config import RunConfig
from opendiloco.model.build import sized_skeleton
from opendiloco.workers.needs import needs_of

ROOT = Path(__file__).parents[3]
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


def find_cairosvg(monkeypatch: pytest.MonkeyPatch, found: ModuleSpec | None) -> None:
    """Pretend that the package is installed, or is not; leave all others as they are."""
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return found if name == "cairosvg" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def plan(links: Path, *options: str | Path) -> Result:
    return CliRunner().invoke(main, ["plan", str(RUN), "--peers", str(links), *map(str, options)])


def test_it_prints_tables_and_writes_what_is_asked_for(links: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("plan.json", "curves.svg", "schedule.svg")]
    done = plan(links, "--json", files[0], "--plot", files[1], "--schedule", files[2], "--fragment-layers", "2")
    assert done.exit_code == 0, done.output
    for words in ("data-parallel", "DiLoCo", "with overlap", "overlap, 4 bits", "fast", "peer 2", "a day", "for 95.0%"):
        assert words in done.output
    assert "too small: fast: needs 0.0315 GB of each GPU, and has 0.001 GB" in done.output
    found = json.loads(files[0].read_text())
    assert [method["overlap"] for method in found["methods"]] == [0, 0, 0, 5, 5]
    assert all(0 < method["utilisation"] <= 1 for method in found["methods"])
    assert found["methods"][1]["cost_per_day"] == 24 * 3.5
    assert set(found["uniform_links"]["DiLoCo"]) == {"0.5", "0.8", "0.9", "0.95", "0.99"}
    assert ElementTree.fromstring(files[1].read_text()).tag.endswith("svg")
    boxes = ElementTree.fromstring(files[2].read_text()).findall("{*}rect/{*}title")
    assert {box.text.rpartition(", ")[2] for box in boxes if box.text} == {
        "forward",
        "activations",
        "parameters",
        "reduction",
    }


def test_memory_is_what_join_holds_against_the_machine(links: Path, tmp_path: Path) -> None:
    config = RunConfig.from_toml(RUN)
    needs = needs_of(config, sized_skeleton(config))
    assert plan(links, "--json", tmp_path / "plan.json").exit_code == 0
    with_gpu, on_cpu = json.loads((tmp_path / "plan.json").read_text())["memory"]
    assert (with_gpu["main"], with_gpu["gpu"]) == (needs.main_memory, needs.device_memory)
    assert (on_cpu["main"], on_cpu["gpu"]) == (needs.main_memory_on_cpu, None)


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--fragment-layers", "99"], 2, "--fragment-layers 99: the model has 4 layers. Give 4 or less."),
        (["--overlap", "1000"], 2, "--overlap 1000: a fragment is sent again"),
        (["--bits", "3"], 2, "'3' is not one of '4', '8', '16'"),
        (["--target", "1"], 2, "--target"),
        (["--plot", "curves.pdf"], 2, "its name ends in neither .svg nor .png"),
        (["--json", "nowhere/plan.json"], 6, "cannot write nowhere/plan.json: No such file or directory."),
    ],
)
def test_a_mistake_is_named_with_its_remedy(
    options: list[str], code: int, told: str, links: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = plan(links, *options)
    assert done.exit_code == code, done.output
    assert told in done.stderr


def test_a_model_with_fewer_layers_than_a_fragment_has_by_default_is_one_fragment(links: Path, tmp_path: Path) -> None:
    tiny, found = ROOT / "examples" / "tiny.toml", tmp_path / "plan.json"
    done = CliRunner().invoke(main, ["plan", str(tiny), "--peers", str(links), "--json", str(found)])
    assert done.exit_code == 0, done.output
    assert [method["fragments"] for method in json.loads(found.read_text())["methods"]] == [1, 1, 2, 2, 2]


def test_an_unknown_gpu_is_named(links: Path) -> None:
    links.write_text(LINKS.replace("step_seconds = 0.1", 'gpu = "NVIDIA Riva 128"'), encoding="utf-8")
    done = plan(links)
    assert done.exit_code == 3
    assert "peers.0.gpu = 'NVIDIA Riva 128': its peak is not known here. Give step_seconds" in done.stderr


def test_a_mistake_in_the_files_is_found_before_anything_slow_is_loaded(
    links: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opendiloco.model.build", None)  # to import it is an error
    links.write_text(LINKS.replace("count = 3", "count = 0"), encoding="utf-8")
    done = plan(links)
    assert done.exit_code == 3
    assert f"{links}: peers.0.count = 0: too small. Use 1 or more." in done.stderr


def test_a_png_needs_a_package(links: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_cairosvg(monkeypatch, None)
    done = plan(links, "--plot", tmp_path / "curves.png")
    assert done.exit_code == 6
    assert "a PNG needs the package cairosvg. pip install cairosvg, or name a .svg." in done.stderr


def test_a_png_is_made_of_the_svg(links: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("cairosvg")
    package.svg2png = lambda bytestring: b"PNG of " + bytestring[:4]  # type: ignore[attr-defined]
    find_cairosvg(monkeypatch, ModuleSpec("cairosvg", None))
    monkeypatch.setitem(sys.modules, "cairosvg", package)
    assert plan(links, "--plot", tmp_path / "curves.png").exit_code == 0
    assert (tmp_path / "curves.png").read_bytes() == b"PNG of <svg"
