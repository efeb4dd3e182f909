"""What `join` takes along from one process to the next, when a volunteer begins anew."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from opendiloco.cli.join import owners_watch
from opendiloco.cli.views import Lines
from opendiloco.owner.again import WISHES_VARIABLE
from opendiloco.settings.join_settings import JoinSettings

YESTERDAY = datetime(2026, 11, 24, 7, 30)


def test_a_volunteer_that_begins_anew_leaves_when_it_first_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that had slept past 07:30 trained until the next day's."""
    monkeypatch.setenv(WISHES_VARIABLE, json.dumps({"is_asked": True, "until": YESTERDAY.isoformat()}))
    watch = owners_watch(JoinSettings(run="tiny-x", until="07:30"), Lines())
    assert watch.until == YESTERDAY
    assert watch.wishes.is_asked
    assert owners_watch(JoinSettings(run="tiny-x"), Lines()).until is None


def test_a_volunteer_that_begins_for_the_first_time_leaves_at_the_next_such_moment() -> None:
    watch = owners_watch(JoinSettings(run="tiny-x", until="07:30"), Lines())
    assert watch.until is not None
    assert watch.until > datetime.now()
