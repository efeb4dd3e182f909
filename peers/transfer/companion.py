"""A copy of our companion state, the worker's own, for who joins: made when somebody asks, dropped when nobody does.

No two peers' companion states are the same, so the run's digests don't cover them: each is worth as much as the peer
that gives it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from peers.protocol.peer import Peer
from peers.streams.channel import Buffer, RefusalError
from peers.streams.places import Places
from peers.transfer.download import PullTransport
from peers.transfer.memory_file import MemoryFile
from peers.transfer.snapshots import PULLS, READERS, requested_bytes
from peers.transfer.state_chunks import chunk_digests, digest_of_chunks
from peers.transfer.storage import Storage
from peers.values.wire import Count, Digest, RunId, Value, pack, unpack_from
from peers.values.workload import CompanionState, SnapshotError

logger = logging.getLogger(__name__)

COMPANION = "companion"
COPY_TIMEOUT = 20.0  # seconds for which an answer waits for the worker's copy
IN_USE = 60.0  # seconds after its last pull for which a copy is held
LOOK = 15.0  # seconds from one look whether it still is to the next


class CompanionRequest(Value):
    """Chunks [first, last) of the copy with this digest; without one: which there is."""

    run: RunId
    digest: Digest | None
    first: Count
    last: Count


class CompanionOffer(Value):
    """A donor's copy. The digests of its chunks come with it."""

    bytes: Count
    digest: Digest


@dataclass(eq=False)
class Copy:
    """A copy of the companion state, for as long as it is fetched."""

    digest: bytes
    chunk_digests: tuple[bytes, ...]
    memory: MemoryFile
    readers: int = 0
    used_at: float = field(default_factory=time.monotonic)

    @property
    def is_in_use(self) -> bool:
        return self.readers > 0 or self.used_at > time.monotonic() - IN_USE

    @asynccontextmanager
    async def read(self, start: int, stop: int) -> AsyncIterator[Buffer]:
        self.readers += 1
        try:
            yield self.memory.data[start:stop]
        finally:
            self.readers -= 1
            self.used_at = time.monotonic()


class Host(Protocol):
    """The driver that companion states are copied for."""

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]: ...


class CompanionDonor:
    """Gives a copy to peers of the run that ask; all who do meanwhile get the same one."""

    def __init__(
        self, peer: Peer, state: CompanionState, transport: PullTransport, storage: Storage, host: Host
    ) -> None:
        self._peer = peer
        self._state = state
        self._transport = transport
        self._storage = storage
        self._host = host
        self._places = Places(READERS, PULLS)
        self._held: Copy | None = None
        self._copying: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        await self._transport.on_pull(COMPANION, self._give, gives_way=True)

    @asynccontextmanager
    async def _give(self, sender: str, packed: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
        request = unpack_from(sender, CompanionRequest, packed)
        if request.run != self._peer.settings.run:
            raise RefusalError(f"run {request.run} is not here")
        if not self._peer.is_live(sender):  # copying holds up our worker for a moment: not for everybody
            raise RefusalError("you are not known here as a peer of the run")
        async with self._places.one_for(sender):
            if request.digest is None:
                copy = await self._newest()
                offer = CompanionOffer(bytes=len(copy.memory.data), digest=copy.digest)
                yield pack(offer), b"".join(copy.chunk_digests)
                return
            held = self._held
            if held is None or held.digest != request.digest:
                raise RefusalError("that copy is not here any more")
            bounds = requested_bytes(sender, len(held.memory.data), request.first, request.last)
            async with held.read(*bounds) as data:
                yield b"", data

    async def _newest(self) -> Copy:
        """The copy that others are fetching, or a new one. Raises: RefusalError."""
        if self._held is None:
            if self._copying is None or self._copying.done():
                self._copying = self._host.start(self._copy())
            await asyncio.wait([self._copying], timeout=COPY_TIMEOUT)  # it goes on for who asks next
        if self._held is None:
            raise RefusalError("there is no copy yet; ask again")
        self._held.used_at = time.monotonic()
        return self._held

    async def _copy(self) -> None:
        try:
            memory = await asyncio.to_thread(self._storage.snapshot, self._state.size)
            await self._state.copy(memory.data)
        except (OSError, SnapshotError) as error:
            logger.info("no companion state for who asks: %s", error)
            return
        digests = await asyncio.to_thread(chunk_digests, [memory.data])
        self._held = Copy(digest_of_chunks(digests), digests, memory)
        self._host.start(self._drop_when_unused(self._held))

    async def _drop_when_unused(self, copy: Copy) -> None:
        while copy.is_in_use:
            await asyncio.sleep(LOOK)
        self._held = None
