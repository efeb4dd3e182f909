"""Downloads of large data from several peers at once, chunk by chunk; each chunk is checked against its digest.

Donors with the best reach are asked first, in random order among themselves: all joiners see the same donors in the
same order, and would otherwise ask the same few. Each donor is asked for a few ranges of chunks at a time, so that fast
donors give more. A donor that fails or gives wrong bytes is not asked again. A donor that stalls or trickles loses its
place to another. At the end idle donors are asked for the ranges that slow ones still owe.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from peers.errors import RemoteProtocolError
from peers.network.channel import LONGEST_HELD as LONGEST
from peers.network.channel import PeerRefusedError, PeerUnreachableError, RefusalError, Serve
from peers.values.system import cancel_and_wait
from peers.values.wire import Reach, digest_of

CHANCE = random.Random()
"""Decides at random which of many donors are asked, and in which order."""
PLACES: Mapping[Reach | None, int] = {Reach.OPEN: 4, Reach.PUNCHED: 4, None: 4, Reach.RELAYED: 2, Reach.NONE: 1}
"""Limits on the donors at work at once: a donor with this reach is added while fewer are at work. So a relay carries
bulk data only where too few direct donors are left, and an unreachable donor is tried only when it is the last one."""
RANK: Mapping[Reach | None, int] = {Reach.OPEN: 0, Reach.PUNCHED: 0, None: 1, Reach.RELAYED: 2, Reach.NONE: 3}
MOST = LONGEST  # seconds after which a request to a donor is given up
# seconds without any chunk after which a donor counts as silent, so that one more donor is asked; also the time that a
# new donor is expected to need for its first request
SILENT = 10.0
RANGES = 4  # ranges requested from a donor at once, enough for a link of 1 Gbit/s and 40 ms (a range has up to 8 MiB)
# maximum requests from one peer that this peer answers at the same time: the RANGES that a peer sends at once, and one
# more, since this peer may still be answering a request that the other peer has just cancelled
PULLS = RANGES + 1
LOOK = 1.0  # seconds between two checks for silent donors


class PullTransport(Protocol):
    def reach_of(self, peer_id: str) -> Reach | None: ...
    async def pull(
        self, peer_id: str, name: str, header: bytes, max_bytes: int, timeout: float
    ) -> tuple[bytes, bytearray]: ...
    async def on_pull(self, name: str, serve: Serve, gives_way: bool = False) -> None: ...
    def check_admitted(self, run_id: str, peer_id: str) -> None: ...


def _best_first(transport: PullTransport, donors: Collection[str]) -> list[str]:
    """Return the donors sorted by reach: direct ones first, unreachable ones last. Ties stay in their order."""
    return sorted(donors, key=lambda donor: RANK[transport.reach_of(donor)])


def shuffled(transport: PullTransport, donors: Collection[str]) -> list[str]:
    """Return the donors sorted by reach: direct ones first, unreachable ones last. Ties are in random order."""
    return _best_first(transport, CHANCE.sample(list(donors), len(donors)))


def to_ask(transport: PullTransport, donors: Sequence[str], most: int) -> list[str]:
    """Return at most `most` donors to ask for an offer: the first of `donors`, then the others sorted by reach, in
    random order where the reach is equal.

    Unreachable donors are left out, unless there are no others.
    """
    ordered = [*donors[:1], *shuffled(transport, donors[1:])]
    reachable = [donor for donor in ordered if transport.reach_of(donor) is not Reach.NONE]
    return (reachable or ordered)[:most]


@dataclass(frozen=True)
class _Request:
    donor: str
    size: int  # size of the range in bytes
    at: float  # time of the request on the event loop's clock, in seconds


class _DonorPace:
    """The pace of each donor, in seconds per byte, measured on the ranges that the donor has sent."""

    def __init__(self) -> None:
        self._seconds_per_byte: dict[str, float] = {}

    def answered(self, request: _Request, now: float) -> None:
        """Record that a donor has sent a range. In the donor's pace this range counts as much as all earlier ones."""
        latest = (now - request.at) / max(1, request.size)
        self._seconds_per_byte[request.donor] = (self._seconds_per_byte.get(request.donor, latest) + latest) / 2

    def seconds(self, donor: str, size: int) -> float:
        """Return the seconds that a donor is expected to need for `size` bytes."""
        return size * self._seconds_per_byte[donor] if donor in self._seconds_per_byte else SILENT

    def seconds_left(self, request: _Request, now: float) -> float:
        """Return the seconds until a donor is expected to complete a pending request.

        A donor that has taken twice its usual time, or has given nothing so far, is expected to need as long again.
        """
        elapsed, usual = now - request.at, request.size * self._seconds_per_byte.get(request.donor, 0.0)
        return elapsed if elapsed > 2 * usual else max(0.0, usual - elapsed)


