"""A peer's own snapshots: frozen at the end of chosen cycles, while training goes on.

After every `snapshot_every`-th cycle each peer, or in larger swarms a few in turn, copies momentum and theta. Since the
state at a place in the log is the same everywhere, so are the digests: who joins takes the snapshot on which most peers
agree, and its chunks from all of them at once. Who has frozen nothing that is new enough does so when it is asked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Protocol

from peers.log.header import Position
from peers.log.state import LogState
from peers.network.channel import RefusalError
from peers.protocol.peer import Peer
from peers.transfer.shelf import Shelf
from peers.transfer.snapshots import FrozenSnapshot, Snapshot
from peers.transfer.state_chunks import chunk_digests, digest_of_chunks
from peers.transfer.storage import Storage
from peers.values.workload import SnapshotError, Workload

logger = logging.getLogger(__name__)

SETTLE_TIMEOUT = 20.0  # seconds that a joiner may wait for us to finish an outer step
NOT_YET = "the state is not frozen yet: that is done when the outer step under way ends; ask again then"
NO_ROOM = "as many snapshots as there is room for are being fetched; ask again later"
SNAPSHOT_PEERS = 8  # that freeze the same entry, where there are more


class Host(Protocol):
    """The driver that states are frozen for."""

    async def until(self, condition: Callable[[Peer], bool]) -> None: ...
    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]: ...


class Freezer:
    """Makes and holds one peer's snapshots.

    `state_lock` is held while theta and momentum change, and while the pseudo-gradient is taken from them. A copy for a
    snapshot, which may take long on a disk, keeps only a change waiting.

    `on_snapshot` is told of every one that is frozen at a chosen entry or taken over, and not of those that somebody
    has asked for: what it leads to, a checkpoint, is not for strangers to ask for.
    """

    def __init__(
        self,
        peer: Peer,
        workload: Workload,
        storage: Storage,
        host: Host,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state_lock = asyncio.Lock()
        self._copy_lock = asyncio.Lock()
        self.on_snapshot: Callable[[FrozenSnapshot], None] = lambda snapshot: None
        self._peer = peer
        self._workload = workload
        self._storage = storage
        self._host = host
        self._shelf = Shelf(clock)
        self._freezing = asyncio.Lock()
        self._on_demand: asyncio.Task[None] | None = None
        self._refusal = ""  # why that failed

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Hold the state for a change: nobody reads it meanwhile."""
        async with self._copy_lock, self.state_lock:
            yield

    def is_member(self, peer: str) -> bool:
        return self._peer.is_live(peer)

    def held(self, head: bytes) -> Snapshot | None:
        return self._shelf.held(head)

    async def newest(self, least: int) -> Snapshot:
        """Raises: RefusalError."""
        if self._peer.log.position.index < least:
            raise RefusalError(f"outer step {least} is not here yet")
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT):
                while (snapshot := self._shelf.new_enough(least)) is None:
                    if self._on_demand is None or self._on_demand.done():
                        self._on_demand = self._host.start(self._freeze_on_demand())
                    await asyncio.wait([self._on_demand])  # it goes on for who asks next
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
            logger.warning("no snapshot for who asks: %s", error)
            self._refusal = "no snapshot can be made here"

    def hold(self, snapshot: FrozenSnapshot) -> None:
        """Give this one from now on; the one before only as long as somebody fetches it."""
        self._shelf.add_chosen(self._peer.log.at(snapshot.last, snapshot.ends).position.head, snapshot)
        self.on_snapshot(snapshot)

    async def freeze_if_due(self) -> None:
        """After a cycle: a snapshot, if this is the place and the peer for it, or there is none here yet: amid a cycle
        of several entries nothing can be frozen for whoever asks.

        Raises: OSError, SnapshotError.
        """
        log = self._peer.settled
        if (self._is_chosen(log) or self._shelf.is_empty) and not await self._freeze(log.position):
            logger.info("no snapshot of outer step %d: older ones are being fetched", log.position.index)

    async def _freeze(self, place: Position | None = None) -> bool:
        """Freeze the present state, if it is at `place`. Returns whether there was room for another one.

        Raises: OSError, without memory; SnapshotError, when the state is corrupt.
        """
        async with self._freezing:
            if self._shelf.gives_again(self._peer.settled.position.head):
                return True
            if not self._shelf.has_room(self._is_chosen(self._peer.settled)):
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
                self._shelf.add_asked_for(log.position.head, snapshot)
            return True

    def _is_chosen(self, log: LogState) -> bool:
        return is_chosen(self._peer.me, log, self._peer.settings.snapshot_every)


def is_chosen(me: str, log: LogState, every: int) -> bool:
    """Whether this peer freezes the state here: at every such entry eight peers of the roster, others each time."""
    if log.position.index % every:
        return False
    roster = log.roster
    if len(roster) <= SNAPSHOT_PEERS:
        return True
    turn = log.position.index // every
    return me in roster and (roster.index(me) - turn * SNAPSHOT_PEERS) % len(roster) < SNAPSHOT_PEERS
