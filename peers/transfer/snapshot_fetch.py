"""Getting a snapshot: one that the log vouches for and most peers have, and its chunks from all of them at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from peers.errors import RemoteProtocolError
from peers.log.header import UNKNOWN_STATE, Position
from peers.log.lineage import Branch
from peers.log.state import LogState
from peers.network.channel import PeerUnreachableError
from peers.transfer.download import Download, DownloadError, PullTransport, Wanted, to_ask
from peers.transfer.snapshots import SNAPSHOT, FrozenSnapshot, SnapshotOffer, SnapshotRequest
from peers.transfer.storage import Storage
from peers.values.chunks import StateChunking, chunks_of
from peers.values.wire import DIGEST_BYTES, pack, unpack_from
from peers.values.workload import SnapshotError

ASKED = 16  # peers that are asked what they have
OFFER_TIMEOUT = 60.0  # seconds for that: all wait for the slowest, who may have to finish an outer step first
PATIENCE, PAUSE = 10.0, 1.0  # seconds for which the log may not vouch yet, and before it is looked at again
RANGES = 64  # at least, if there are as many chunks, so that the last ones are not long
RANGE = 8  # chunks asked for at once, at most
DIGESTS_LIMIT = 1 << 26  # bytes; of a state of two TiB
MEMORY_SHARE = 4096  # of free memory digests may have one such part: enough for a state of eight times the memory


@dataclass(frozen=True)
class Offered:
    """An offer, and the digests of the chunks that it is made of."""

    offer: SnapshotOffer
    position: Position
    chunk_digests: tuple[bytes, ...]


class NotYetVouchedError(SnapshotError):
    """The log vouches for none of what is offered. It may soon: of one heartbeats or the next entry say what it is."""


@dataclass(frozen=True)
class Vouched:
    """The snapshots that a branch of the log vouches for, of outer step `least` or later.

    An entry says which state it follows. Where the branch ends, and where too few went on, those who are here tell what
    the state is: `told` returns that of such a place, as `state_told` does. While those who could say do not, none is
    taken there, however many offer one: it may be that only liars have one that is new enough.
    Whoever `is_wary` takes a snapshot before an entry that too few have signed, if there is one.
    """

    branch: Branch
    told: Callable[[LogState], bytes | None] = lambda place: None
    least: int = 0
    is_wary: bool = False

    def _may_be(self, position: Position) -> bool:
        return self.least <= position.index and self.branch.has(position)

    def _state_at(self, index: int) -> bytes | None:
        """What too few have signed says nothing against those who are here: anybody may put such an entry after the
        others."""
        place = self._places.get(index)
        told = self.told(place) if place is not None else None
        return self.branch.states.get(index) or told or self.branch.claimed.get(index)

    @cached_property
    def _places(self) -> dict[int, LogState]:
        """Where others may tell what the state is: in the end, and where what too few have signed claims it."""
        claimed = (place for place in self.branch.doubts if place.position.index in self.branch.claimed)
        return {place.position.index: place for place in (*claimed, self.branch.end)}

    def _doubts(self, position: Position) -> int:
        """Return how many entries before a place too few have signed, where that matters."""
        return self.is_wary and sum(doubt.position.index < position.index for doubt in self.branch.doubts)

    def choose(self, offered: Mapping[str, Offered]) -> list[str]:
        """Return who has the one that most have, the newer one if as many have two. Raises: SnapshotError."""
        votes = Counter((offer.position, offer.offer.state_digest) for offer in offered.values())
        good = {
            (place, state): count
            for (place, state), count in votes.items()
            if self._may_be(place) and self._state_at(place.index) in (None, state)
        }
        best = max(good, key=lambda vote: (-self._doubts(vote[0]), good[vote], vote[0].index, vote[1]), default=None)
        untold = [place for place, _ in votes if self._may_be(place) and self._state_at(place.index) == UNKNOWN_STATE]
        if untold and (best is None or min(map(self._doubts, untold)) < self._doubts(best[0])):
            raise NotYetVouchedError(f"nobody says which state of outer step {untold[0].index} is the run's")
        if best is None:
            raise SnapshotError(f"nobody has a snapshot of outer step {self.least} or later that the log vouches for")
        return [donor for donor, offer in offered.items() if (offer.position, offer.offer.state_digest) == best]


async def fetch_snapshot(
    transport: PullTransport,
    donors: Sequence[str],
    log: LogState,
    least: int,
    vouch: Callable[[], Awaitable[Vouched]],
    storage: Storage,
    size: int,
    on_download: Callable[[Download], None] = lambda download: None,
) -> FrozenSnapshot:
    """Fetch the snapshot of `size` bytes, of outer step `least` or later, that most donors have.

    `vouch` says which of them the log vouches for; it is asked when the donors have said what they have, so that it
    knows of what is as new, and again while it does not vouch yet. `on_download` is told of the download when it
    begins.

    Raises: SnapshotError when there is none, or no donor is left before all of it is here; OSError when there is no
    room; whatever `vouch` raises.
    """
    chunking = StateChunking(size)
    limit = DIGEST_BYTES * chunking.count
    offered = await _offers(transport, donors, log, least, limit, size)
    having = await _choose(offered, vouch)
    chosen = offered[having[0]]
    head = chosen.position.head
    pulled = Wanted(
        name=SNAPSHOT,
        digests=chosen.chunk_digests,
        bounds=chunking.bounds,
        request=lambda first, last: pack(SnapshotRequest(run=log.run, head=head, least=0, first=first, last=last)),
        range=max(1, min(RANGE, chunking.count // RANGES)),
    )
    memory = await asyncio.to_thread(storage.download, chosen.offer.state_digest, size)
    download = Download(transport, pulled, memory.data)
    if not memory.is_new:
        await download.adopt()
    on_download(download)
    try:
        await download.run(having)
    except DownloadError as error:
        raise SnapshotError(str(error)) from error
    storage.downloaded()
    offer = chosen.offer
    return FrozenSnapshot(offer.last, offer.state_digest, chosen.chunk_digests, memory.data, offer.ends, memory=memory)


async def _choose(offered: Mapping[str, Offered], vouch: Callable[[], Awaitable[Vouched]]) -> list[str]:
    """Who has the snapshot to take, as soon as the log vouches for one. Raises: SnapshotError; what `vouch` raises."""
    clock = asyncio.get_running_loop()
    until = clock.time() + PATIENCE
    while True:
        try:
            return (await vouch()).choose(offered)
        except NotYetVouchedError:
            if clock.time() >= until:
                raise
        await asyncio.sleep(PAUSE)


async def _offers(
    transport: PullTransport, donors: Sequence[str], log: LogState, least: int, limit: int, size: int | None = None
) -> dict[str, Offered]:
    """Return what each donor has, but for those that do not say, have another `size`, or digests beyond the limit. Of
    too many donors the first is asked, and others by chance.

    Raises: SnapshotError when nobody is left.
    """
    asked = to_ask(transport, donors, ASKED)
    asking = (_ask_offer(transport, donor, log, least, limit, size) for donor in asked)
    answers = await asyncio.gather(*asking, return_exceptions=True)
    offered: dict[str, Offered] = {}
    reasons: list[str] = []
    for donor, answer in zip(asked, answers, strict=True):
        if isinstance(answer, Offered):
            offered[donor] = answer
        elif isinstance(answer, PeerUnreachableError | RemoteProtocolError):
            reasons.append(str(answer))
        else:
            raise answer
    if not offered:
        raise SnapshotError("; ".join(reasons) or "nobody was asked")
    return offered


async def ask_size(transport: PullTransport, donors: Sequence[str], log: LogState, memory: int) -> int:
    """Return the bytes of the run's state, as most donors say: for who has not built the model.

    `memory` is what is free: who lies about the size may not fill it with digests.

    Raises: SnapshotError when nobody says.
    """
    limit = min(DIGESTS_LIMIT, memory // MEMORY_SHARE)
    offered = await _offers(transport, donors, log, 0, limit)
    [(size, _)] = Counter(one.offer.bytes for one in offered.values()).most_common(1)
    return size


async def _ask_offer(
    transport: PullTransport, donor: str, log: LogState, least: int, limit: int, size: int | None
) -> Offered:
    """Return what snapshot a donor has. Raises: PeerUnreachableError, RemoteProtocolError."""
    request = pack(SnapshotRequest(run=log.run, head=None, least=least, first=0, last=0))
    packed, digests = await transport.pull(donor, SNAPSHOT, request, limit, OFFER_TIMEOUT)
    offer = unpack_from(donor, SnapshotOffer, packed)
    chunks = chunks_of(donor, SNAPSHOT, digests, StateChunking(offer.bytes).count, offer.state_digest)
    if offer.last is not None and offer.last.run != log.run:
        raise RemoteProtocolError(donor, f"its snapshot is of run {offer.last.run}")
    if not log.may_end_with(offer.last, offer.ends):
        raise RemoteProtocolError(donor, "its snapshot is not of the end of a cycle")
    if size not in (None, offer.bytes):
        raise RemoteProtocolError(donor, f"its snapshot has {offer.bytes} bytes, not {size}")
    return Offered(offer, log.at(offer.last, offer.ends).position, chunks)
