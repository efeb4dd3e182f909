"""The demo: a volunteer killed and replaced half way, digests that agree, a model that learned; and nothing left."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import SECONDS, Site

pytestmark = pytest.mark.swarm


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    site.write_run(str(write_corpus(tmp_path / "corpus")), outer_steps=30, inner_steps=100)
    yield site
    site.assert_nothing_is_left()


@pytest.mark.thorough
def test_from_start_to_end(site: Site) -> None:
    """It ends with the run, within a minute; three are for a machine that is doing much else."""
    with site.start("demo", "--plain", "--peers", "2", "--minutes", "3", "--run", "run.toml", "--out", "demo") as demo:
        shown = demo.finish(180 + SECONDS)
    assert shown.code == 0, shown.out + shown.err
    assert "was killed (SIGKILL)" in shown.out
    assert "volunteer 3 has fetched the state after outer step" in shown.out
    assert re.search(r"all log and state digests agree \(\d+ outer steps? compared\)", shown.out)
    before, after = re.findall(r"[\d.]+(?= before| after)", shown.out)[-2:]
    assert float(after) < float(before)
    assert (site.folder / "demo" / "model" / "model.safetensors").exists()
    logs = {path.name for path in (site.folder / "demo" / "logs").iterdir()}
    assert logs == {"bootstrap-node.log", "volunteer-1.log", "volunteer-2.log", "volunteer-3.log"}


@pytest.mark.thorough
def test_ctrl_c(site: Site) -> None:
    with site.start("demo", "--plain", "--peers", "2", "--run", "run.toml", "--out", "demo") as demo:
        demo.line("starting 2 volunteers", "the demo does not start")
        demo.interrupt_terminal()
        finished = demo.finish()
    assert finished.code == 130
    assert finished.err == ""


@pytest.mark.thorough
def test_a_death_that_is_not_part_of_it(site: Site) -> None:
    with site.start("demo", "--plain", "--peers", "1", "--run", "run.toml", "--out", "demo") as demo:
        demo.line("volunteer 1 has joined", "the volunteer does not join")
        [volunteer] = [pid for pid, said in site.processes().items() if " join " in said and "p2pd" not in said]
        os.kill(volunteer, signal.SIGKILL)
        finished = demo.finish()
    assert finished.code == 1
    assert "volunteer 1 ended with -9: " in finished.out
    assert "error: all volunteers have ended." in finished.err


@pytest.mark.thorough
def test_a_folder_with_something_in_it(site: Site) -> None:
    finished = site.run("demo", "--out", ".")
    assert finished.code == 6
    assert "is not empty" in finished.error_line()
