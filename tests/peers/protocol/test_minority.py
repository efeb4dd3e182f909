"""Whom to believe that they have founded a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.presence.heartbeat import PeerState
from peers.presence.presence import Presence
from peers.protocol.minority import may_found
from tests.peers.builders import context
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG, SETTINGS, first_log


@pytest.mark.parametrize(
    ("founders", "waiting", "archives", "is_believed"),
    [
        ("xyz", "abc", "", True),
        ("x", "ab", "", False),
        ("xy", "ab", "", False),
        ("x", "a", "", True),
        ("x", "a", "d", True),
    ],
)
def test_few_found_no_run_while_enough_wait_to_do_so(
    founders: str, waiting: str, archives: str, is_believed: bool
) -> None:
    settings = replace(SETTINGS, minimum_peers=3)
    here = context("me", settings)
    presence = Presence("me", 10.0, 40.0, 0.0, here.is_farewell)
    presence.membership.observe([beat(name, LOG, PeerState.READY) for name in waiting], 0.0)
    presence.membership.observe([beat(name, LOG, PeerState.ARCHIVING) for name in archives], 0.0)
    presence.membership.observe([beat(name, first_log()) for name in founders], 0.0)
    here.now = presence.now = settings.timing.heartbeat_expiry
    assert may_found(here, presence, len(founders)) is is_believed


def test_few_found_no_run_while_others_do_not_answer_for_a_moment_or_cannot_have_been_heard_of() -> None:
    """Regression: one lost message to one of those who waited, and a liar's own founding was believed."""
    settings = replace(SETTINGS, minimum_peers=3)
    here = context("me", settings)
    presence = Presence("me", 10.0, 40.0, 0.0, here.is_farewell)
    assert not may_found(here, presence, 1), "we have just started"
    presence.membership.observe([beat(name, LOG, PeerState.READY) for name in "ab"], 0.0)
    here.now = presence.now = settings.timing.heartbeat_expiry
    presence.membership.unreachable("a")
    assert not may_found(here, presence, 1)
    here.now = presence.now = settings.timing.partition_grace + 1
    assert may_found(here, presence, 1), "nobody has been heard of for long"
