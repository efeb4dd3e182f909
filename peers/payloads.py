"""Payloads of past entries: served to who fell behind, and fetched from several peers at once, each chunk checked."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

from peers.buffers import Payload, PayloadBuffers, empty
from peers.chunks import payload_digest
from peers.errors import RemoteProtocolError
from peers.log import Header
from peers.snapshots import PULL_TIMEOUT, PullTransport
from peers.streams import Buffer, PeerUnreachableError, RefusalError
from peers.wire import DIGEST_BYTES, Count, Digest, Value, digest_of, pack, unpack_from

logger = logging.getLogger(__name__)

PAYLOAD = "payload"
READERS = 8  # peers that are served at once
RANGE = 16  # chunks asked for at once
DONORS = 4  # that are asked at once


class PayloadRequest(Value):
    """Chunks [first, last) of a kept payload; of none: the digests of all its chunks."""

    payload: Digest
    first: Count
    last: Count


class PayloadError(Exception):
    """A payload can't be had from the peers that should have it."""


class Payloads:
    """Serves and fetches kept payloads for one peer."""

    def __init__(self, transport: PullTransport, buffers: PayloadBuffers) -> None:
        self._transport = transport
        self._buffers = buffers
        self._places = asyncio.Semaphore(READERS)
        self._readers: set[str] = set()
        self._fetches: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def serve(self) -> None:
        await self._transport.on_pull(PAYLOAD, self._serve)

    @asynccontextmanager
    async def _serve(self, sender: str, packed: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
        request = unpack_from(sender, PayloadRequest, packed)
        payload = self._buffers.kept.get(request.payload)
        if payload is None:
            raise RefusalError("that payload is not kept here")
        if self._places.locked() or sender in self._readers:
            raise RefusalError("too many fetch payloads now")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._places)
            self._readers.add(sender)
            stack.callback(self._readers.discard, sender)
            if request.first >= request.last:
                yield b"", b"".join(payload.chunk_digests)
            elif request.last > self._buffers.size.chunks:
                raise RemoteProtocolError(sender, f"there is no chunk {request.last - 1} in a payload")
            else:
                start, stop = self._buffers.chunks_bytes(request.first, request.last)
                yield b"", payload.data[start:stop]

    async def fetch(self, header: Header, donors: Sequence[str]) -> None:
        """Get and keep the payload of an entry. Raises: PayloadError when no donor has all of it."""
        async with self._fetches.setdefault(header.payload, asyncio.Lock()):
            if not self._buffers.kept.get(header.payload):
                await self._fetch(header, donors)

    async def _fetch(self, header: Header, donors: Sequence[str]) -> None:
        digests, donors = await self._digests(header.payload, donors)
        data = empty(self._buffers.size.bytes)
        count = self._buffers.size.chunks
        missing = deque((first, min(first + RANGE, count)) for first in range(0, count, RANGE))
        reasons = list[str]()
        while missing and donors:
            asked, others = donors[:DONORS], donors[DONORS:]
            work = [self._fetch_from(donor, header.payload, digests, missing, data) for donor in asked]
            failures = dict(zip(asked, await asyncio.gather(*work), strict=True))
            donors = [donor for donor, failure in failures.items() if failure is None] + others
            reasons += [failure for failure in failures.values() if failure]
        if missing:
            raise PayloadError("; ".join(reasons))
        self._buffers.kept.keep(Payload(data, digests))

    async def _digests(self, payload: bytes, donors: Sequence[str]) -> tuple[tuple[bytes, ...], list[str]]:
        """The digests of the payload's chunks, and the donors that may have it."""
        reasons = []
        size = DIGEST_BYTES * self._buffers.size.chunks
        for place, donor in enumerate(donors):
            request = pack(PayloadRequest(payload=payload, first=0, last=0))
            try:
                _, packed = await self._transport.pull(donor, PAYLOAD, request, size, PULL_TIMEOUT)
            except PeerUnreachableError as error:
                reasons.append(str(error))
                continue
            digests = tuple(bytes(packed[at : at + DIGEST_BYTES]) for at in range(0, len(packed), DIGEST_BYTES))
            if len(packed) == size and payload_digest(digests) == payload:
                return digests, list(donors[place:])
            reasons.append(f"peer {donor} has other digests")
        raise PayloadError("; ".join(reasons) or "nobody has it")

    async def _fetch_from(
        self,
        donor: str,
        payload: bytes,
        digests: Sequence[bytes],
        missing: deque[tuple[int, int]],
        data: memoryview,
    ) -> str | None:
        """Take ranges from `missing` as long as there are any; a range that fails goes back. Why it stopped early."""
        while missing:
            first, last = missing.popleft()
            start, stop = self._buffers.chunks_bytes(first, last)
            request = pack(PayloadRequest(payload=payload, first=first, last=last))
            try:
                _, chunks = await self._transport.pull(donor, PAYLOAD, request, stop - start, PULL_TIMEOUT)
                self._check(donor, first, last, digests, chunks)
            except (PeerUnreachableError, RemoteProtocolError) as error:
                missing.append((first, last))
                logger.debug("%s", error)
                return str(error)
            data[start:stop] = chunks
        return None

    def _check(self, donor: str, first: int, last: int, digests: Sequence[bytes], chunks: bytearray) -> None:
        """Raises: RemoteProtocolError unless these are the chunks [first, last) with those digests."""
        base = self._buffers.chunk_bytes(first)[0]
        view = memoryview(chunks)
        for chunk in range(first, last):
            start, stop = self._buffers.chunk_bytes(chunk)
            if digest_of(view[start - base : stop - base]) != digests[chunk]:
                raise RemoteProtocolError(donor, f"chunk {chunk} of its payload is not the run's")
