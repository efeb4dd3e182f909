"""Snapshots of the outer state: copied while training continues, held for a while, and sent to peers that join. A
joining peer fetches the snapshot that most peers have, among those that the log vouches for.

After every `snapshot_every`-th cycle each peer copies momentum and theta; in larger swarms a few peers do, in turn. The
state at one place in the log is the same on all peers, and so are its digests. A joiner takes the snapshot on which
most peers agree, and fetches its chunks from all of them at once. A peer that holds none makes one on request, and so
does a peer whose snapshot is too old for the joiner.

There is room for two snapshots, of 8 bytes a parameter each, whatever others ask for. The first place holds the newest
one of a chosen entry. It is served to all joiners for which it is new enough, so that they find the same one at many
donors. The second place holds one that is still being fetched: the one before, or one that was frozen because a joiner
asked for a newer one. In an open run identities cost nothing, so no rule counts the joiners: the snapshot in the second
place has a time limit, and one that a joiner asked for gives way to one of a chosen entry. So no peer can keep another
from having a new snapshot for others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Protocol

from pydantic import Field

from peers.errors import RemoteProtocolError
from peers.log.chain import STRETCH_LIMIT
from peers.log.header import UNKNOWN_STATE, Header, Position
from peers.log.lineage import Branch
from peers.log.state import LogState
from peers.network.channel import PeerUnreachableError, Places, RefusalError
from peers.protocol.peer import Peer
from peers.transfer.download import PULLS, Download, DownloadError, PullTransport, Wanted, kept_for, to_ask
from peers.transfer.storage import MemoryFile, Storage
from peers.values.chunks import StateChunking, chunk_digests, chunks_of, digest_of_chunks
from peers.values.wire import DIGEST_BYTES, Buffer, Count, Digest, RunId, Value, pack, unpack_from
from peers.values.workload import SnapshotError, Workload

SNAPSHOT = "snapshot"
READERS = 16  # maximum requests from live peers of the run that this peer answers at the same time
# maximum requests from other processes, such as `export`, that this peer answers at the same time
STRANGERS = 6
OFFERED = 15.0  # seconds for which a snapshot is held after an offer, even if it is no longer the newest
IN_USE = 60.0  # seconds for which a snapshot is held after a joiner last fetched chunks of it
LEAVE = 600.0  # minimum seconds for which joiners may fetch an extra snapshot (see _SnapshotCache)
SLOWEST_JOINER = 500_000  # bytes a second; joiners may fetch a snapshot for at least its size divided by this rate
SETTLE_TIMEOUT = 20.0  # maximum seconds for which a joiner waits for this peer to finish an outer step
NOT_YET = "the snapshot is made when the outer step under way ends; ask again then"
NO_ROOM = "as many snapshots as there is room for are being fetched; ask again later"
SNAPSHOT_PEERS = 8  # maximum number of peers chosen to make a snapshot after one cycle
ASKED = 16  # maximum number of peers that a joiner asks for an offer
OFFER_TIMEOUT = 60.0  # seconds for an offer: the slowest peer may have to finish an outer step first
PATIENCE, PAUSE = 10.0, 1.0  # maximum seconds to wait until the log vouches for a snapshot; seconds between two checks
RANGES_AT_LEAST = 64  # minimum requests for one snapshot with enough chunks, so that no donor idles at its end
RANGE = 8  # maximum number of chunks in one request for a snapshot
DIGESTS_LIMIT = 1 << 26  # maximum bytes of the digests of a snapshot's chunks: enough for a state of 2 TiB
# Chunk digests in an offer may use 1/MEMORY_SHARE of free memory, enough for a state of 8 times the free memory.
MEMORY_SHARE = 4096


class SnapshotRequest(Value):
    """A request for the chunks [first, last) of the snapshot at `head`. If `head` is None, the request is for an offer
    of a snapshot of outer step `least` or later."""

    run: RunId
    head: Digest | None
    least: Count
    first: Count
    last: Count


class SnapshotOffer(Value):
    """A donor's offer of a snapshot, sent together with the digests of the snapshot's chunks.

    `last` is the entry that closes its last cycle (None: before the first), and `ends` are the digests of all entries
    of that cycle.
    """

    last: Header | None
    bytes: Count
    state_digest: Digest
    ends: Annotated[tuple[Digest, ...], Field(max_length=STRETCH_LIMIT)] = ()


@dataclass(eq=False)
class Snapshot:
    """The run's state after a cycle. The header `last` closes the cycle, whose entries have the digests `ends`.

    Its memory is released when no reference to it is left.
    """

    last: Header | None
    state_digest: bytes
    chunk_digests: tuple[bytes, ...]
    data: memoryview
    ends: tuple[bytes, ...] = ()
    used_at: float = field(default=-IN_USE)
    offered_at: float = field(default=-IN_USE)
    _pulls: set[asyncio.Timeout] = field(default_factory=set, init=False)

    @property
    def index(self) -> int:
        """The number of cycles whose outer steps the snapshot contains."""
        return self.last.index + 1 if self.last else 0

    def is_in_use(self, now: float) -> bool:
        """Return True if a peer seems to be fetching the snapshot at the time `now`, in seconds of time.monotonic."""
        return bool(self._pulls) or self.used_at > now - IN_USE or self.offered_at > now - OFFERED

    @asynccontextmanager
    async def being_read(self) -> AsyncIterator[None]:
        """Mark the snapshot as in use during the `with` block, in which this peer sends chunks of it to a joiner.
        Raises: TimeoutError if `let_go` is called in the block."""
        async with asyncio.timeout(None) as pull:
            self._pulls.add(pull)
            try:
                yield
            finally:
                self._pulls.discard(pull)
                self.used_at = time.monotonic()

    def let_go(self) -> None:
        """Stop sending the snapshot to joiners, since each transfer keeps the snapshot's memory in use."""
        for pull in self._pulls:
            pull.reschedule(asyncio.get_running_loop().time())


