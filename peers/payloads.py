"""Payloads of past entries: served to who fell behind, and fetched from several peers at once, each chunk checked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from peers.buffers import Payload, PayloadBuffers, empty
from peers.chunks import payload_digest
from peers.download import PULL_TIMEOUT, Download, DownloadError, PullTransport, Wanted
from peers.errors import RemoteProtocolError
from peers.log import Header
from peers.places import Places
from peers.streams import Buffer, PeerUnreachableError, RefusalError
from peers.wire import DIGEST_BYTES, Count, Digest, RunId, Value, pack, unpack_from

logger = logging.getLogger(__name__)

PAYLOAD = "payload"
READERS = 8  # peers that are served at once
PULLS = 3  # of one peer at once
RANGE = 16  # chunks asked for at once


class PayloadRequest(Value):
    """Chunks [first, last) of a kept payload; of none: the digests of all its chunks."""

    run: RunId
    payload: Digest
    first: Count
    last: Count


class PayloadError(Exception):
    """A payload can't be had from the peers that should have it."""


async def serve_payloads(transport: PullTransport, kept: Mapping[str, PayloadBuffers]) -> None:
    """Give the payloads that are kept of these runs to who asks, from now on."""
    places = Places(READERS, PULLS)

    @asynccontextmanager
    async def serve(sender: str, packed: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
        request = unpack_from(sender, PayloadRequest, packed)
        buffers = kept.get(request.run)
        payload = await asyncio.to_thread(buffers.find, request.payload) if buffers else None
        if buffers is None or payload is None:
            raise RefusalError("that payload is not kept here")
        async with places.one_for(sender):
            if request.first >= request.last:
                yield b"", b"".join(payload.chunk_digests)
            elif request.last > buffers.size.chunks:
                raise RemoteProtocolError(sender, f"there is no chunk {request.last - 1} in a payload")
            else:
                start, stop = buffers.chunks_bytes(request.first, request.last)
                yield b"", payload.data[start:stop]

    await transport.on_pull(PAYLOAD, serve, gives_way=True)


class Payloads:
    """Fetches payloads of one run for one peer."""

    def __init__(self, transport: PullTransport, run: str, buffers: PayloadBuffers) -> None:
        self._transport = transport
        self._run = run
        self._buffers = buffers
        self._fetches: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def fetch(self, header: Header, donors: Sequence[str]) -> None:
        """Get and keep the payload of an entry. Raises: PayloadError when no donor has all of it."""
        async with self._fetches.setdefault(header.payload, asyncio.Lock()):
            payload = await asyncio.to_thread(self._buffers.find, header.payload)
            self._buffers.kept.keep(payload or await self._fetch(header.payload, donors))

    async def _fetch(self, payload: bytes, donors: Sequence[str]) -> Payload:
        digests, donors = await self._digests(payload, donors)
        wanted = Wanted(
            name=PAYLOAD,
            digests=digests,
            bounds=self._buffers.chunks_bytes,
            request=lambda first, last: pack(PayloadRequest(run=self._run, payload=payload, first=first, last=last)),
            range=RANGE,
        )
        data = empty(self._buffers.size.bytes)
        try:
            await Download(self._transport, wanted, data).run(donors)
        except DownloadError as error:
            raise PayloadError(str(error)) from error
        return Payload(data, digests)

    async def _digests(self, payload: bytes, donors: Sequence[str]) -> tuple[tuple[bytes, ...], list[str]]:
        """The digests of the payload's chunks, and the donors that may have it."""
        reasons = []
        size = DIGEST_BYTES * self._buffers.size.chunks
        for place, donor in enumerate(donors):
            request = pack(PayloadRequest(run=self._run, payload=payload, first=0, last=0))
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
