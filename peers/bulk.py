"""Bulk data of one peer: blocks pushed within rounds, snapshots pulled by joiners.

Nothing is accepted that the protocol does not wait for at that moment, and nothing is stored unchecked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from peers.buffers import RoundBuffers
from peers.errors import RemoteProtocolError
from peers.events import BadBlocks, ContributionArrived, Event, PushContribution, PushReduced, ReducedArrived
from peers.exchange import Exchange
from peers.heartbeat import Heartbeat
from peers.log import Header, LogState
from peers.messages import Attempt
from peers.peer import Peer
from peers.states import State
from peers.streams import Accept, Arrived, Buffer, RefusalError, Serve
from peers.wire import Count, Value, WireError, pack, unpack
from peers.workload import BadBlocksError, SnapshotError, Workload

BLOCKS, SNAPSHOT = "blocks", "snapshot"
ALREADY_HERE = "already here"
BULK_TIMEOUT = 3600.0  # seconds for one transfer; a stalled one ends much earlier, in the stream
SETTLE_TIMEOUT = 20.0  # seconds that a joiner may wait for a place, or for the donor to finish an outer step
READERS = 4  # peers of the run that fetch our state at once; a slow one may hold 8 bytes a parameter of ours
STRANGERS = 2  # besides, others: who exports the model has no heartbeat, nor has who only wants to keep us busy


class BlocksHeader(Value):
    """What a push of blocks is about."""

    attempt: Attempt
    part: Count
    reduced: bool


class SnapshotHeader(Value):
    """Where in the log a snapshot stands: the last header (None before the first), and the donor's word for it."""

    last: Header | None
    heartbeat: bytes


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Packed theta and momentum; gone when nobody is sending it any more."""

    data: bytes


class BulkTransport(Protocol):
    async def push(self, peer_id: str, name: str, header: bytes, data: Buffer, timeout: float) -> None: ...
    async def on_push(self, name: str, accept: Accept, arrived: Arrived) -> None: ...
    async def pull(
        self, peer_id: str, name: str, header: bytes, max_bytes: int, timeout: float
    ) -> tuple[bytes, bytearray]: ...
    async def on_pull(self, name: str, serve: Serve) -> None: ...


class Host(Protocol):
    """The driver that bulk data is moved for."""

    def handle(self, event: Event) -> None: ...
    async def until(self, condition: Callable[[Peer], bool]) -> None: ...
    def signed_heartbeat(self) -> bytes: ...


async def pull_snapshot(
    transport: BulkTransport, donor: str, log: LogState, limit: int
) -> tuple[Header | None, bytes, bytes]:
    """A donor's last header, the digest that it signed for its state there, and the snapshot, not yet held against it.

    Raises: PeerUnreachableError, RemoteProtocolError, SnapshotError.
    """
    packed, snapshot = await transport.pull(donor, SNAPSHOT, b"", limit, BULK_TIMEOUT)
    try:
        header = unpack(SnapshotHeader, packed)
    except WireError as error:
        raise RemoteProtocolError(donor, str(error)) from error
    heartbeat = Heartbeat.verify(header.heartbeat, log.run)
    theirs = log.at(header.last)
    said = (heartbeat.peer, heartbeat.index, heartbeat.head, heartbeat.lineage_tokens)
    if said != (donor, theirs.position.index, theirs.position.head, theirs.lineage_tokens):
        raise SnapshotError("its header is not the one that the donor signed")
    return header.last, heartbeat.state_digest, bytes(snapshot)


class Bulk:
    """Sends and receives for one peer. `state_lock` is held while theta and momentum change or are read."""

    def __init__(self, peer: Peer, transport: BulkTransport, workload: Workload, host: Host) -> None:
        self._peer = peer
        self._transport = transport
        self._workload = workload
        self._host = host
        self.buffers = RoundBuffers(workload)
        self.state_lock = asyncio.Lock()
        self._snapshots: WeakValueDictionary[bytes, Snapshot] = WeakValueDictionary()  # by head of the log
        self._readers: set[str] = set()
        self._places = asyncio.Semaphore(READERS)
        self._places_for_strangers = asyncio.Semaphore(STRANGERS)

    async def serve(self) -> None:
        await self._transport.on_push(BLOCKS, self._accept_blocks, self._blocks_arrived)
        await self._transport.on_pull(SNAPSHOT, self._serve_snapshot)

    # Blocks ---------------------------------------------------------------------------------------------------
    async def push(self, push: PushContribution | PushReduced) -> None:
        """Raises: PeerUnreachableError, PeerRefusedError; KeyError when the attempt is over."""
        reduced = isinstance(push, PushReduced)
        read = self.buffers.part if reduced else self.buffers.contribution
        data = read(push.attempt, push.part)
        header = pack(BlocksHeader(attempt=push.attempt, part=push.part, reduced=reduced))
        await self._transport.push(push.to, BLOCKS, header, data, BULK_TIMEOUT)

    def _accept_blocks(self, sender: str, packed: bytes, length: int) -> bytearray | str:
        header = self._blocks_header(sender, packed)
        exchange = self._peer.exchange
        current = self.buffers.current(header.attempt)
        if exchange is None or exchange.attempt != header.attempt or current is None:
            return f"not in attempt {header.attempt}"
        if not _wanted(exchange, sender, header):
            return ALREADY_HERE
        start, stop = self.buffers.part_bytes(header.attempt, header.part)
        if length != stop - start:
            return f"{length} bytes, expected {stop - start}"
        return current.room_for(sender, header.part, header.reduced, length)

    def _blocks_arrived(self, sender: str, packed: bytes, buffer: bytearray | memoryview) -> None:
        header = self._blocks_header(sender, packed)
        current, exchange = self.buffers.current(header.attempt), self._peer.exchange
        if current is None or exchange is None or exchange.attempt != header.attempt:
            raise RefusalError(f"attempt {header.attempt} is over")
        if not _wanted(exchange, sender, header):
            raise RefusalError(ALREADY_HERE)  # it was pushed twice at once
        data = bytes(buffer)
        current.arriving.pop((sender, header.part, header.reduced), None)
        try:
            self._workload.check(data, self.buffers.first_block(header.attempt, header.part))
        except BadBlocksError as error:
            self._host.handle(BadBlocks(header.attempt, sender, str(error)))
            raise RefusalError(str(error)) from error
        if header.reduced:
            current.parts[header.part] = data
            self._host.handle(ReducedArrived(header.attempt, header.part))
        else:
            current.contributions[sender] = data
            self._host.handle(ContributionArrived(header.attempt, sender))

    @staticmethod
    def _blocks_header(sender: str, packed: bytes) -> BlocksHeader:
        try:
            return unpack(BlocksHeader, packed)
        except WireError as error:
            raise RemoteProtocolError(sender, str(error)) from error

    # Snapshots ------------------------------------------------------------------------------------------------
    async def fetch_snapshot(self, donor: str) -> tuple[Header | None, bytes]:
        """Take over the donor's state. Returns its last header and the state digest.

        Raises: PeerUnreachableError, RemoteProtocolError, SnapshotError; our state is then as it was.
        """
        limit = self._workload.snapshot_limit
        header, state_digest, snapshot = await pull_snapshot(self._transport, donor, self._peer.log, limit)
        async with self.state_lock:
            await self._workload.restore(snapshot, state_digest)
        return header, state_digest

    @asynccontextmanager
    async def _serve_snapshot(self, sender: str, request: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
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
                    header = SnapshotHeader(last=self._peer.log.last, heartbeat=self._host.signed_heartbeat())
                    head = self._peer.log.position.head
                    snapshot = self._snapshots.get(head) or Snapshot(await self._workload.snapshot())
                    self._snapshots[head] = snapshot
                    return pack(header), snapshot


def _wanted(exchange: Exchange, sender: str, header: BlocksHeader) -> bool:
    if header.reduced:
        return exchange.wants_reduced(sender, header.part)
    return exchange.wants_contribution(sender, header.part)


def _settled(peer: Peer) -> bool:
    """Whether theta and momentum are those of the position in the log."""
    return peer.state not in (State.APPLYING, State.FETCHING)