@dataclass(eq=False)
class FrozenSnapshot(Snapshot):
    """A snapshot whose bytes are in a MemoryFile, which a child process may inherit."""

    memory: MemoryFile = field(kw_only=True)


class SnapshotSource(Protocol):
    """The interface of an object that holds one run's snapshots."""

    def is_member(self, peer: str) -> bool: ...
    async def newest(self, least: int) -> Snapshot:
        """Return a snapshot of outer step `least` or later. Raises: RefusalError when there is none."""

    def held(self, head: bytes) -> Snapshot | None:
        """Return the held snapshot at a head of the log; None if there is none."""


async def serve_snapshots(transport: PullTransport, sources: Mapping[str, SnapshotSource]) -> None:
    """Begin to answer requests for the snapshots of these runs."""
    places, places_for_strangers = Places(READERS, PULLS), Places(STRANGERS, PULLS)

    @asynccontextmanager
    async def serve(sender: str, packed: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
        request = unpack_from(sender, SnapshotRequest, packed)
        source = kept_for(transport, sources, request.run, sender)
        async with (places if source.is_member(sender) else places_for_strangers).one_for(sender):
            if request.head is None:
                snapshot = await source.newest(request.least)
                snapshot.offered_at, size = time.monotonic(), len(snapshot.data)
                offer = SnapshotOffer(
                    last=snapshot.last, bytes=size, state_digest=snapshot.state_digest, ends=snapshot.ends
                )
                yield pack(offer), b"".join(snapshot.chunk_digests)
                return
            held = source.held(request.head)
            if held is None:
                raise RefusalError("that snapshot is not here any more")
            chunking = StateChunking(len(held.data))
            if not request.first < request.last <= chunking.count:
                raise RemoteProtocolError(sender, f"there are no chunks {request.first} to {request.last}")
            start, stop = chunking.bounds(request.first, request.last)
            async with held.being_read():
                yield b"", held.data[start:stop]

    await transport.on_pull(SNAPSHOT, serve, gives_way=True)


class _SnapshotCache:
    """The store of a peer's snapshots: at most two, each with the head of the log at its position.

    Joiners are offered the *main* snapshot first. The *extra* one was made for a joiner that asked, or it is the former
    main one, and a peer still fetches it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._main: tuple[bytes, Snapshot] | None = None
        self._extra: tuple[bytes, Snapshot] | None = None
        self._is_asked_for = False
        """True if the extra snapshot was made for a joiner, so that it is not a former main one."""
        self._leaves_at = 0.0

    def held(self, head: bytes) -> Snapshot | None:
        return next((snapshot for at, snapshot in self._all if at == head), None)

    def new_enough(self, least: int) -> Snapshot | None:
        """Return a held snapshot of outer step `least` or later; None if there is none. Prefer the main one,
        which other peers have, too, to the extra one, which was made for one joiner.

        A former main one is not returned, because it may be of a branch that this peer has left.
        """
        given = self._all if self._is_asked_for else self._all[:1]
        return next((snapshot for _, snapshot in given if snapshot.index >= least), None)

    def reuse(self, head: bytes) -> bool:
        """Return True if the snapshot at this head is held. If it is the extra one, make it the main one, which joiners
        are offered first."""
        snapshot = self.held(head)
        if snapshot is not None and self._extra is not None and self._extra[1] is snapshot:
            self.add_chosen(head, snapshot)
        return snapshot is not None

    def has_room(self, is_chosen: bool) -> bool:
        """Return True if there is room for another snapshot: one that is due (`is_chosen`), or that a joiner asked for.

        Drop the extra one if no peer fetches it any more, its time is over, or a chosen one replaces it.
        """
        if self._extra is None:
            return True
        now, (_, snapshot) = self._clock(), self._extra
        if snapshot.is_in_use(now) and now < self._leaves_at and not (is_chosen and self._is_asked_for):
            return False
        self._drop_extra()
        return True

    def add_chosen(self, head: bytes, snapshot: Snapshot) -> None:
        """Store a snapshot as the main one, which joiners are offered first. If a peer still fetches the former main
        one, keep that as the extra one."""
        before, self._main = self._main, (head, snapshot)
        if before is not None and before[0] != head and before[1].is_in_use(self._clock()):
            self._put_extra(*before, is_asked_for=False)
        elif self._extra is not None and self._extra[0] == head:
            self._extra = None

    def add_asked_for(self, head: bytes, snapshot: Snapshot) -> None:
        """Store a snapshot that a joiner asked for as the extra one, which is dropped first. If there is no main one,
        store it as the main one."""
        if self._main is None:
            self._main = head, snapshot
        else:
            self._put_extra(head, snapshot, is_asked_for=True)

    def _drop_extra(self) -> None:
        if self._extra is not None:
            self._extra[1].let_go()
            self._extra = None

    def _put_extra(self, head: bytes, snapshot: Snapshot, is_asked_for: bool) -> None:
        if self._extra is not None and self._extra[1] is not snapshot:
            self._drop_extra()
        self._extra, self._is_asked_for = (head, snapshot), is_asked_for
        self._leaves_at = self._clock() + max(LEAVE, len(snapshot.data) / SLOWEST_JOINER)

    @property
    def _all(self) -> list[tuple[bytes, Snapshot]]:
        return [one for one in (self._main, self._extra) if one is not None]


logger = logging.getLogger(__name__)


class _Host(Protocol):
    async def until(self, condition: Callable[[Peer], bool]) -> None: ...
    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]: ...


class Snapshotter:
    """The maker and holder of one peer's snapshots.

    `state_lock` is held while theta and momentum change, and while the pseudo-gradient is computed from them. Copying a
    snapshot, which may take long on a disk, delays only changes.

    `on_snapshot` is called with every snapshot that is frozen at a chosen entry or taken over. It is not called with
    one that a joiner has asked for, so that strangers cannot cause a checkpoint.
    """

    def __init__(
        self,
        peer: Peer,
        workload: Workload,
        storage: Storage,
        host: _Host,
        on_snapshot: Callable[[FrozenSnapshot], None] = lambda snapshot: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state_lock = asyncio.Lock()
        self._copy_lock = asyncio.Lock()
        self._on_snapshot = on_snapshot
        self._peer = peer
        self._workload = workload
        self._storage = storage
        self._host = host
        self._cache = _SnapshotCache(clock)
        self._freezing = asyncio.Lock()
        self._on_demand: asyncio.Task[None] | None = None
        self._refusal = ""  # reason why the last snapshot that a joiner asked for was not made; empty if it was made

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Lock the state for a change, so that no task reads the state meanwhile."""
        async with self._copy_lock, self.state_lock:
            yield

    def is_member(self, peer: str) -> bool:
        return self._peer.is_live(peer)

    def held(self, head: bytes) -> Snapshot | None:
        return self._cache.held(head)

    async def newest(self, least: int) -> Snapshot:
        """Return a snapshot of outer step `least` or later. Make one if this peer holds none. Raises: RefusalError when
        this peer cannot make one."""
        if self._peer.log.position.index < least:
            raise RefusalError(f"this peer has not reached outer step {least}; ask a peer that has")
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT):
                while (snapshot := self._cache.new_enough(least)) is None:
                    if self._on_demand is None or self._on_demand.done():
                        self._on_demand = self._host.start(self._freeze_on_demand())
                    # this task continues even if the joiner stops waiting, because the next joiner can use its snapshot
                    await asyncio.wait([self._on_demand])
                    if self._refusal:
                        raise RefusalError(self._refusal)
        except TimeoutError:
            raise RefusalError(NOT_YET) from None
        return snapshot

    async def _freeze_on_demand(self) -> None:
        self._refusal = ""
        try:
            await self._host.until(lambda peer: peer.is_at_cycles_end)
            if not await self._freeze():
                self._refusal = NO_ROOM
        except (OSError, SnapshotError) as error:
            logger.warning("no snapshot for a joining peer: %s", error)
            self._refusal = "this peer cannot make a snapshot; ask another one"

    def hold(self, snapshot: FrozenSnapshot) -> None:
        """Hold this snapshot as the one that joiners are offered first. Hold the one before it only if a peer still
        fetches it."""
        self._cache.add_chosen(self._peer.log.at(snapshot.last, snapshot.ends).position.head, snapshot)
        self._on_snapshot(snapshot)

    async def freeze_if_due(self) -> None:
        """Make a snapshot of the state after a cycle, if it is this peer's turn, or the peer holds none yet.

        Amid a cycle of several entries nothing can be frozen on request, so a peer should hold one. Raises: OSError,
        SnapshotError.
        """
        log = self._peer.settled
        if (self._is_chosen(log) or self._cache.new_enough(0) is None) and not await self._freeze(log.position):
            logger.debug(
                "made no snapshot of outer step %d: another peer still fetches an older one. Harmless: joiners replay "
                "the entries since",
                log.position.index,
            )

    async def _freeze(self, place: Position | None = None) -> bool:
        """Make a snapshot of the present state, unless a `place` is given and the state is no longer there. Return
        False if there was no room for another snapshot, otherwise True.

        Raises: OSError, without memory; SnapshotError, when the state is corrupt.
        """
        async with self._freezing:
            if self._cache.reuse(self._peer.settled.position.head):
                return True
            if not self._cache.has_room(self._is_chosen(self._peer.settled)):
                return False
            memory = await asyncio.to_thread(self._storage.snapshot, self._workload.state_size)
            async with self._copy_lock:
                log, state_digest = self._peer.settled, self._peer.state_digest
                if not self._peer.is_at_cycles_end or place not in (None, log.position):
                    return True
                await self._workload.copy_state(memory.data)
            digests = await asyncio.to_thread(chunk_digests, [memory.data])
            if digest_of_chunks(digests) != state_digest:
                raise SnapshotError(f"the state at {log.position} is not the one that its digest names")
            snapshot = FrozenSnapshot(log.last, state_digest, digests, memory.data, log.ends, memory=memory)
            if self._is_chosen(log):
                self.hold(snapshot)
            else:
                self._cache.add_asked_for(log.position.head, snapshot)
            return True

    def _is_chosen(self, log: LogState) -> bool:
        return _is_chosen(self._peer.me, log, self._peer.settings.snapshot_every)


