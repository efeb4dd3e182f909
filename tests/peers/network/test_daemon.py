"""The work that ends libp2p's daemon is done whole, whatever cancels it."""

from __future__ import annotations

import asyncio

import pytest

from peers.network.daemon import _uninterrupted
from tests.peers.network.test_throttle import simulate


def test_a_cancellation_is_raised_once_the_work_is_done() -> None:
    async def story() -> None:
        began, may_end, done = asyncio.Event(), asyncio.Event(), list[str]()

        async def work() -> None:
            began.set()
            await may_end.wait()
            done.append("all of it")

        task = asyncio.create_task(_uninterrupted(work()))
        await began.wait()
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done == ["all of it"]

    simulate(story())


def test_work_that_fails_says_so() -> None:
    async def fail() -> None:
        raise OSError("no daemon")

    async def story() -> None:
        await _uninterrupted(asyncio.sleep(0))
        with pytest.raises(OSError, match="no daemon"):
            await _uninterrupted(fail())

    simulate(story())
