"""Snapshots of the outer state, as they are given to who joins: which there is, and its chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from pydantic import Field

from peers.errors import RemoteProtocolError
from peers.log.chain import STRETCH_LIMIT
from peers.log.header import Header
from peers.network.channel import Buffer, Places, RefusalError
from peers.transfer.download import RANGES, PullTransport, kept_for
from peers.transfer.memory_file import MemoryFile
from peers.transfer.state_chunks import StateChunking
from peers.values.wire import Count, Digest, RunId, Value, pack, unpack_from

SNAPSHOT = "snapshot"
READERS = 16  # pulls of peers of the run that are served at once
STRANGERS = 6  # besides, others: who exports the model has no heartbeat, nor has who only wants to keep us busy
PULLS = RANGES + 1  # of one peer at once: one may have been given up, and its end not be seen here yet
OFFERED = 15.0  # seconds after it was offered for which it is held: where entries come fast, it is soon not the newest
IN_USE = 60.0  # seconds after its last pull for which a snapshot is held


class SnapshotRequest(Value):
    """Chunks [first, last) of the snapshot at `head`; without one: which there is, at index `least` or later."""

    run: RunId
    head: Digest | None
    least: Count
    first: Count
    last: Count


class SnapshotOffer(Value):
    """A donor's newest snapshot: the entry that closes its last cycle (None: before the first), its bytes and its
    digest; and the digests of all entries of that cycle. The digests of its chunks come with it."""

    last: Header | None
    bytes: Count
    state_digest: Digest
    ends: Annotated[tuple[Digest, ...], Field(max_length=STRETCH_LIMIT)] = ()


@dataclass(eq=False)
class Snapshot:
    """The state after the cycle that `last` closes, whose entries have the digests `ends`. Its memory is given back
    when nobody refers to it any more."""

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
        """Cycles that are in it."""
        return self.last.index + 1 if self.last else 0

    def is_in_use(self, now: float) -> bool:
        """Whether somebody is fetching it, as far as can be seen. `now`: of time.monotonic."""
        return bool(self._pulls) or self.used_at > now - IN_USE or self.offered_at > now - OFFERED

    @asynccontextmanager
    async def being_read(self) -> AsyncIterator[None]:
        """Somebody pulls a part of it, until it is `let_go`. Raises: TimeoutError then."""
        async with asyncio.timeout(None) as pull:
            self._pulls.add(pull)
            try:
                yield
            finally:
                self._pulls.discard(pull)
                self.used_at = time.monotonic()

    def let_go(self) -> None:
        """Break off all pulls, which would keep its memory."""
        for pull in self._pulls:
            pull.reschedule(asyncio.get_running_loop().time())


@dataclass(eq=False)
class FrozenSnapshot(Snapshot):
    """In memory that another process may inherit."""

    memory: MemoryFile = field(kw_only=True)


class SnapshotSource(Protocol):
    """Whoever has snapshots of one run."""

    def is_member(self, peer: str) -> bool: ...
    async def newest(self, least: int) -> Snapshot:
        """At index `least` or later. Raises: RefusalError when there is none."""

    def held(self, head: bytes) -> Snapshot | None:
        """The one at a head of the log."""


async def serve_snapshots(transport: PullTransport, sources: Mapping[str, SnapshotSource]) -> None:
    """Give the snapshots of these runs to who asks, from now on."""
    places, places_for_strangers = Places(READERS, PULLS), Places(STRANGERS, PULLS)

    @asynccontextmanager
    async def serve(sender: str, packed: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
        request = unpack_from(sender, SnapshotRequest, packed)
        source = kept_for(transport, sources, request.run, sender)
        async with (places if source.is_member(sender) else places_for_strangers).one_for(sender):
            if request.head is None:
                yield await _offer(source, request.least)
                return
            snapshot = source.held(request.head)
            if snapshot is None:
                raise RefusalError("that snapshot is not here any more")
            start, stop = requested_bytes(sender, len(snapshot.data), request.first, request.last)
            async with snapshot.being_read():
                yield b"", snapshot.data[start:stop]

    await transport.on_pull(SNAPSHOT, serve, gives_way=True)


def requested_bytes(sender: str, size: int, first: int, last: int) -> tuple[int, int]:
    """Bytes [start, stop) of chunks [first, last) of a state of `size` bytes. Raises: RemoteProtocolError."""
    chunking = StateChunking(size)
    if not first < last <= chunking.count:
        raise RemoteProtocolError(sender, f"there are no chunks {first} to {last}")
    return chunking.bounds(first, last)


async def _offer(source: SnapshotSource, least: int) -> tuple[bytes, bytes]:
    snapshot = await source.newest(least)
    snapshot.offered_at = time.monotonic()
    offer = SnapshotOffer(
        last=snapshot.last,
        bytes=len(snapshot.data),
        state_digest=snapshot.state_digest,
        ends=snapshot.ends,
    )
    return pack(offer), b"".join(snapshot.chunk_digests)
