"""Rounds of several fragments take their turns on our link."""

from __future__ import annotations

import asyncio
from typing import Any

from peers.driver.outgoing import PATIENCE, SECONDS_UNDER_WAY, Outgoing, Uplink
from peers.network.channel import BYTES_UNDER_WAY
from tests.peers.network.test_throttle import now, simulate


class Round(Outgoing):
    """Has something to send to these."""

    def __init__(self, uplink: Uplink, *members: str) -> None:
        self.members = set(members)
        self.hangs_at = set[str]()
        self._uplink = uplink
        uplink.begin_round(self, 2)

    def has_more(self, to: str) -> bool:
        return to in self.members

    def turn(self, to: str) -> asyncio.Task[None]:
        return asyncio.create_task(self._uplink.turn(self, to))


async def is_done(task: asyncio.Task[Any]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return task.done()


def test_a_later_round_gives_way_to_an_earlier_one() -> None:
    """Regression: rounds that followed each other as fast as the link carries them shared it, and all were late."""

    async def scenario() -> None:
        uplink = Uplink()
        first, second = Round(uplink, "a"), Round(uplink, "a")
        assert await is_done(first.turn("a"))
        assert await is_done(second.turn("b")), "the first has nothing for this member"
        waiting = second.turn("a")
        assert not await is_done(waiting)
        first.members.clear()
        uplink.moved()
        assert await is_done(waiting)

    simulate(scenario())


def test_a_round_that_is_over_or_begins_anew_is_no_earlier_one() -> None:
    async def scenario() -> None:
        uplink = Uplink()
        first, second = Round(uplink, "a"), Round(uplink, "a")
        waiting = second.turn("a")
        assert not await is_done(waiting)
        uplink.end_round(first)
        assert await is_done(waiting)
        uplink.begin_round(first, 2)
        assert await is_done(second.turn("a"))
        assert not await is_done(first.turn("a"))

    simulate(scenario())


def test_nobody_waits_long_for_a_round_that_hangs() -> None:
    async def scenario() -> None:
        uplink = Uplink()
        _, second = Round(uplink, "a"), Round(uplink, "a")
        began = now()
        await second.turn("a")
        assert now() - began == PATIENCE
        await second.turn("a")
        assert now() - began == PATIENCE, "nor once more for each chunk"

    simulate(scenario())


def test_what_is_under_way_at_once_follows_from_what_the_link_carries() -> None:
    uplink = Uplink()
    assert uplink.under_way(6) == BYTES_UNDER_WAY
    uplink.meter.knows(3e6)
    assert uplink.under_way(6) == int(SECONDS_UNDER_WAY * 3e6 / 6)
    uplink.meter.knows(3e9)
    assert uplink.under_way(6) == BYTES_UNDER_WAY
