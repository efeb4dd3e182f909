"""What `join` makes of its settings."""

from __future__ import annotations

from datetime import datetime

import click
import pytest
from click.testing import CliRunner

from opendiloco.cli.join import _owners_watch
from opendiloco.cli.options import SettingsCommand, join_settings
from opendiloco.settings.join_settings import JoinSettings
from opendiloco.view.progress import Lines


@pytest.mark.parametrize("typed", [["INVITE"], ["--run", "INVITE"], ["--plain", "INVITE", "--hours", "22-7"]])
def test_the_invite_may_stand_alone(typed: list[str]) -> None:
    """Regression: `join INVITE` was wrong usage."""
    given: dict[str, object] = {}

    @click.command(cls=SettingsCommand)
    @join_settings()
    def show(settings: JoinSettings) -> None:
        given.update(run=settings.run, hours=settings.hours)

    done = CliRunner().invoke(show, typed)
    assert done.exit_code == 0, done.output
    assert given == {"run": "INVITE", "hours": "22-7" if "--hours" in typed else given["hours"]}
    assert "Usage: show [OPTIONS] [INVITE]" in CliRunner().invoke(show, ["--help"]).output
    assert CliRunner().invoke(show, ["INVITE", "AGAIN"]).exit_code == 2


def test_a_volunteer_leaves_at_the_next_such_moment() -> None:
    watch = _owners_watch(JoinSettings(run="tiny-x", until="07:30"), Lines())
    assert watch.until is not None
    assert watch.until > datetime.now()
    assert _owners_watch(JoinSettings(run="tiny-x"), Lines()).until is None
