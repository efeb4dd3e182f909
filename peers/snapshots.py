"""The state of one peer, pulled by joiners. Nothing is stored unchecked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Protocol
from weakref import WeakValueDictionary

from pydantic import Field

from peers.heartbeat import Heartbeat
from peers.lineage import RECENT_ENTRIES
from peers.log import Header, LogState
from peers.peer import Peer
from peers.states import State
from peers.streams import Buffer, RefusalError, Serve
from peers.wire import Digest, Value, pack, unpack_from
from peers.workload import SnapshotError, Workload

SNAPSHOT = "snapshot"
PULL_TIMEOUT = 3600.0  # seconds for one transfer; a stalled one ends much earlier, in the stream
SETTLE_TIMEOUT = 20.0  # seconds that a joiner may wait for a place, or for the donor to finish an outer step
READERS = 4  # peers of the run that fetch our state at once; a slow one may hold 8 bytes a parameter of ours
STRANGERS = 2  # besides, others: who exports the model has no heartbeat, nor has who only wants to keep us busy


class SnapshotHeader(Value):
    """Where in the log a snapshot stands: the last header (None before the first), and the donor's word for it.

    `before`: digests of the entries before the last, oldest first. They tell who was on another lineage what it loses.
    """

    last: Header | None
    before: Annotated[tuple[Digest, ...], Field(max_length=RECENT_ENTRIES)]
    heartbeat: bytes


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Packed theta and momentum; gone when nobody is sending it any more."""

    data: bytes


class PullTransport(Protocol):
    async def pull(
        self, peer_id: str, name: str, header: bytes, max_bytes: int, timeout: float
    ) -> tuple[bytes, bytearray]: ...
    async def on_pull(self, name: str, serve: Serve) -> None: ...


class Host(Protocol):
    """The driver that snapshots are served for."""

    async def until(self, condition: Callable[[Peer], bool]) -> None: ...
    def signed_heartbeat(self) -> bytes: ...


async def pull_snapshot(
    transport: PullTransport, donor: str, log: LogState, limit: int
) -> tuple[SnapshotHeader, bytes, bytes]:
    """Where a donor stands, the digest that it signed for its state there, and the snapshot, not yet held against it.

    Raises: PeerUnreachableError, RemoteProtocolError, SnapshotError.
    """
    packed, snapshot = await transport.pull(donor, SNAPSHOT, b"", limit, PULL_TIMEOUT)
    header = unpack_from(donor, SnapshotHeader, packed)
    heartbeat = Heartbeat.verify(header.heartbeat, log.run)
    theirs = log.at(header.last)
    said = (heartbeat.peer, heartbeat.index, heartbeat.head, heartbeat.lineage_tokens)
    if said != (donor, theirs.position.index, theirs.position.head, theirs.lineage_tokens):
        raise SnapshotError("its header is not the one that the donor signed")
    return header, heartbeat.state_digest, bytes(snapshot)


class Snapshots:
    """Serves and fetches for one peer. `state_lock` is held while theta and momentum change or are read."""

    def __init__(self, peer: Peer, transport: PullTransport, workload: Workload, host: Host) -> None:
        self._peer = peer
        self._transport = transport
        self._workload = workload
        self._host = host
        self.state_lock = asyncio.Lock()
        self._snapshots: WeakValueDictionary[bytes, Snapshot] = WeakValueDictionary()  # by head of the log
        self._readers: set[str] = set()
        self._places = asyncio.Semaphore(READERS)
        self._places_for_strangers = asyncio.Semaphore(STRANGERS)

    async def serve(self) -> None:
        await self._transport.on_pull(SNAPSHOT, self._serve)

    async def fetch(self, donor: str) -> tuple[SnapshotHeader, bytes]:
        """Take over the donor's state. Returns where it stands and the state digest.

        Raises: PeerUnreachableError, RemoteProtocolError, SnapshotError; our state is then as it was.
        """
        limit = self._workload.snapshot_limit
        header, state_digest, snapshot = await pull_snapshot(self._transport, donor, self._peer.log, limit)
        async with self.state_lock:
            await self._workload.restore(snapshot, state_digest)
        return header, state_digest

    @asynccontextmanager
    async def _serve(self, sender: str, request: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
        """Our state and where in the log it stands. Its memory is held until the context ends."""
        if sender in self._readers:
            raise RefusalError("another copy is on its way to you")
        places = self._places if self._peer.is_live(sender) else self._places_for_strangers
        async with AsyncExitStack() as stack:
            self._readers.add(sender)
            stack.callback(self._readers.discard, sender)
            try:
                async with asyncio.timeout(SETTLE_TIMEOUT):
                    await stack.enter_async_context(places)
            except TimeoutError:
                raise RefusalError("too many fetch this state now") from None
            header, snapshot = await self._settled_snapshot()
            yield header, snapshot.data

    async def _settled_snapshot(self) -> tuple[bytes, Snapshot]:
        """Once no outer step is under way. Whoever fetches the state at one position shares one copy."""
        while True:
            try:
                async with asyncio.timeout(SETTLE_TIMEOUT):
                    await self._host.until(_settled)
            except TimeoutError:
                raise RefusalError("no settled state to give") from None
            async with self.state_lock:
                if _settled(self._peer):  # an outer step may have begun while we waited for the lock
                    log, before = self._peer.log, self._peer.lineage.before
                    header = SnapshotHeader(last=log.last, before=before, heartbeat=self._host.signed_heartbeat())
                    head = log.position.head
                    snapshot = self._snapshots.get(head) or Snapshot(await self._workload.snapshot())
                    self._snapshots[head] = snapshot
                    return pack(header), snapshot


def _settled(peer: Peer) -> bool:
    """Whether theta and momentum are those of the position in the log."""
    return peer.state not in (State.APPLYING, State.FETCHING)
