from __future__ import annotations

import asyncio
import signal

from peers.network.signals import LEAVE_SIGNALS, signals_held_back


def blocked() -> set[signal.Signals | int]:
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_signals_are_blocked_meanwhile() -> None:
    before = blocked()
    with signals_held_back():
        assert blocked() == before | set(LEAVE_SIGNALS)
    assert blocked() == before


def test_holds_that_overlap_end_together() -> None:
    async def hold(entered: asyncio.Event, leave: asyncio.Event) -> None:
        with signals_held_back():
            entered.set()
            await leave.wait()

    async def story() -> None:
        events = [asyncio.Event() for _ in range(4)]
        first = asyncio.create_task(hold(events[0], events[1]))
        await events[0].wait()
        second = asyncio.create_task(hold(events[2], events[3]))
        await events[2].wait()
        events[1].set()
        await first  # the one that came first leaves first: what it found must not come back yet
        assert set(LEAVE_SIGNALS) <= blocked()
        events[3].set()
        await second

    before = blocked()
    asyncio.run(asyncio.wait_for(story(), 30))
    assert blocked() == before
