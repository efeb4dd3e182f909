"""The peers that a leader waits for, and for how long (R7, R16)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from peers.log.header import Member
from peers.log.state import LogState
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.protocol.awaited import Awaited, late
from tests.peers.heartbeats import beat
from tests.peers.logs import SETTINGS, TOKENS, first_log, next_header

SPEED = 10.0
"""Tokens a second of all: a lease takes ten seconds."""
SLACK = 4.0


class Leading:
    """The peer a waits for b and c."""

    def __init__(self, contributions: float | None = 0.5, log: LogState | None = None) -> None:
        self.log = log or first_log()
        changed = replace(SETTINGS, contributions=contributions)
        self.awaited = Awaited("a", self.log, changed)
        self.awaited.grace = 10.0
        self.awaited.slack = SLACK

    def ready(self, names: str, now: float = 0.0) -> Leading:
        for name in names:
            self.awaited.times.note(name, now)
        return self

    def at(self, step: int = 0, **more: Any) -> Heartbeat:
        fields: dict[str, Any] = {"inner_step": step, "tokens_per_second": SPEED, "speed": SPEED} | more
        return beat("c", self.log, **fields)

    def is_time(self, now: float, ready: str, c: Heartbeat, contributing: Collection[str] | None = None) -> bool:
        self.awaited.look({"b": beat("b", self.log), "c": c}, {}, ())
        return self.awaited.is_time(
            now, set(ready), set(ready if contributing is None else contributing), set(self.log.voters)
        )


def test_r16_nobody_is_waited_for_that_is_far_away() -> None:
    assert Leading().ready("ab").is_time(0.0, "ab", Leading().at(0)), "it takes ten seconds"


@pytest.mark.parametrize(
    ("told", "seconds"),
    [({"tokens_per_second": 0.0, "speed": 0.0}, 10.0), ({}, 7.5)],
    ids=["for the grace", "but not for one that says it needs twice what is left"],
)
def test_r7_a_synchronous_run_waits_for_the_grace(told: dict[str, Any], seconds: float) -> None:
    assert not Leading(None).ready("ab").is_time(seconds - 0.1, "ab", Leading().at(0, **told))
    assert Leading(None).ready("ab").is_time(seconds + 0.1, "ab", Leading().at(0, **told))


def test_r7_who_was_in_neither_of_the_last_two_entries_is_not_waited_for() -> None:
    log = replace(first_log(), staleness=9)
    for _ in range(2):
        assert not Leading(None, log).ready("ab").is_time(0.0, "ab", Leading(None, log).at())
        log = log.append(next_header(log, [Member(peer=one, tokens=TOKENS, samples=log.leases[one]) for one in "ab"]))
    assert late(log, SETTINGS) == {"c"}
    assert Leading(None, log).ready("ab").is_time(0.0, "ab", Leading(None, log).at())
    last = SETTINGS.inner_steps - 1
    assert not Leading(0.9, log).ready("ab").is_time(0.0, "ab", Leading(0.9, log).at(last)), "its slack is short anyhow"


def test_whoever_comes_soon_is_waited_for_until_the_slack_is_over() -> None:
    last = SETTINGS.inner_steps - 1
    assert not Leading().ready("ab").is_time(0.0, "ab", Leading().at(last))
    assert not Leading().ready("ab").is_time(SLACK - 0.5, "ab", Leading().at(last))
    assert Leading().ready("ab").is_time(SLACK, "ab", Leading().at(last)), "it said so, and did not come"


@pytest.mark.parametrize(
    "told",
    [{"state": PeerState.READY}, {"tokens_per_second": 0.0, "speed": 0.0}, {"index": 0}],
    ids=["it is ready, and its Ready under way", "it says no speed", "its heartbeat is older than the entry before"],
)
def test_where_a_heartbeat_does_not_tell_its_peer_may_come_any_moment(told: dict[str, Any]) -> None:
    assert not Leading().ready("ab").is_time(0.0, "ab", Leading().at(0, **told))
    assert Leading().ready("ab").is_time(SLACK, "ab", Leading().at(0, **told))


def test_fewer_than_enough_wait_as_in_a_synchronous_run() -> None:
    assert not Leading(0.75).ready("ab").is_time(7.0, "ab", Leading().at(0)), "three of four are needed, so all three"
    assert Leading(0.75).ready("ab").is_time(10.0, "ab", Leading().at(0))
    assert Leading(0.75).ready("abc").is_time(0.0, "abc", Leading().at(0))


def test_most_voters_must_be_ready_however_small_the_share() -> None:
    assert not Leading(0.1).ready("a").is_time(9.0, "a", Leading().at(0))


def test_whoever_brings_nothing_is_no_contribution() -> None:
    leading = Leading(1.0).ready("ab")
    assert not leading.is_time(7.0, "ab", leading.at(0), contributing="a"), "c has a contribution to make"
    assert Leading(0.5).ready("ab").is_time(0.0, "ab", leading.at(0), contributing="a"), "one of two"


def test_the_last_one_that_is_waited_for_need_not_wait_for_the_clock() -> None:
    leading = Leading()
    leading.ready("ab").is_time(0.0, "ab", leading.at(0))
    assert leading.awaited.are_all_in({"a", "b"})
    leading.is_time(0.0, "ab", leading.at(SETTINGS.inner_steps - 1))
    assert not leading.awaited.are_all_in({"a", "b"})


def test_a_leader_that_is_far_away_itself_is_not_waited_for_either() -> None:
    leading, c = Leading().ready("bc"), Leading().at(0)
    assert not leading.is_time(0.0, "bc", c), "it has just begun, and does not know its speed"
    leading.awaited.own = 0, SPEED
    assert leading.is_time(0.0, "bc", c)
    leading.awaited.own = SETTINGS.inner_steps - 1, SPEED
    assert not leading.is_time(0.0, "bc", c)


def test_a_fragment_needs_less_than_a_lease() -> None:
    log = replace(first_log(), fragments=2)
    step = 0
    early, closing = Leading(log=log.of(0)), Leading(log=log.of(1))
    assert not early.ready("ab").is_time(0.0, "ab", early.at(step)), "it is there"
    assert closing.ready("ab").is_time(0.0, "ab", closing.at(step))


def test_a_fragment_of_an_old_lease_needs_no_more() -> None:
    """It goes into that fragment's entry, and not into the one alone that closes the cycle."""
    log = replace(first_log(), fragments=2)
    assert log.last is not None
    old = replace(log, last=log.last.model_copy(update={"index": log.last.index + 1}))
    assert old.age("c") == 1
    early, closing = Leading(log=old.of(0)), Leading(log=old.of(1))
    assert not early.ready("ab").is_time(0.0, "ab", early.at(0))
    assert closing.ready("ab").is_time(0.0, "ab", closing.at(0))
