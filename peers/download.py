"""Something large from several peers at once, chunk by chunk, each held against its digest.

Every donor is asked for one range of chunks after another, so that fast ones give more. A donor that fails, stalls or
gives wrong bytes costs the range it was to give. At the end idle donors are asked for what slow ones still owe.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from peers.errors import RemoteProtocolError
from peers.streams import PeerUnreachableError, Serve
from peers.wire import digest_of

logger = logging.getLogger(__name__)

PULL_TIMEOUT = 3600.0  # seconds for one transfer; a stalled one ends much earlier, in the stream
DONORS = 4  # that are asked at once
RANGES = 2  # asked of each at once, so that its link is not idle between two


class PullTransport(Protocol):
    async def pull(
        self, peer_id: str, name: str, header: bytes, max_bytes: int, timeout: float
    ) -> tuple[bytes, bytearray]: ...
    async def on_pull(self, name: str, serve: Serve, gives_way: bool = False) -> None: ...


class DownloadError(Exception):
    """No donor is left, and something is missing. The message says what became of them."""


@dataclass(frozen=True)
class Wanted:
    """What is to be fetched, and how to ask for it."""

    name: str  # of the pull
    digests: Sequence[bytes]  # of the chunks
    bounds: Callable[[int, int], tuple[int, int]]  # chunks [first, last) -> bytes [start, stop)
    request: Callable[[int, int], bytes]  # chunks [first, last) -> the pull's header
    range: int  # chunks asked for at once


Range = tuple[int, int]
"""Chunks [first, last)."""


class Download:
    """Fills `data`. `fetched` counts bytes by donor."""

    def __init__(self, transport: PullTransport, wanted: Wanted, data: memoryview) -> None:
        self.fetched: Counter[str] = Counter()
        self._transport = transport
        self._wanted = wanted
        self._data = data
        self._missing = deque(_ranges(range(len(wanted.digests)), wanted.range))
        self._asked: dict[Range, list[str]] = {}  # of whom, longest ago first
        self._reasons: dict[str, str] = {}  # why who failed us
        self._changed = asyncio.Event()

    async def adopt(self) -> int:
        """What is in `data` already, from a download that broke off, is not fetched again. Returns its chunks."""
        missing = await asyncio.to_thread(self._wrong_chunks)
        self._missing = deque(_ranges(missing, self._wanted.range))
        return len(self._wanted.digests) - len(missing)

    async def run(self, donors: Sequence[str]) -> None:
        """Raises: DownloadError when no donor is left; what has arrived stays in `data`."""
        waiting = deque(donors)
        workers: set[asyncio.Task[None]] = set()
        at_work: Counter[str] = Counter()

        def ended(worker: asyncio.Task[None], donor: str) -> None:
            workers.discard(worker)
            at_work[donor] -= 1
            self._notify()

        try:
            while not self._is_done:
                while waiting and sum(count > 0 for count in at_work.values()) < DONORS:
                    donor = waiting.popleft()
                    for _ in range(RANGES):
                        worker = asyncio.create_task(self._work(donor))
                        workers.add(worker)
                        at_work[donor] += 1
                        worker.add_done_callback(lambda worker, donor=donor: ended(worker, donor))  # type: ignore[misc]
                if not workers:
                    raise DownloadError("; ".join(self._reasons.values()) or "nobody has it")
                await self._change()
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, donor: str) -> None:
        """Fetch ranges from a donor until all is here, or it fails."""
        while not self._is_done and donor not in self._reasons:
            wanted = self._choose(donor)
            if wanted is None:
                await self._change()
                continue
            self._asked.setdefault(wanted, []).append(donor)
            try:
                await self._fetch(donor, wanted)
            except (PeerUnreachableError, RemoteProtocolError) as error:
                logger.debug("%s", error)
                self._reasons[donor] = str(error)
                self._give_back(donor, wanted)
            finally:
                self._notify()

    def _choose(self, donor: str) -> Range | None:
        """The next range; when all are asked for, the one asked for longest ago of one other donor."""
        if self._missing:
            return self._missing.popleft()
        return next((wanted for wanted, asked in self._asked.items() if len(asked) == 1 and donor not in asked), None)

    def _give_back(self, donor: str, wanted: Range) -> None:
        asked = self._asked.get(wanted, [])
        if donor in asked:
            asked.remove(donor)
            if not asked:
                del self._asked[wanted]
                self._missing.appendleft(wanted)

    async def _fetch(self, donor: str, wanted: Range) -> None:
        start, stop = self._wanted.bounds(*wanted)
        request = self._wanted.request(*wanted)
        _, chunks = await self._transport.pull(donor, self._wanted.name, request, stop - start, PULL_TIMEOUT)
        for chunk in range(*wanted):
            first, last = self._wanted.bounds(chunk, chunk + 1)
            if digest_of(memoryview(chunks)[first - start : last - start]) != self._wanted.digests[chunk]:
                raise RemoteProtocolError(donor, f"chunk {chunk} of its {self._wanted.name} is not the run's")
        if self._asked.pop(wanted, None):  # nobody was faster
            self._data[start:stop] = chunks
            self.fetched[donor] += stop - start

    def _wrong_chunks(self) -> list[int]:
        digests = self._wanted.digests
        return [
            chunk
            for chunk in range(len(digests))
            if digest_of(self._data[slice(*self._wanted.bounds(chunk, chunk + 1))]) != digests[chunk]
        ]

    @property
    def _is_done(self) -> bool:
        return not self._missing and not self._asked

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        await self._changed.wait()


def _ranges(chunks: Sequence[int], size: int) -> list[Range]:
    """Runs of consecutive chunks, at most `size` long."""
    ranges: list[Range] = []
    for chunk in chunks:
        if ranges and ranges[-1][1] == chunk and chunk - ranges[-1][0] < size:
            ranges[-1] = (ranges[-1][0], chunk + 1)
        else:
            ranges.append((chunk, chunk + 1))
    return ranges
