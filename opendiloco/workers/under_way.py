"""One training as the peer process sees it: what workers report meanwhile, and what comes of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from opendiloco.workers.control import FragmentStored, InnerLoopDone, InnerStepDone, Report
from peers.values.workload import OnCaptured


class UnderWay:
    """Passes on what `workers()` workers report: to `on_captured` each of the `fragments` that all of them have stored.

    What is trained is known once that is so of all fragments. Workers may still have inner steps to take: the *rest*.
    """

    def __init__(
        self,
        workers: Callable[[], int],
        fragments: int,
        on_step: Callable[[InnerStepDone], None],
        on_captured: OnCaptured,
    ) -> None:
        self._workers = workers
        self._fragments = fragments
        self._on_step = on_step
        self._on_captured = on_captured
        self._stored: Counter[int] = Counter()
        self._captures: set[asyncio.Task[None]] = set()
        self._request: asyncio.Task[InnerLoopDone] | None = None
        self._news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last: FragmentStored | None = None
        self._errors: list[Exception] = []
        self.is_wanted = True
        self.is_known = False
        """What is trained, since it was returned as the outcome."""

    @property
    def has_rest(self) -> bool:
        """Whether what is trained is known, and workers have inner steps to take yet."""
        return self.is_known and self._request is not None and not self._request.done()

    def check_rest(self) -> None:
        """Raises: what has gone wrong with the rest, once it is over."""
        if self.is_known and self._request is not None:
            with suppress(asyncio.CancelledError):
                self._request.result()

    def heard(self, report: Report) -> None:
        """One of the workers reports something."""
        if not self.is_wanted:
            return
        if isinstance(report, InnerStepDone):
            self._on_step(report)
            return
        self._stored[report.fragment] += 1
        if self._stored[report.fragment] == self._workers():
            self._captures.add(asyncio.create_task(self._capture(report)))

    async def outcome(self, request: asyncio.Task[InnerLoopDone], stop: Callable[[], None]) -> FragmentStored:
        """Return what comes of the request to train, as soon as whatever is captured is taken. When that is cancelled
        or fails, `stop` has the workers stop, and this waits until they have."""
        self._request = request
        try:
            ended: list[asyncio.Future[Any]] = [request, self._news]
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            if self._captures:
                await asyncio.wait(self._captures)
            if self._errors:
                raise self._errors[0]
            if self._last is None:
                raise request.exception() or AssertionError("trained, and not stored")
            self.is_known = True
            return self._last
        except BaseException:
            self.is_wanted = False
            stop()
            for capture in self._captures:
                capture.cancel()
            await asyncio.wait([request, *self._captures])
            raise

    async def _capture(self, stored: FragmentStored) -> None:
        try:
            await self._on_captured(stored.fragment)
        except Exception as error:  # raised by whoever waits for the outcome
            self._errors.append(error)
        if stored.fragment == self._fragments - 1:
            self._last = stored
        if (self._errors or self._last) and not self._news.done():
            self._news.set_result(None)
