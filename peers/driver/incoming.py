"""The chunks of rounds on their way in: only what the protocol waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol

from peers import metrics
from peers.driver.host import Host
from peers.errors import RemoteProtocolError
from peers.network.channel import Channel, RefusalError, receive_chunks
from peers.network.throttle import MOST, RateMeter
from peers.protocol.rounds import Attempt
from peers.transfer.admission import Admission, ChunkHeader
from peers.transfer.buffers import PayloadBuffers
from peers.values.clock import now
from peers.values.wire import Value, unpack_from

CHUNKS = "chunks"
CLOSING_TIME = 5.0  # seconds that a stream may take to end properly, so that its connection can be used again
ADMISSION_TIMEOUT = 10.0  # seconds that a member may be ahead of us in beginning a round


class StreamHeader(Value):
    """The round that a stream's chunks are of."""

    round_name: Attempt


class IncomingTransport(Protocol):
    async def on_stream(self, protocol: str, conversation: Callable[[Channel], Awaitable[None]]) -> None: ...


class Incoming:
    """Receives the chunks of the present rounds, one for each fragment at most. `meter` measures what comes, and
    `rates` have it by sender."""

    def __init__(
        self,
        transport: IncomingTransport,
        admissions: Sequence[Admission],
        buffers: Sequence[PayloadBuffers],
        host: Host,
    ) -> None:
        """`admissions` and `buffers` are of each fragment."""
        self.meter = RateMeter()
        self.received_bytes = 0
        self._transport = transport
        self._admissions = admissions
        self._buffers = buffers
        self._host = host
        self._from: dict[str, RateMeter] = {}
        self._receivers: dict[asyncio.Task[None], tuple[Attempt, str]] = {}

    async def serve(self) -> None:
        await self._transport.on_stream(CHUNKS, self._receive)

    @property
    def rates(self) -> dict[str, int]:
        """Bytes a second at which other members' data came in, in the last rounds."""
        return {peer: int(meter.rate) for peer, meter in self._from.items() if meter.rate}

    def begin(self) -> None:
        self.meter.begin_round()
        for meter in self._from.values():
            meter.begin_round()

    def tidy(self, present: Mapping[Attempt, Collection[str]]) -> None:
        """End streams that nobody waits for: of other rounds than the `present` ones, and from peers that are not among
        their members any more."""
        for task, (round_name, peer) in list(self._receivers.items()):
            if round_name in present and peer not in present[round_name]:
                task.cancel()
            elif round_name not in present:
                asyncio.get_running_loop().call_later(CLOSING_TIME, self._cut, task, (round_name, peer))

    def _cut(self, receiver: asyncio.Task[None], of: tuple[Attempt, str]) -> None:
        """End a stream of an earlier round. Its task may have gone on to another on the same connection."""
        if self._receivers.get(receiver) == of:
            receiver.cancel()

    async def _receive(self, channel: Channel) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await receive_chunks(channel, self._admit)
        finally:
            self._receivers.pop(task, None)

    async def _admit(self, sender: str, packed: bytes) -> StreamArrivals:
        """Let a stream begin as soon as we are in its round, too: its leader may have told the sender first.

        Raises: RefusalError, RemoteProtocolError.
        """
        round_name = unpack_from(sender, StreamHeader, packed).round_name
        fragment = round_name.position.fragment
        if fragment >= len(self._admissions):
            raise RemoteProtocolError(sender, f"there is no fragment {fragment}")
        admission = self._admissions[fragment]
        try:
            async with asyncio.timeout(ADMISSION_TIMEOUT if self._host.peer.is_live(sender) else 0):
                await self._host.until(lambda peer: admission.is_shared(round_name, sender))
        except TimeoutError:
            raise RefusalError(f"not in round {round_name} with you") from None
        if list(self._receivers.values()).count((round_name, sender)) >= MOST:
            raise RefusalError("too many streams of one round")
        task = asyncio.current_task()
        assert task is not None
        self._receivers[task] = (round_name, sender)
        if sender not in self._from:
            self._from[sender] = RateMeter()
            self._from[sender].begin_round()

        def take(header: ChunkHeader, data: bytearray, seconds: float) -> bool:
            self._passed(sender, len(data), seconds)
            return self._take(sender, round_name, header, data)

        return StreamArrivals(sender, admission, self._buffers[fragment], take)

    def _passed(self, sender: str, count: int, seconds: float) -> None:
        """Count the bytes of a chunk that took so many seconds to come."""
        self.meter.passed(count, seconds)
        self._from[sender].passed(count, seconds)
        self.received_bytes += count
        metrics.ROUND_BYTES.labels("received").inc(count)

    def _take(self, sender: str, round_name: Attempt, header: ChunkHeader, data: bytearray) -> bool:
        """Take a chunk in. Return whether the sender is rid of it."""
        event, is_taken = self._admissions[round_name.position.fragment].take(sender, round_name, header, data)
        if event is not None:
            self._host.handle(event)
        return is_taken


class StreamArrivals:
    """The chunks that come on one stream: what is announced, and the memory for it."""

    def __init__(
        self,
        sender: str,
        admission: Admission,
        buffers: PayloadBuffers,
        take: Callable[[ChunkHeader, bytearray, float], bool],
    ) -> None:
        self._sender = sender
        self._admission = admission
        self._buffers = buffers
        self._take = take
        self._spare = bytearray()

    def expect(self, header: bytes, length: int) -> bytearray:
        """Raises: RemoteProtocolError unless the frame announces a whole chunk of this run."""
        self._header = unpack_from(self._sender, ChunkHeader, header)
        self._admission.check_size(self._sender, self._header, length)
        self._data = self._spare if len(self._spare) == length else self._buffers.room(length)
        self._began = now()
        return self._data

    def arrived(self) -> bool:
        # Averages are copied to their place in the payload; blocks that are to be averaged are kept where they are.
        self._spare = self._data if self._header.reduced else bytearray()
        return self._take(self._header, self._data, now() - self._began)
