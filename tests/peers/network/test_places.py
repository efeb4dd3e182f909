"""How many are served at once: in all, and of one peer."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress

import pytest

from peers.network.channel import LONGEST_HELD, PLACE_WAIT, Places, RefusalError
from tests.peers.network.test_throttle import now, simulate


async def take(places: Places, peer: str, seconds: float = 0.0) -> float:
    """Hold a place for so long. Returns when it was given."""
    async with places.one_for(peer):
        given = now()
        await asyncio.sleep(seconds)
        return given


def test_who_comes_when_all_places_are_taken_waits_for_one() -> None:
    async def scenario() -> None:
        places = Places(2, 2)
        given = await asyncio.gather(*(take(places, peer, 5.0) for peer in "abcd"))
        assert given == [0.0, 0.0, 5.0, 5.0]

    simulate(scenario())


def test_who_waits_too_long_is_refused_and_the_next_is_not() -> None:
    async def scenario() -> None:
        places = Places(1, 1)
        async with places.one_for("slow"):
            with pytest.raises(RefusalError, match="too many peers are being served"):
                await take(places, "a")
            assert now() == PLACE_WAIT
        assert await take(places, "a") == PLACE_WAIT

    simulate(scenario())


def test_a_peer_has_its_share_at_once_and_no_more() -> None:
    async def scenario() -> None:
        places = Places(10, 2)
        async with AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(places.one_for("greedy"))
            with pytest.raises(RefusalError, match="being sent to you"):
                await take(places, "greedy")
            assert now() == 0.0, "it is told at once"
            await take(places, "another")
        await take(places, "greedy")

    simulate(scenario())


def test_who_waits_has_part_of_its_share_taken() -> None:
    """Else a peer could queue for as many places as it liked."""

    async def scenario() -> None:
        places = Places(1, 2)
        async with places.one_for("slow"):
            waiting = [asyncio.ensure_future(take(places, "greedy")) for _ in range(2)]
            await asyncio.sleep(1.0)
            with pytest.raises(RefusalError, match="being sent to you"):
                await take(places, "greedy")
        assert await asyncio.gather(*waiting) == [1.0, 1.0]

    simulate(scenario())


def test_a_few_greedy_peers_leave_places_for_others() -> None:
    """Regression: four peers that took their share, and time to read it, kept all others out."""

    async def scenario() -> None:
        places = Places(16, 5)
        async with AsyncExitStack() as stack:
            for greedy in ("one", "two", "three", "four") * 5:
                with suppress(RefusalError):
                    await stack.enter_async_context(places.one_for(greedy))
            await take(places, "a joiner")
            assert now() == 0.0, "it need not wait"

    simulate(scenario())


def test_nobody_holds_a_place_for_ever() -> None:
    async def scenario() -> None:
        places = Places(1, 1)
        with pytest.raises(TimeoutError):
            await take(places, "trickling", 2 * LONGEST_HELD)
        assert await take(places, "another") == LONGEST_HELD

    simulate(scenario())


def test_places_come_back_whatever_happens() -> None:
    async def scenario() -> None:
        places = Places(1, 1)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                async with places.one_for("a"):
                    raise ZeroDivisionError
        async with places.one_for("b"):
            waiting = asyncio.ensure_future(take(places, "a"))
            await asyncio.sleep(1.0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        assert await take(places, "a") == 1.0
        assert places._taken == {}

    simulate(scenario())
