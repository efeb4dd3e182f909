"""Payloads of past entries: served to who fell behind, and fetched from several peers at once, each chunk checked."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from peers.errors import RemoteProtocolError
from peers.log.header import Header
from peers.log.payload import Payload
from peers.streams.channel import Buffer, PeerUnreachableError, RefusalError
from peers.streams.places import Places
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.donors import CHANCE, shuffled
from peers.transfer.download import RANGES, Download, DownloadError, PullTransport, Wanted
from peers.values.chunks import payload_digest
from peers.values.wire import DIGEST_BYTES, Count, Digest, RunId, Value, pack, unpack_from

logger = logging.getLogger(__name__)

PAYLOAD = "payload"
READERS = 16  # pulls that are served at once
PULLS = RANGES + 1  # of one peer at once: one may have been given up, and its end not be seen here yet
RANGE = 16  # chunks asked for at once, at most
RANGES_AT_LEAST = 32  # if there are as many chunks, so that several donors give
DIGESTS_TIMEOUT = 60.0  # seconds for the digests of a payload's chunks
STAGGER = 3.0  # seconds after which another donor is asked for them, too


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
        transport.check_admitted(request.run, sender)
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

    def __init__(
        self, transport: PullTransport, run: str, buffers: PayloadBuffers, chance: random.Random = CHANCE
    ) -> None:
        """`chance` decides in which order donors are asked."""
        self._transport = transport
        self._run = run
        self._buffers = buffers
        self._chance = chance
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
            range=max(1, min(RANGE, self._buffers.size.chunks // RANGES_AT_LEAST)),
        )
        data = self._buffers.room_for_payload()
        try:
            await Download(self._transport, wanted, data).run(donors)
        except DownloadError as error:
            raise PayloadError(str(error)) from error
        return Payload(data, digests)

    async def _digests(self, payload: bytes, donors: Sequence[str]) -> tuple[tuple[bytes, ...], list[str]]:
        """The digests of the payload's chunks, and the donors that may have it: those that are slow to say so last.

        Donors are asked one after another, without waiting long for any.
        """
        waiting = deque(shuffled(self._transport, donors, self._chance))
        asking: dict[asyncio.Task[tuple[bytes, ...]], str] = {}
        reasons = []
        try:
            while waiting or asking:
                if waiting:
                    donor = waiting.popleft()
                    asking[asyncio.create_task(self._ask_digests(donor, payload))] = donor
                done, _ = await asyncio.wait(
                    asking, timeout=STAGGER if waiting else None, return_when=asyncio.FIRST_COMPLETED
                )
                for answer in done:
                    donor = asking.pop(answer)
                    try:
                        return answer.result(), [donor, *waiting, *asking.values()]
                    except (PeerUnreachableError, RemoteProtocolError) as error:
                        reasons.append(str(error))
        finally:
            for question in asking:
                question.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        raise PayloadError("; ".join(reasons) or "nobody has it")

    async def _ask_digests(self, donor: str, payload: bytes) -> tuple[bytes, ...]:
        """Raises: PeerUnreachableError; RemoteProtocolError when they are those of another payload."""
        size = DIGEST_BYTES * self._buffers.size.chunks
        request = pack(PayloadRequest(run=self._run, payload=payload, first=0, last=0))
        _, packed = await self._transport.pull(donor, PAYLOAD, request, size, DIGESTS_TIMEOUT)
        digests = tuple(bytes(packed[at : at + DIGEST_BYTES]) for at in range(0, len(packed), DIGEST_BYTES))
        if len(packed) != size or payload_digest(digests) != payload:
            raise RemoteProtocolError(donor, "it has other digests")
        return digests
