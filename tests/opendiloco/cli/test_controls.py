"""Which volunteers `pause`, `resume` and `finish` mean, where several run on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from opendiloco.cli import main
from opendiloco.owner import controls
from opendiloco.owner.controls import Answer

RUN = "tiny-" + "a" * 32


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of two volunteers in one run, which answer."""
    for peer in ("12D3KooWaaaaaaaa", "12D3KooWbbbbbbbb"):
        (tmp_path / RUN / peer).mkdir(parents=True)
        (tmp_path / RUN / peer / controls.NAME).touch()
    monkeypatch.setattr(controls, "ask", lambda path, request: Answer(says="pausing", phase="training", reasons=()))
    return tmp_path


def pause(state: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["pause", "--state", str(state), *options])


def test_two_volunteers_in_one_run_are_told_apart_by_their_peer_ids(state: Path) -> None:
    """Regression: it said to choose with --run, which names both."""
    refused = pause(state, "--run", RUN)
    assert refused.exit_code == 6
    assert f"{RUN} (…aaaaaaaa), {RUN} (…bbbbbbbb). Choose with --run or --peer, or take --all." in refused.output
    assert pause(state, "--peer", "…bbbbbbbb").output == f"{RUN} (…bbbbbbbb): pausing\n"
    assert pause(state, "--all").output.count("pausing") == 2
    assert "no volunteer cccc" in pause(state, "--peer", "cccc").output
