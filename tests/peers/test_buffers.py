"""Blocks in memory: split evenly, put together again, and only the held payload outlives its attempt."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.buffers import RoundBuffers, part_blocks
from peers.events import OpenRound
from peers.simulation import SimulatedWorkload
from peers.wire import digest_of
from peers.workload import Workload
from tests.peers.builders import attempt, first_log, member

LOG = first_log()
ROSTER = (member("a", 60, 80, 1), member("b", 80, 100, 2), member("c", 100, 120, 3))
AT, NEXT = attempt(LOG), attempt(LOG, 2)
OPEN = OpenRound(AT, ROSTER, ("a", "b", "c"), None)


def buffers() -> RoundBuffers:
    return RoundBuffers(cast(Workload, SimulatedWorkload("a")))


@given(st.integers(0, 500), st.integers(1, 40))
def test_parts_cover_every_block_once_and_evenly(blocks: int, owners: int) -> None:
    parts = [part_blocks(blocks, owners, part) for part in range(owners)]
    assert [block for first, last in parts for block in range(first, last)] == list(range(blocks))
    sizes = [last - first for first, last in parts]
    assert max(sizes) - min(sizes) <= 1


def test_a_round() -> None:
    mine = buffers()
    assert not mine.open(OPEN)
    current = mine.current(AT)
    assert current is not None
    current.own = bytes(range(56))
    assert mine.part_bytes(AT, 1) == (16, 32)
    assert mine.first_block(AT, 1) == 2
    assert mine.contribution(AT, 1) == bytes(range(16, 32))
    current.contributions = {"b": b"B" * 16, "c": b"C" * 16}
    assert mine.ordered_contributions(AT, 0) == [(bytes(range(16)), 1), (b"B" * 16, 2), (b"C" * 16, 3)]
    current.parts = {2: b"2" * 24, 0: b"0" * 16, 1: b"1" * 16}
    payload = b"0" * 16 + b"1" * 16 + b"2" * 24
    assert mine.hold(AT) == digest_of(payload)
    assert mine.held(digest_of(payload)) == payload


def test_an_attempt_that_is_over_has_no_blocks() -> None:
    mine = buffers()
    mine.open(OPEN)
    mine.open(OpenRound(NEXT, ROSTER, ("a",), None))
    assert mine.current(AT) is None
    for read in (mine.contribution, mine.part, mine.ordered_contributions, mine.part_bytes):
        with pytest.raises(KeyError, match="is over"):
            read(AT, 0)


def holding(payload: bytes) -> RoundBuffers:
    mine = buffers()
    mine.open(OpenRound(AT, ROSTER, ("a",), None))
    current = mine.current(AT)
    assert current is not None
    current.parts[0] = payload
    mine.hold(AT)
    return mine


def test_what_is_held_can_be_handed_on() -> None:
    mine = holding(b"payload")
    assert mine.open(OpenRound(NEXT, ROSTER, ("a",), digest_of(b"payload")))
    assert mine.part(NEXT, 0) == b"payload"
    assert not mine.open(OpenRound(NEXT, ROSTER, ("b",), digest_of(b"another")))


def test_garbage_handed_on_does_not_displace_what_is_held() -> None:
    """Regression: the entry that was held could then not be applied any more when it was committed."""
    mine = holding(b"payload")
    mine.open(OpenRound(NEXT, ROSTER, ("b",), digest_of(b"another")))
    current = mine.current(NEXT)
    assert current is not None
    current.parts[0] = b"garbage"
    assert mine.hold(NEXT) == digest_of(b"garbage")
    assert mine.held(digest_of(b"payload")) == b"payload"
    with pytest.raises(KeyError):
        mine.held(digest_of(b"garbage"))
