"""Headers of past entries: served to who follows the log, and fetched by them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, TypeAlias

from pydantic import Field

from peers.log.folder import RunLog
from peers.log.header import Header
from peers.streams.channel import Buffer, RefusalError
from peers.streams.places import Places
from peers.transfer.download import PullTransport
from peers.values.wire import Count, RunId, Value, pack, unpack_from

HEADERS = "headers"
READERS = 4
PULLS = 1  # of one peer at once
HEADERS_AT_ONCE = 256  # headers
BYTES_LIMIT = 1 << 26  # bytes; headers of 1,000 peers are a quarter of a MB each
TIMEOUT = 30.0  # seconds for an answer: the donor may be in a round
TIMEOUT_PER_HEADER = 2.0  # seconds besides, for each header: a quarter of a MB at 1 Mbit/s

Past: TypeAlias = Callable[[int, int], Sequence[Header]]
"""Headers of the entries [first, last) that are here: consecutive, from the first on."""


class HeadersRequest(Value):
    """Those of the entries [first, last)."""

    run: RunId
    first: Count
    last: Count


class Headers(Value):
    headers: Annotated[tuple[Header, ...], Field(max_length=HEADERS_AT_ONCE)]


async def serve_headers(transport: PullTransport, pasts: Mapping[str, Past]) -> None:
    """Answer `fetch_headers` about these runs from now on."""
    places = Places(READERS, PULLS)

    @asynccontextmanager
    async def serve(sender: str, packed: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
        request = unpack_from(sender, HeadersRequest, packed)
        past = pasts.get(request.run)
        if past is None:
            raise RefusalError(f"run {request.run} is not here")
        async with places.one_for(sender):
            last = min(request.last, request.first + HEADERS_AT_ONCE)
            yield b"", pack(Headers(headers=tuple(past(request.first, last))))

    await transport.on_pull(HEADERS, serve, gives_way=True)


async def fetch_headers(transport: PullTransport, donor: str, run: str, first: int, last: int) -> tuple[Header, ...]:
    """As many of the entries [first, last) as the donor has, from `first` on; whether they fit is for the log to say.

    Raises: PeerUnreachableError, RemoteProtocolError.
    """
    request = pack(HeadersRequest(run=run, first=first, last=last))
    timeout = TIMEOUT + TIMEOUT_PER_HEADER * max(0, min(HEADERS_AT_ONCE, last - first))
    _, packed = await transport.pull(donor, HEADERS, request, BYTES_LIMIT, timeout)
    return unpack_from(donor, Headers, bytes(packed), BYTES_LIMIT).headers


async def add_headers_before(transport: PullTransport, donor: str, log: RunLog) -> bool:
    """Some of those that lead up to a log's first entry; whether the donor has any.

    Raises: PeerUnreachableError, RemoteProtocolError, LogError, LogFolderError.
    """
    first = max(0, log.first - HEADERS_AT_ONCE)
    headers = await fetch_headers(transport, donor, log.empty_log.run, first, log.first)
    await asyncio.to_thread(log.prepend, headers)
    return bool(headers)
