"""Links are measured one at a time."""

from __future__ import annotations

import asyncio
import socket

import pytest

from peers.links.rating import Rater
from peers.streams.channel import Channel, PeerRefusedError


async def ends(asker: str, answerer: str) -> tuple[Channel, Channel]:
    """The asker's end of a stream, and the other one's."""
    left, right = socket.socketpair()
    return (
        Channel(answerer, *await asyncio.open_unix_connection(sock=left)),
        Channel(asker, *await asyncio.open_unix_connection(sock=right)),
    )


def idle_rater() -> Rater:
    no_round = asyncio.Event()
    no_round.set()
    return Rater(no_round)


def test_both_directions_are_measured() -> None:
    async def scenario() -> None:
        a, b = idle_rater(), idle_rater()
        near, far = await ends("a", "b")
        rates, _ = await asyncio.gather(a.ask(near), b.answer(far))
        assert min(rates) > 0
        assert a.is_idle
        assert b.is_idle

    asyncio.run(scenario())


@pytest.mark.parametrize("asks_itself", [False, True])
def test_who_measures_already_is_not_measured(asks_itself: bool) -> None:
    """Regression: when all came at once they measured at once, and each what the others had left of its link."""

    async def scenario() -> None:
        b = idle_rater()
        first, its_end = await ends("b", "a") if asks_itself else reversed(await ends("a", "b"))
        measuring = asyncio.create_task(b.ask(first) if asks_itself else b.answer(first))
        if not asks_itself:
            await its_end.send_prelude(b"", 0)
            await its_end.read_verdict()
        await asyncio.sleep(0)
        assert not b.is_idle
        near, far = await ends("c", "b")
        with pytest.raises(PeerRefusedError):
            await asyncio.gather(Rater(b._is_free).ask(near), b.answer(far))
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)
        assert b.is_idle

    asyncio.run(scenario())


def test_nobody_is_measured_in_a_round() -> None:
    async def scenario() -> None:
        busy = Rater(asyncio.Event())
        near, far = await ends("a", "b")
        with pytest.raises(PeerRefusedError):
            await asyncio.gather(idle_rater().ask(near), busy.answer(far))

    asyncio.run(scenario())