logger = logging.getLogger(__name__)


Kept = TypeVar("Kept")


def kept_for(transport: PullTransport, kept: Mapping[str, Kept], run: str, sender: str) -> Kept:
    """Return `kept[run]`, to answer a request of `sender` with it. Raises: RefusalError when `kept` does not have the
    run, or `sender` is not admitted to the run."""
    if run not in kept:
        raise RefusalError(f"run {run} is not here")
    transport.check_admitted(run, sender)
    return kept[run]


class DownloadError(Exception):
    """Error: no donor is left before the download is complete. The message lists why each donor failed."""


@dataclass(frozen=True)
class Wanted:
    """A description of the data to fetch: its chunks, and the requests that fetch them."""

    name: str  # name of the kind of data, such as "payload"
    digests: Sequence[bytes]  # digests of the chunks, in order
    bounds: Callable[[int, int], tuple[int, int]]  # returns the byte offsets [start, stop) of the chunks [first, last)
    request: Callable[[int, int], bytes]  # returns the header of a request for the chunks [first, last)
    range: int  # maximum number of chunks in one request


Range: TypeAlias = tuple[int, int]
"""Chunks [first, last)."""


class Download:
    """A download that fills `data` from several donors. `fetched` counts the bytes from each donor."""

    def __init__(self, transport: PullTransport, wanted: Wanted, data: memoryview) -> None:
        self._transport = transport
        self.fetched = Counter[str]()
        self._wanted = wanted
        self._data = data
        self._missing = deque(_ranges(range(len(wanted.digests)), wanted.range))
        # by range, the pending requests for it; the range that was requested first comes first
        self._asked: dict[Range, dict[asyncio.Task[tuple[bytes, bytearray]], _Request]] = {}
        self._reasons: dict[str, str] = {}  # the reason why each failed donor was given up, by donor
        # by worker task: the donor from which the task fetches ranges, one after another
        self._workers: dict[asyncio.Task[None], str] = {}
        self._gave_at: dict[str, float] = {}  # time in seconds of each donor's last range, or of its first request
        self._pace = _DonorPace()
        self._changed = asyncio.Event()
        self._now = asyncio.get_running_loop().time

    @property
    def size(self) -> int:
        """The number of bytes of the whole data, including chunks from an interrupted download."""
        first, last = self._wanted.bounds(0, len(self._wanted.digests))
        return last - first

    async def adopt(self) -> int:
        """Check the chunks in `data` that an interrupted download has left, so that only wrong chunks are fetched
        again. Return the number of right chunks."""
        missing = await asyncio.to_thread(self._wrong_chunks)
        self._missing = deque(_ranges(missing, self._wanted.range))
        return len(self._wanted.digests) - len(missing)

    async def run(self, donors: Sequence[str]) -> None:
        """Fetch all missing chunks, from the donors with the best reach first. Call this once for each download.

        Raises: DownloadError when no donor is left; the chunks that have arrived stay in `data`.
        """
        waiting = deque(_best_first(self._transport, donors))
        try:
            while not self._is_done:
                self._forget_those_that_ended()
                self._ask_more_of(waiting)
                if not self._workers:
                    raise DownloadError("; ".join(self._reasons.values()) or "there was no peer to ask")
                await self._wait_for_worker()
        finally:
            await cancel_and_wait(*self._workers)
            self._data = memoryview(b"")  # release the data, since tracebacks of failed pulls refer to this object

    def _ask_more_of(self, waiting: deque[str]) -> None:
        """Start workers for waiting donors while PLACES allows more donors. Each of these donors is asked for one range
        before any of them is asked for a second."""
        begun: list[str] = []
        while waiting and self._has_place_for(waiting[0], begun):
            begun.append(waiting.popleft())
        self._gave_at.update(dict.fromkeys(begun, self._now()))
        for donor in begun * RANGES:
            worker = asyncio.create_task(self._work(donor))
            worker.add_done_callback(lambda _: self._notify())
            self._workers[worker] = donor

    def _forget_those_that_ended(self) -> None:
        for worker in [worker for worker in self._workers if worker.done()]:
            del self._workers[worker]
            worker.result()  # raises the worker's error, if any, which no donor has caused

    def _has_place_for(self, donor: str, begun: Sequence[str]) -> bool:
        """Return True if one more donor may be asked. Fewer donors than the limit in PLACES for its reach must be at
        work without being silent, and fewer than twice that limit must be at work in all."""
        places, at_work = PLACES[self._transport.reach_of(donor)], set(self._workers.values())
        silent = sum(self._now() - self._gave_at[donor] > SILENT for donor in at_work)
        return len(at_work) + len(begun) - min(silent, places) < places

    async def _work(self, donor: str) -> None:
        """Fetch ranges from a donor until the download is complete, or the donor fails."""
        while not self._is_done and donor not in self._reasons:
            wanted = self._choose(donor)
            if wanted is None:
                await self._changed.wait()
                continue
            try:
                await self._fetch(donor, wanted)
            except (PeerUnreachableError, RemoteProtocolError) as error:
                logger.debug("%s", error)
                workers = sum(other == donor and not worker.done() for worker, other in self._workers.items())
                if isinstance(error, PeerRefusedError) and workers > 1:
                    return  # the donor answers fewer requests at once than it has workers here, so end only this worker
                self._reasons[donor] = str(error)
            finally:
                self._notify()

    def _choose(self, donor: str) -> Range | None:
        """Return a range that is not requested yet. If there is none, return a range that this donor is expected to
        send sooner than every donor that was asked for it; otherwise None."""
        if self._missing:
            return self._missing.popleft()
        now = self._now()
        for wanted, requests in self._asked.items():
            start, stop = self._wanted.bounds(*wanted)
            ours = self._pace.seconds(donor, stop - start)
            if all(
                request.donor != donor and self._pace.seconds_left(request, now) > ours for request in requests.values()
            ):
                return wanted
        return None

    async def _fetch(self, donor: str, wanted: Range) -> None:
        """Fetch a range from a donor, unless another donor sends it first. If this fails, and no other donor is being
        asked for the range, mark it as missing again."""
        start, stop = self._wanted.bounds(*wanted)
        message = self._wanted.request(*wanted)
        request = _Request(donor, stop - start, self._now())
        pull = asyncio.create_task(self._transport.pull(donor, self._wanted.name, message, stop - start, MOST))
        self._asked.setdefault(wanted, {})[pull] = request
        try:
            await asyncio.wait([pull])
            if wanted in self._asked and not pull.cancelled():
                _, chunks = pull.result()
                self._check(donor, wanted, chunks)
                self._pace.answered(request, self._now())
                self._take(donor, wanted, chunks)
        finally:
            await cancel_and_wait(pull)
            requests = self._asked.get(wanted, {})
            if requests.pop(pull, None) and not requests:
                del self._asked[wanted]
                self._missing.appendleft(wanted)

    def _check(self, donor: str, wanted: Range, chunks: bytearray) -> None:
        """Raise RemoteProtocolError unless each chunk of a range has the right digest."""
        start, _ = self._wanted.bounds(*wanted)
        for chunk in range(*wanted):
            first, last = self._wanted.bounds(chunk, chunk + 1)
            if digest_of(memoryview(chunks)[first - start : last - start]) != self._wanted.digests[chunk]:
                raise RemoteProtocolError(donor, f"chunk {chunk} of its {self._wanted.name} is not the run's")

    def _take(self, donor: str, wanted: Range, chunks: bytearray) -> None:
        start, stop = self._wanted.bounds(*wanted)
        self._data[start:stop] = chunks
        self.fetched[donor] += stop - start
        self._gave_at[donor] = self._now()
        for pull in self._asked.pop(wanted):
            pull.cancel()  # cancel the requests for this range to other donors; the one to this donor is done

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

    async def _wait_for_worker(self) -> None:
        """Wait until a worker has fetched a range or has failed, at most LOOK seconds. Then idle workers choose a range
        again."""
        try:
            async with asyncio.timeout(LOOK):
                await self._changed.wait()
        except TimeoutError:
            self._notify()


def _ranges(chunks: Sequence[int], size: int) -> list[Range]:
    """Return the ranges [first, last) of consecutive numbers in `chunks`, each of at most `size` chunks."""
    ranges: list[Range] = []
    for chunk in chunks:
        if ranges and ranges[-1][1] == chunk and chunk - ranges[-1][0] < size:
            ranges[-1] = (ranges[-1][0], chunk + 1)
        else:
            ranges.append((chunk, chunk + 1))
    return ranges
