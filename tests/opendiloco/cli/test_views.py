"""What `join` shows: each phase once in a log, and a picture that fits its terminal."""

from __future__ import annotations

import asyncio
import io
import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from opendiloco.cli.join import _view_for
from opendiloco.cli.logs import LogOptions
from opendiloco.view.progress import Lines, ProgressReader, ProgressReport, Screen, _volunteer_picture
from opendiloco.view.run_view import RunView
from tests.opendiloco.view.test_progress import own_beat
from tests.opendiloco.view.test_progress import progress as progress


def test_a_log_has_each_phase_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "opendiloco")
    lines = Lines()
    for stage, share in (
        ("finding the run", None),
        ("tokenizing c4", 0.1),
        ("tokenizing c4", 0.9),
        ("compiling", None),
    ):
        lines.stage(stage, share)
    assert caplog.messages == ["phase: finding the run", "phase: preparing data", "phase: compiling"]
    assert lines.phase == "compiling"


def test_each_stage_of_the_start_is_seen_however_short_it_is() -> None:
    """Regression: the line was drawn twice a second, and what passed in between was in a log that nobody sees now."""
    screen = Screen(Console(file=(shown := io.StringIO()), force_terminal=True, width=80))
    for stage in ("importing torch", "tokenizing c4", "building the model", "compiling"):
        screen.stage(stage, None)
    screen.close()
    for stage in ("importing torch", "tokenizing c4", "building the model", "compiling"):
        assert stage in shown.getvalue()


def test_the_screen_shows_progress_for_as_long_as_training_lasts(
    progress: ProgressReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendiloco.owner.facts.machine_line", lambda: "61 °C")
    screen = Screen(Console(file=(shown := io.StringIO()), force_terminal=True, width=80, height=24))
    reader = cast(ProgressReader, SimpleNamespace(read=lambda: progress, machine=""))

    async def story() -> None:
        screen.stage("compiling", None)
        async with asyncio.timeout(20), screen.showing(reader):
            while "outer step 12/40" not in shown.getvalue() or not reader.machine:
                await asyncio.sleep(0.01)
            assert screen.phase == "training"
        assert screen.phase == "starting"

    asyncio.run(story())
    assert "this machine" in shown.getvalue()
    assert reader.machine == "61 °C"


def test_programs_read_one_stream(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(logging.INFO, "opendiloco")
    Lines(is_json=True).say("left the run")
    assert (caplog.messages, capsys.readouterr().out) == (["left the run"], "")
    Lines().say("left the run")
    assert capsys.readouterr().out == "left the run\n"


def test_where_there_is_no_terminal_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogOptions, "start", lambda options, level: None)
    assert isinstance(_view_for(LogOptions(None, None), is_plain=False), Lines)


def test_above_a_picture_there_are_only_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[str] = []
    monkeypatch.setattr(LogOptions, "send_to", lambda options, handler, level: levels.append(level))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert isinstance(_view_for(LogOptions(None, None), is_plain=False), Screen)
    assert levels == ["warning"]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (80, 10)])
def test_the_picture_fits_the_terminal(progress: ProgressReport, width: int, height: int) -> None:
    beats = progress.own, *(own_beat(f"peer{number}") for number in range(100))
    view = RunView(progress.view.run, beats)
    paused = replace(progress, view=view, pause_reasons=("[red]game[/red] runs",))
    console = Console(width=width, height=height, force_terminal=False)
    with console.capture() as capture:
        console.print(_volunteer_picture(paused, height))
    shown = capture.get().splitlines()
    assert max(map(len, shown)) <= width
    assert len(shown) <= max(height, 14)
    assert shown[2].split()[:5] == ["this", "machine", "paused", "50/200", "0"]
    assert "more" in capture.get()
    assert "paused: [red]game[/red] runs" in capture.get(), "names of programs are no markup"
