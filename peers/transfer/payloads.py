"""Payloads of past entries: served to who fell behind, and fetched from several peers at once, each chunk checked."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from peers.errors import RemoteProtocolError
from peers.log.header import Header
from peers.network.channel import PeerUnreachableError, Places, RefusalError
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.download import RANGES, Download, DownloadError, PullTransport, Wanted, shuffled
from peers.values.chunks import Payload, chunks_of
from peers.values.system import cancel_and_wait
from peers.values.wire import DIGEST_BYTES, Buffer, Count, Digest, RunId, Value, pack, unpack_from

PAYLOAD = "payload"
READERS = 16  # pulls that are served at once
PULLS = RANGES + 1  # of one peer at once: one may have been given up, and its end not be seen here yet
RANGE = 16  # chunks asked for at once, at most
RANGES_AT_LEAST = 32  # if there are as many chunks, so that several donors give
DIGESTS_TIMEOUT = 60.0  # seconds for the digests of a payload's chunks
STAGGER = 3.0  # seconds after which another donor is asked for them, too


class PayloadRequest(Value):
    """Chunks [first, last) of a fragment's payload that is kept; of none: the digests of all its chunks."""

    run: RunId
    fragment: Count
    payload: Digest
    first: Count
    last: Count


class PayloadError(Exception):
    """A payload can't be had from the peers that should have it."""


async def serve_payloads(transport: PullTransport, kept: Mapping[str, Sequence[PayloadBuffers]]) -> None:
    """Give the payloads that are kept of these runs' fragments to who asks, from now on."""
    places = Places(READERS, PULLS)

    @asynccontextmanager
    async def serve(sender: str, packed: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
        request = unpack_from(sender, PayloadRequest, packed)
        transport.check_admitted(request.run, sender)
        fragments = kept.get(request.run, ())
        buffers = fragments[request.fragment] if request.fragment < len(fragments) else None
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

    def __init__(self, transport: PullTransport, run: str, buffers: Sequence[PayloadBuffers]) -> None:
        """`buffers` are of each fragment."""
        self._transport = transport
        self._run = run
        self._buffers = buffers
        self._fetches: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def fetch(self, header: Header, donors: Sequence[str]) -> None:
        """Get and keep the payload of an entry. Raises: PayloadError when no donor has all of it."""
        async with self._fetches.setdefault(header.payload, asyncio.Lock()):
            buffers = self._buffers[header.fragment]
            payload = await asyncio.to_thread(buffers.find, header.payload)
            buffers.kept.keep(payload or await self._fetch(buffers, header.payload, donors))

    async def _fetch(self, buffers: PayloadBuffers, payload: bytes, donors: Sequence[str]) -> Payload:
        fragment, chunks = buffers.fragment, buffers.size.chunks
        digests, donors = await self._digests(buffers, payload, donors)
        wanted = Wanted(
            name=PAYLOAD,
            digests=digests,
            bounds=buffers.chunks_bytes,
            request=lambda first, last: self._request(fragment, payload, first, last),
            range=max(1, min(RANGE, chunks // RANGES_AT_LEAST)),
        )
        data = buffers.room_for_payload()
        try:
            await Download(self._transport, wanted, data).run(donors)
        except DownloadError as error:
            raise PayloadError(str(error)) from error
        return Payload(data, digests)

    def _request(self, fragment: int, payload: bytes, first: int, last: int) -> bytes:
        request = PayloadRequest(run=self._run, fragment=fragment, payload=payload, first=first, last=last)
        return pack(request)

    async def _digests(
        self, buffers: PayloadBuffers, payload: bytes, donors: Sequence[str]
    ) -> tuple[tuple[bytes, ...], list[str]]:
        """The digests of the payload's chunks, and the donors that may have it: those that are slow to say so last.

        Donors are asked one after another, without waiting long for any.
        """
        waiting = deque(shuffled(self._transport, donors))
        asking: dict[asyncio.Task[tuple[bytes, ...]], str] = {}
        reasons = []
        try:
            while waiting or asking:
                if waiting:
                    donor = waiting.popleft()
                    asking[asyncio.create_task(self._ask_digests(buffers, donor, payload))] = donor
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
            await cancel_and_wait(*asking)
        raise PayloadError("; ".join(reasons) or "nobody has it")

    async def _ask_digests(self, buffers: PayloadBuffers, donor: str, payload: bytes) -> tuple[bytes, ...]:
        """Raises: PeerUnreachableError; RemoteProtocolError when they are those of another payload."""
        count, request = buffers.size.chunks, self._request(buffers.fragment, payload, 0, 0)
        _, packed = await self._transport.pull(donor, PAYLOAD, request, DIGEST_BYTES * count, DIGESTS_TIMEOUT)
        return chunks_of(donor, PAYLOAD, packed, count, payload)
