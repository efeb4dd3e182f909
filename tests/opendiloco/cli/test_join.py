"""What `join` makes of its settings."""

from __future__ import annotations

from datetime import datetime

from opendiloco.cli.join import _owners_watch
from opendiloco.settings.join_settings import JoinSettings
from opendiloco.view.progress import Lines


def test_a_volunteer_leaves_at_the_next_such_moment() -> None:
    watch = _owners_watch(JoinSettings(run="tiny-x", until="07:30"), Lines())
    assert watch.until is not None
    assert watch.until > datetime.now()
    assert _owners_watch(JoinSettings(run="tiny-x"), Lines()).until is None
