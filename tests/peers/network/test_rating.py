"""Links are measured one at a time."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from typing import Any

import pytest

from peers.network import rating
from peers.network.channel import Channel, PeerRefusedError
from peers.network.rating import LIMIT, PAUSE, Rater
from tests.peers.network.test_throttle import now, simulate


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
        with pytest.raises(PeerRefusedError):
            await b.ask((await ends("b", "c"))[0])
        assert not b.is_idle, "the first goes on"
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


class Link:
    """Carries so many bytes a second; so many more wait for that at most. Answers come together every so often."""

    def __init__(self, rate: float, waiting: int, every: float = 0.0) -> None:
        self.rate, self.waiting, self.every = rate, waiting, every
        self.passed_at: list[float] = []  # as the other end sees it
        self._free_at = 0.0
        self._arrivals = asyncio.Queue[float]()

    async def send_frame(self, header: bytes, data: bytes) -> None:
        self._free_at = max(self._free_at, now()) + len(data) / self.rate
        self._arrivals.put_nowait(self._free_at)
        await asyncio.sleep(self._free_at - self.waiting / self.rate - now())

    async def read_answer(self) -> bool:
        at = await self._arrivals.get()
        await asyncio.sleep((math.ceil(at / self.every) * self.every if self.every else at) - now())
        self.passed_at.append(now())
        return True

    async def send_last_frame(self) -> None: ...


@pytest.mark.parametrize("waiting", [1 << 18, 1 << 23])
@pytest.mark.parametrize("rate", [5e4, 12.5e6])
def test_both_ends_see_what_a_link_carries(rate: float, waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: answers were read when all was sent, though most had come before: they seemed to come in no time. And
    on a slow link one piece was sent alone, which tells the other end nothing."""
    monkeypatch.setattr(time, "monotonic", now)

    async def scenario() -> None:
        link: Any = Link(rate, waiting)
        assert await rating._send(link) == pytest.approx(rate, rel=0.05)
        assert rating._rate(link.passed_at) == pytest.approx(rate, rel=0.05)

    simulate(scenario())


def test_answers_that_come_together_make_no_link_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the best of all transfers counted. Two answers at once made a rate of gigabytes a second."""
    monkeypatch.setattr(time, "monotonic", now)

    async def scenario() -> None:
        link: Any = Link(12.5e6, 1 << 23, every=0.03)
        assert await rating._send(link) == pytest.approx(12.5e6, rel=0.2)

    simulate(scenario())


def test_a_measurement_that_does_not_go_on_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: whoever asked, and then sent nothing, kept us from measuring with anybody for ever."""
    monkeypatch.setattr(time, "monotonic", now)

    async def scenario() -> None:
        b = idle_rater()
        near, far = await ends("a", "b")
        await near.send_prelude(b"", 0)
        with pytest.raises(TimeoutError):
            await b.answer(far)
        assert now() == LIMIT
        assert b.is_idle
        await asyncio.sleep(PAUSE - 1.0)
        near, far = await ends("a", "b")
        with pytest.raises(PeerRefusedError):
            await asyncio.gather(idle_rater().ask(near), b.answer(far))
        await asyncio.sleep(1.0)
        near, far = await ends("a", "b")
        rates, _ = await asyncio.gather(idle_rater().ask(near), b.answer(far))
        assert min(rates) > 0

    simulate(scenario())