def _is_chosen(me: str, log: LogState, every: int) -> bool:
    """Return True if the peer `me` is chosen to make a snapshot at the end of `log`. After every `every`-th cycle,
    SNAPSHOT_PEERS peers of the roster are chosen, in turn."""
    if log.position.index % every:
        return False
    roster = log.roster
    if len(roster) <= SNAPSHOT_PEERS:
        return True
    turn = log.position.index // every
    return me in roster and (roster.index(me) - turn * SNAPSHOT_PEERS) % len(roster) < SNAPSHOT_PEERS


# Fetching a snapshot --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Offered:
    """A donor's offer, with the snapshot's position in the log and the digests of its chunks."""

    offer: SnapshotOffer
    position: Position
    chunk_digests: tuple[bytes, ...]


class NotYetVouchedError(SnapshotError):
    """Error: the log vouches for no offered snapshot yet. Heartbeats or the next entry may soon name the digest of an
    offered state."""


@dataclass(frozen=True)
class Vouched:
    """The rules for offered snapshots: the position must be on `branch`, at outer step `least` or later, and entries or
    live peers (`reported`) must name the state. If `is_wary`, snapshots before doubtful entries are preferred.

    An entry names the state that it follows. At the branch's end, and where only an entry that too few have signed
    names the state, live peers report it in their heartbeats; `reported` returns their report, as `reported_state`
    does. Until they report it, no snapshot of that place is taken, however many peers offer one, since all of them may
    be liars. Doubtful entries are those that too few voters have signed.
    """

    branch: Branch
    reported: Callable[[LogState], bytes | None] = lambda place: None
    least: int = 0
    is_wary: bool = False

    def _may_be(self, position: Position) -> bool:
        return self.least <= position.index and self.branch.has(position)

    def _state_at(self, index: int) -> bytes | None:
        """Return the digest of the state after `index` cycles: the one that a certified entry names, else the one that
        live peers report, else the one that an entry with too few signatures claims. Return None if it is unknown.

        Reports come before the claim, because any peer may append such an entry.
        """
        place = self._places.get(index)
        reported = self.reported(place) if place is not None else None
        return self.branch.states.get(index) or reported or self.branch.claimed.get(index)

    @cached_property
    def _places(self) -> dict[int, LogState]:
        """The logs whose state no certified entry names, so that live peers must report it, by index: the log up to the
        end of `branch`, and the log before each entry that names a state but is not certified."""
        claimed = (place for place in self.branch.doubts if place.position.index in self.branch.claimed)
        return {place.position.index: place for place in (*claimed, self.branch.end)}

    def _doubts(self, position: Position) -> int:
        """Return the number of entries of `branch` before a position that are not certified; 0 unless `is_wary`."""
        return self.is_wary and sum(doubt.position.index < position.index for doubt in self.branch.doubts)

    def choose(self, offered: Mapping[str, Offered]) -> list[str]:
        """Choose the snapshot that most donors offer, among those that the log vouches for; if two have equally many
        donors, the newer one. Return its donors. Raises: SnapshotError."""
        votes = Counter((offer.position, offer.offer.state_digest) for offer in offered.values())
        good = {
            (place, state): count
            for (place, state), count in votes.items()
            if self._may_be(place) and self._state_at(place.index) in (None, state)
        }
        best = max(good, key=lambda vote: (-self._doubts(vote[0]), good[vote], vote[0].index, vote[1]), default=None)
        unknown = [place for place, _ in votes if self._may_be(place) and self._state_at(place.index) == UNKNOWN_STATE]
        if unknown and (best is None or min(map(self._doubts, unknown)) < self._doubts(best[0])):
            raise NotYetVouchedError(f"no peer reports the digest of the run's state at outer step {unknown[0].index}")
        if best is None:
            raise SnapshotError(f"no peer has a snapshot of outer step {self.least} or later that the log vouches for")
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
    """Fetch and return the snapshot of `size` bytes, of outer step `least` or later, that most donors have.

    `vouch` returns the snapshots that the log vouches for. It is called after the donors' offers, so that it knows
    entries as new as these, and again while the log does not vouch for any. `on_download` is called with the download
    when it begins.

    Raises: SnapshotError when there is none, or no donor is left before all of it is here; OSError when there is no
    room; the exceptions of `vouch`.
    """
    chunking = StateChunking(size)
    limit = DIGEST_BYTES * chunking.count
    offered = await _offers(transport, donors, log, least, limit, size)
    donors_of_best = await _choose(offered, vouch)
    chosen = offered[donors_of_best[0]]
    head = chosen.position.head
    pulled = Wanted(
        name=SNAPSHOT,
        digests=chosen.chunk_digests,
        bounds=chunking.bounds,
        request=lambda first, last: pack(SnapshotRequest(run=log.run, head=head, least=0, first=first, last=last)),
        range=max(1, min(RANGE, chunking.count // RANGES_AT_LEAST)),
    )
    memory = await asyncio.to_thread(storage.download, chosen.offer.state_digest, size)
    download = Download(transport, pulled, memory.data)
    if not memory.is_new:
        await download.adopt()
    on_download(download)
    try:
        await download.run(donors_of_best)
    except DownloadError as error:
        raise SnapshotError(str(error)) from error
    storage.downloaded()
    offer = chosen.offer
    return FrozenSnapshot(offer.last, offer.state_digest, chosen.chunk_digests, memory.data, offer.ends, memory=memory)


async def _choose(offered: Mapping[str, Offered], vouch: Callable[[], Awaitable[Vouched]]) -> list[str]:
    """Return the donors of an offered snapshot for which the log vouches. If it vouches for none yet, try again for at
    most PATIENCE seconds, then raise NotYetVouchedError.

    Raises: SnapshotError; the exceptions of `vouch`.
    """
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
    """Ask the first of `donors` and some random others for their offers, at most ASKED donors. Return the offers by
    donor, except those of a state that does not have `size` bytes, or with more than `limit` bytes of digests.

    Raises: SnapshotError when no offer is left.
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
        raise SnapshotError("; ".join(reasons) or "there was no peer to ask for a snapshot; try again later")
    return offered


async def ask_size(transport: PullTransport, donors: Sequence[str], log: LogState, memory: int) -> int:
    """Return the size of the run's state in bytes, as most donors report it, for a peer that has not built the model.

    `memory` are the bytes that are free: a liar about the size must not be able to fill them with digests.

    Raises: SnapshotError when no donor reports it.
    """
    limit = min(DIGESTS_LIMIT, memory // MEMORY_SHARE)
    offered = await _offers(transport, donors, log, 0, limit)
    [(size, _)] = Counter(one.offer.bytes for one in offered.values()).most_common(1)
    return size


async def _ask_offer(
    transport: PullTransport, donor: str, log: LogState, least: int, limit: int, size: int | None
) -> Offered:
    """Ask a donor for a snapshot of outer step `least` or later, and return its offer.

    Raises: PeerUnreachableError; RemoteProtocolError when the offer has more than `limit` bytes of digests, is not of a
    snapshot of `size` bytes (None: any size), or does not fit the log.
    """
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
