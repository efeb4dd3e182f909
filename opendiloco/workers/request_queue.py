"""Requests to something that can do one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class RequestQueue:
    """They queue up behind one another, and each goes on to its end even when nobody waits for it any more."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()  # the event loop itself holds tasks only weakly

    def add(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> asyncio.Task[Result]:
        """Its turn comes when all that were added before are done. Wait for it with `asyncio.shield`."""

        async def in_turn() -> Result:
            async with self._turn:
                return await work()

        return self.hold(asyncio.create_task(in_turn()))

    def hold(self, task: asyncio.Task[Result]) -> asyncio.Task[Result]:
        """Keep a task until it ends; should it fail while nobody waits for it, asyncio prints nothing."""
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def idle(self) -> None:
        """Returns once all of them have ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()
