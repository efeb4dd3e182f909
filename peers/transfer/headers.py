"""Past entries of the log, in brief: served to peers that follow it, and fetched by them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, TypeAlias

from pydantic import Field

from peers.log.chain import STRETCH_LIMIT, Stretch
from peers.log.folder import RunLog
from peers.network.channel import Buffer, Places
from peers.transfer.download import PullTransport, kept_for
from peers.values.wire import Count, RunId, Value, pack, unpack_from

HEADERS = "headers"
READERS = 8  # pulls of members of the log that are served at once; each may take megabytes meanwhile
STRANGERS = 4  # besides, others: who joins or follows the run, or only wants to keep us busy
PULLS = 1  # of one peer at once: packing a stretch of a large run takes the event loop's time
BYTES_LIMIT = 1 << 23  # bytes: the outcomes of a stretch, and the header that it may begin with
TIMEOUT = 30.0  # seconds for an answer: the donor may be in a round
TIMEOUT_PER_ENTRY = 0.25  # seconds besides, for each entry: 30 KB at 1 Mbit/s

Past: TypeAlias = Callable[[int, int, bool], Stretch]
"""Return those of the cycles [first, last) that are here, the first of them whole or not: see `Chain.stretch`."""


class HeadersRequest(Value):
    """Those of the cycles [first, last); the first `is_whole` if the asker does not know what it follows."""

    run: RunId
    first: Count
    last: Count
    is_whole: Annotated[bool, Field(strict=True)]


async def serve_headers(
    transport: PullTransport,
    pasts: Mapping[str, Past],
    is_member: Callable[[str, str], bool] = lambda run, peer: False,
) -> None:
    """Answer `fetch_stretch` about these runs from now on. `is_member` says of a run and a peer whether the run's log
    has a lease for it: no stranger keeps such a peer from being answered."""
    places, places_for_strangers = Places(READERS, PULLS), Places(STRANGERS, PULLS)

    @asynccontextmanager
    async def serve(sender: str, packed: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
        request = unpack_from(sender, HeadersRequest, packed)
        past = kept_for(transport, pasts, request.run, sender)
        async with (places if is_member(request.run, sender) else places_for_strangers).one_for(sender):
            last = min(request.last, request.first + STRETCH_LIMIT)
            yield b"", pack(past(request.first, last, request.is_whole))

    await transport.on_pull(HEADERS, serve, gives_way=True)


async def fetch_stretch(
    transport: PullTransport, donor: str, run: str, first: int, last: int, is_whole: bool
) -> Stretch:
    """Fetch as many of the cycles [first, last) as the donor gives at once, from `first` on.

    Whether they fit is for the log to say. Raises: PeerUnreachableError, RemoteProtocolError.
    """
    request = pack(HeadersRequest(run=run, first=first, last=last, is_whole=is_whole))
    timeout = TIMEOUT + TIMEOUT_PER_ENTRY * max(0, min(STRETCH_LIMIT, last - first))
    _, packed = await transport.pull(donor, HEADERS, request, BYTES_LIMIT, timeout)
    return unpack_from(donor, Stretch, bytes(packed), BYTES_LIMIT)


async def add_headers_before(transport: PullTransport, donor: str, log: RunLog) -> bool:
    """Add some of the entries that lead up to a log's first one. Returns whether the donor has any.

    Raises: PeerUnreachableError, RemoteProtocolError, LogError, LogFolderError.
    """
    first = max(0, log.first - max(1, STRETCH_LIMIT // log.empty_log.fragments))
    stretch = await fetch_stretch(transport, donor, log.empty_log.run, first, log.first, is_whole=True)
    await asyncio.to_thread(log.prepend, stretch)
    return bool(stretch.told)
