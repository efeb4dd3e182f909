"""`diloco-peer sample` shows what a stranger's model writes."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from opendiloco.cli import export, main

WRITTEN = "all is well\n\tnow\x1b]52;c;aGk=\x07\x9b2J"


class Terminal(io.StringIO):
    """Standard output that says that a person looks at it."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stdout", [Terminal(), io.StringIO()], ids=["terminal", "pipe"])
def test_what_a_model_writes_steers_no_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stdout: io.StringIO
) -> None:
    """Regression: a model of a stranger's run could write to the clipboard of whoever sampled from it."""

    async def generate(*asked: object) -> str:
        return WRITTEN

    @asynccontextmanager
    async def state(place: object) -> AsyncIterator[object]:
        yield None, SimpleNamespace(outer_steps=3), SimpleNamespace(trainer=SimpleNamespace(generate=generate))

    monkeypatch.setattr(export._Place, "state", state)
    monkeypatch.setattr("sys.stdout", stdout)
    (tmp_path / "checkpoint").touch()
    main.main(["sample", "--from", str(tmp_path / "checkpoint"), "It says: "], standalone_mode=False)
    shown = stdout.getvalue()
    if stdout.isatty():
        assert shown.startswith("It says: all is well\n        now")
        assert all(line.isprintable() for line in shown.splitlines())
    else:
        assert shown == f"It says: {WRITTEN}\n", "whoever reads it gets it as it is"
