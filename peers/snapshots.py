"""Snapshots of the outer state: frozen at chosen places in the log, and given to who joins.

At every `snapshot_every`-th entry each peer, or in larger swarms a few in turn, copies momentum and theta. Since the
state at a place in the log is the same everywhere, so are the digests: who joins takes the snapshot on which most peers
agree, and its chunks from all of them at once. Who has frozen nothing yet does so when it is asked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from pydantic import Field

from peers.download import PullTransport
from peers.errors import RemoteProtocolError
from peers.log import Header, LogState
from peers.memory_file import MemoryFile
from peers.peer import Peer
from peers.places import Places
from peers.state_chunks import StateChunking, chunk_digests, digest_of_chunks
from peers.states import State
from peers.storage import Storage
from peers.streams import Buffer, RefusalError
from peers.wire import Count, Digest, Value, pack, unpack_from
from peers.workload import Workload

logger = logging.getLogger(__name__)

SNAPSHOT = "snapshot"
SETTLE_TIMEOUT = 20.0  # seconds that a joiner may wait for the donor to finish an outer step
READERS = 8  # pulls of peers of the run that are served at once
STRANGERS = 3  # besides, others: who exports the model has no heartbeat, nor has who only wants to keep us busy
PULLS = 3  # of one peer at once
HELD = 2  # snapshots, while joiners still fetch the older one; each takes 8 bytes a parameter
IN_USE = 60.0  # seconds after its last pull for which a snapshot is held
SNAPSHOT_PEERS = 8  # that freeze the same entry, where there are more
LINEAGE_LIMIT = 128


class SnapshotRequest(Value):
    """Chunks [first, last) of the snapshot at `head`; without one: which there is, at index `least` or later."""

    head: Digest | None
    least: Count
    first: Count
    last: Count


class Offer(Value):
    """A donor's newest snapshot: the last entry in it (None: before the first), and its digest.

    `lineage` names the donor's last places in the log, the present one included. The digests of the snapshot's chunks
    come with it.
    """

    last: Header | None
    state_digest: Digest
    lineage: Annotated[tuple[Digest, ...], Field(max_length=LINEAGE_LIMIT)]


@dataclass(eq=False)
class Snapshot:
    """The state after entry `last`. Its memory is given back when nobody refers to it any more."""

    last: Header | None
    state_digest: bytes
    chunk_digests: tuple[bytes, ...]
    memory: MemoryFile
    used_at: float = field(default=-IN_USE)

    @property
    def data(self) -> memoryview:
        return self.memory.data

    @property
    def index(self) -> int:
        """Entries that are in it."""
        return self.last.index + 1 if self.last else 0


class Host(Protocol):
    """The driver that snapshots are made for."""

    async def until(self, condition: Callable[[Peer], bool]) -> None: ...


class Snapshots:
    """Makes and serves one peer's. `state_lock` is held while theta and momentum change or are read.

    `on_snapshot` is told of every one that is frozen or taken over.
    """

    def __init__(self, peer: Peer, transport: PullTransport, workload: Workload, storage: Storage, host: Host) -> None:
        self.state_lock = asyncio.Lock()
        self.on_snapshot: Callable[[Snapshot], None] = lambda snapshot: None
        self._peer = peer
        self._transport = transport
        self._workload = workload
        self._storage = storage
        self._host = host
        self._chunking = StateChunking(workload.state_size)
        self._held: dict[bytes, Snapshot] = {}  # by head of the log, the newest last
        self._freezing = asyncio.Lock()
        self._places, self._places_for_strangers = Places(READERS, PULLS), Places(STRANGERS, PULLS)

    async def serve(self) -> None:
        await self._transport.on_pull(SNAPSHOT, self._serve, gives_way=True)

    def hold(self, snapshot: Snapshot) -> None:
        """Give this one from now on; older ones only as long as somebody fetches them."""
        oldest = time.monotonic() - IN_USE
        self._held = {head: held for head, held in self._held.items() if held.used_at > oldest}
        self._held[self._peer.log.at(snapshot.last).position.head] = snapshot
        self.on_snapshot(snapshot)

    # Freezing -------------------------------------------------------------------------------------------------
    async def freeze_if_chosen(self) -> None:
        """After an entry: a snapshot, if this is the place and the peer for it. Training goes on meanwhile."""
        log = self._peer.settled
        busy = [held for held in self._held.values() if held.used_at > time.monotonic() - IN_USE]
        if is_chosen(self._peer.me, log, self._peer.settings.snapshot_every) and len(busy) < HELD:
            async with self._freezing:
                await self._freeze()

    async def _freeze(self) -> None:
        """Raises: OSError when there is no room."""
        memory = await asyncio.to_thread(self._storage.snapshot, self._chunking.bytes)
        async with self.state_lock:
            log, state_digest = self._peer.settled, self._peer.state_digest
            if not _is_settled(self._peer) or log.position.head in self._held:
                return
            await self._workload.copy_state(memory.data)
        digests = await asyncio.to_thread(chunk_digests, [memory.data])
        if digest_of_chunks(digests) != state_digest:
            logger.error("the state at %s is not the one that its digest names: no snapshot of it", log.position)
            return
        self.hold(Snapshot(log.last, state_digest, digests, memory))

    async def _newest(self, least: int) -> Snapshot:
        """Raises: RefusalError."""
        if self._peer.log.position.index < least:
            raise RefusalError(f"outer step {least} is not here yet")
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT), self._freezing:
                while not (snapshot := self._last) or snapshot.index < least:
                    await self._host.until(_is_settled)
                    await self._freeze()
        except TimeoutError:
            raise RefusalError("no settled state to give") from None
        except OSError as error:
            logger.warning("no room for a snapshot: %s", error)
            raise RefusalError("no room for a snapshot") from error
        return snapshot

    @property
    def _last(self) -> Snapshot | None:
        return next(reversed(self._held.values()), None)

    # Giving ---------------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def _serve(self, sender: str, packed: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
        request = unpack_from(sender, SnapshotRequest, packed)
        places = self._places if self._peer.is_live(sender) else self._places_for_strangers
        async with places.one_for(sender):
            if request.head is None:
                snapshot = await self._newest(request.least)
                offer = Offer(last=snapshot.last, state_digest=snapshot.state_digest, lineage=self._peer.lineage)
                yield pack(offer), b"".join(snapshot.chunk_digests)
                return
            if request.head not in self._held:
                raise RefusalError("that snapshot is not here any more")
            if not request.first < request.last <= self._chunking.count:
                raise RemoteProtocolError(sender, f"there are no chunks {request.first} to {request.last}")
            snapshot = self._held[request.head]
            start, stop = self._chunking.bounds(request.first, request.last)
            snapshot.used_at = time.monotonic()
            yield b"", snapshot.data[start:stop]
            snapshot.used_at = time.monotonic()


def is_chosen(me: str, log: LogState, every: int) -> bool:
    """Whether this peer freezes the state here: at every such entry eight peers of the roster, others each time."""
    if log.position.index % every:
        return False
    roster = log.roster
    if len(roster) <= SNAPSHOT_PEERS:
        return True
    turn = log.position.index // every
    return me in roster and (roster.index(me) - turn * SNAPSHOT_PEERS) % len(roster) < SNAPSHOT_PEERS


def _is_settled(peer: Peer) -> bool:
    """Whether theta and momentum are those of the position in the log."""
    return peer.state not in (State.APPLYING, State.FETCHING)
