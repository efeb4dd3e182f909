"""One training as the peer process sees it: what workers report meanwhile, and what comes of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from opendiloco.workers.control import FragmentStored, InnerLoopDone, InnerStepDone, Report
from peers.values.workload import OnCaptured


class UnderWay:
    """Passes on what `workers()` workers report: to `on_captured` each fragment that all of them have stored."""

    def __init__(
        self, workers: Callable[[], int], on_step: Callable[[InnerStepDone], None], on_captured: OnCaptured
    ) -> None:
        self._workers = workers
        self._on_step = on_step
        self._on_captured = on_captured
        self._stored: Counter[int] = Counter()
        self._is_wanted = True
        self._captures: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def heard(self, report: Report) -> None:
        """One of the workers reports something."""
        if not self._is_wanted:
            return
        if isinstance(report, InnerStepDone):
            self._on_step(report)
            return
        self._stored[report.fragment] += 1
        if self._stored[report.fragment] == self._workers():
            self._captures.add(asyncio.create_task(self._capture(report)))

    async def outcome(self, request: asyncio.Task[InnerLoopDone], stop: Callable[[], None]) -> InnerLoopDone:
        """Return what comes of the request to train, once whatever was captured is taken. When that is cancelled or
        fails, `stop` has the workers stop, and this waits until they have."""
        try:
            ended: list[asyncio.Future[Any]] = [request, self._failure]
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            if self._captures:
                await asyncio.wait(self._captures)
            if self._failure.done():
                raise self._failure.result()
        except BaseException:
            self._is_wanted = False
            stop()
            for capture in self._captures:
                capture.cancel()
            await asyncio.wait([request, *self._captures])
            raise
        return request.result()

    async def _capture(self, stored: FragmentStored) -> None:
        try:
            await self._on_captured(stored.fragment)
        except Exception as error:  # raised by whoever waits for the outcome
            if not self._failure.done():
                self._failure.set_result(error)
