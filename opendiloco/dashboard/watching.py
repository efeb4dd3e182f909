"""Looks at runs: often at those that somebody watches, now and then at all others, so that curves have few gaps."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from opendiloco.dashboard.sources import Source
from opendiloco.view.history import RunHistory
from peers.errors import DilocoPeerError
from peers.log.state import LogError
from peers.network.run_failures import RunFailures

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5  # between two looks at which runs are due
WATCHED_SECONDS = 2.0  # between two looks at a run that somebody watches
UNWATCHED_SECONDS = 30.0  # at one that nobody watches; of those one at a time
LOOK_LIMIT = 20.0  # seconds that a look may take
REFRESH_LIMIT = 3.0  # seconds that somebody who asks once waits for a look
PAUSE_SECONDS = 0.05  # between two slices of a long log
PING_SECONDS = 15.0  # after which a watcher hears that there is nothing new


class Board:
    """What watchers of one page are shown: JSON by section, each told anew when it changes."""

    def __init__(self) -> None:
        self.sections: dict[str, str] = {}
        self.watchers = 0
        self._changed = asyncio.Event()

    def show(self, sections: Mapping[str, Any]) -> None:
        for name, content in sections.items():
            text = json.dumps(content, allow_nan=False, separators=(",", ":"))
            if self.sections.get(name) != text:
                self.sections[name] = text
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()

    async def news(self) -> AsyncIterator[tuple[str, str] | None]:
        """The sections, and each again when it has changed; None now and then while nothing has."""
        told: dict[str, str] = {}
        self.watchers += 1
        try:
            while True:
                changed = self._changed
                for name, text in list(self.sections.items()):
                    if told.get(name) != text:
                        told[name] = text
                        yield name, text
                while not changed.is_set():
                    try:
                        async with asyncio.timeout(PING_SECONDS):
                            await changed.wait()
                    except TimeoutError:
                        yield None
        finally:
            self.watchers -= 1


class RunWatch:
    """One run, what was seen of it, and who looks at it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.board = Board()
        self.history = RunHistory(source.run, source.me, source.held_out, source.no_log)
        self.summary = self.history.summary()
        """What the list of runs says of it."""
        self.looked_at = float("-inf")  # on this machine's monotonic clock
        self._looking = asyncio.Lock()

    def is_due(self, now: float) -> bool:
        return now - self.looked_at >= (WATCHED_SECONDS if self.board.watchers else UNWATCHED_SECONDS)

    async def look(self) -> None:
        """Learn what is new, and show it. What cannot be had now is not told, and tried again at the next look."""
        async with self._looking:
            await self._look()

    async def refresh(self) -> None:
        """Look, unless somebody has just done so. Whoever asks does not wait for long, and gets what is known."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REFRESH_LIMIT), self._looking:
                if time.monotonic() - self.looked_at >= WATCHED_SECONDS:
                    await self._look()

    async def _look(self) -> None:
        try:
            await self._learn()
            self._tell()
        except Exception:  # a mistake of ours that one run brings to light: all others are still shown
            logger.exception("the dashboard shows nothing new of %s at present", self.source.run.run_id)
        self.looked_at = time.monotonic()

    async def _learn(self) -> None:
        try:
            async with asyncio.timeout(LOOK_LIMIT):
                self.history.observe(await self.source.heartbeats(), time.time())
            self.history.recall(self.source.found())
            told_at = time.monotonic()
            while self.history.read(self.source.log(), self.source.signed()):
                await asyncio.sleep(PAUSE_SECONDS)
                if time.monotonic() - told_at >= WATCHED_SECONDS:
                    self._tell()
                    told_at = time.monotonic()
        except (TimeoutError, DilocoPeerError, LogError) as error:
            logger.debug("the dashboard could not look at %s: %r", self.source.run.run_id, error)

    def _tell(self) -> None:
        summary = self.history.summary()
        json.dumps(summary, allow_nan=False)  # what JSON cannot say would keep the list of all runs from being told
        self.summary = summary
        if self.board.watchers or not self.board.sections:
            self.show()

    def show(self) -> None:
        self.board.show(self.history.sections())


class Watching:
    """All runs of this process, by id. `sources` is asked again and again which there are."""

    def __init__(self, sources: Callable[[], Iterable[Source]]) -> None:
        self._sources = sources
        self._is_failing = False
        self._failures = RunFailures("making its page")
        self.runs: dict[str, RunWatch] = {}
        self.board = Board()
        """The list of runs."""

    async def keep_looking(self) -> None:
        """Look at runs until cancelled."""
        looking: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                self._try_update()
                self.board.show({"runs": [watch.summary for watch in self.runs.values()]})
                looking = {run: task for run, task in looking.items() if not task.done()}
                for run, watch in self._due(looking):
                    looking[run] = asyncio.create_task(watch.look())
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for task in looking.values():
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*looking.values(), return_exceptions=True)

    def _try_update(self) -> None:
        """Take up which runs there are. While that fails, those that are known are shown."""
        try:
            self._update()
            self._is_failing = False
        except Exception:
            if not self._is_failing:
                logger.exception("the dashboard finds no new runs at present")
            self._is_failing = True

    def _update(self) -> None:
        sources = {source.run.run_id: source for source in self._sources()}
        for run in self.runs.keys() - sources.keys():
            del self.runs[run]
        for run, source in sources.items():
            if run in self.runs:
                self.runs[run].source = source
            elif self._failures.is_due(run):
                with self._failures.caught(run):
                    self.runs[run] = RunWatch(source)

    def _due(self, looking: Mapping[str, object]) -> list[tuple[str, RunWatch]]:
        """All that are watched, and of the others the one at which nobody has looked for longest."""
        now = time.monotonic()
        due = [(run, watch) for run, watch in self.runs.items() if run not in looking and watch.is_due(now)]
        watched = [(run, watch) for run, watch in due if watch.board.watchers]
        if any(not self.runs[run].board.watchers for run in looking if run in self.runs):
            return watched
        others = sorted((one for one in due if not one[1].board.watchers), key=lambda one: one[1].looked_at)
        return watched + others[:1]
