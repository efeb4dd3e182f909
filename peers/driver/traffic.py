"""The chunks of one peer's rounds on their way: out, one queue per member, and in, only what the protocol waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Protocol

from pydantic import Field

from peers.errors import RemoteProtocolError
from peers.links.sockets import has_bbr
from peers.log.header import MEMBER_LIMIT
from peers.protocol.events import (
    BadBlocks,
    ChunkSent,
    ChunksUnsent,
    ContributionArrived,
    Event,
    ReducedArrived,
    SendChunk,
)
from peers.protocol.messages import Attempt
from peers.protocol.peer import Peer
from peers.streams.channel import Channel, PeerUnreachableError, RefusalError
from peers.streams.chunk_streams import ChunkSender, Frame, receive_chunks
from peers.streams.lanes import FEWEST, MOST, MOST_WITH_BBR, Lanes
from peers.streams.throttle import RateMeter
from peers.transfer.buffers import PayloadBuffers
from peers.values.wire import Count, PeerId, Value, pack, unpack_from
from peers.values.workload import BadBlocksError, Workload

CHUNKS = "chunks"
STREAMS = 512  # to all members together, where more than the fewest are of use
CLOSING_TIME = 5.0  # seconds that a stream may take to end properly, so that its connection can be used again
ADMISSION_TIMEOUT = 10.0  # seconds that a member may be ahead of us in beginning a round


class StreamHeader(Value):
    """The round that a stream's chunks are of."""

    round: Attempt


class ChunkHeader(Value):
    """What a frame holds: an averaged chunk, or the sender's own blocks of it."""

    chunk: Count
    reduced: Annotated[bool, Field(strict=True)]
    absent: Annotated[tuple[PeerId, ...], Field(max_length=MEMBER_LIMIT)]


class StreamTransport(Protocol):
    def stream(self, peer_id: str, protocol: str) -> AbstractAsyncContextManager[Channel]: ...
    async def on_stream(self, protocol: str, conversation: Callable[[Channel], Awaitable[None]]) -> None: ...


class Host(Protocol):
    """The driver that chunks are moved for."""

    def handle(self, event: Event) -> None: ...
    async def until(self, condition: Callable[[Peer], bool]) -> None: ...
    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]: ...


class Traffic:
    """Sends and receives the chunks of the present round."""

    def __init__(
        self,
        peer: Peer,
        transport: StreamTransport,
        workload: Workload,
        buffers: PayloadBuffers,
        host: Host,
    ) -> None:
        self._peer = peer
        self._transport = transport
        self._workload = workload
        self._buffers = buffers
        self._host = host
        self._sent, self._received = RateMeter(), RateMeter()
        self._round: Attempt | None = None
        self._from: dict[str, RateMeter] = {}
        self._lanes = Lanes(MOST_WITH_BBR if has_bbr() else MOST)
        self._queues: dict[str, asyncio.Queue[SendChunk | None]] = {}
        self._senders: dict[str, list[asyncio.Task[None]]] = {}
        self._receivers: dict[asyncio.Task[None], tuple[Attempt, str]] = {}

    async def serve(self) -> None:
        await self._transport.on_stream(CHUNKS, self._receive)

    @property
    def rate(self) -> int:
        """Bytes a second that the link was seen to carry each way in rounds; 0: not known."""
        return int(min(self._sent.rate, self._received.rate))

    def knows(self, upload: float, download: float) -> None:
        """Take these for the rates of a round, since they were measured otherwise."""
        self._sent.knows(upload)
        self._received.knows(download)

    @property
    def rates(self) -> dict[str, int]:
        """Bytes a second at which other members' data came in, in the last rounds."""
        return {peer: int(meter.rate) for peer, meter in self._from.items() if meter.rate}

    def begin(self, round: Attempt, others: int) -> None:
        """Move chunks of this round, which has so many other members."""
        for peer in list(self._senders):
            self._end_streams_to(peer, at_once=False)
        self._round = round
        self._lanes.begin_round(others)
        self._sent.begin_round()
        self._received.begin_round()
        for meter in self._from.values():
            meter.begin_round()

    def tidy(self, present: Attempt | None, members: Collection[str]) -> None:
        """End streams that nobody waits for any more: of other rounds than `present`, and with who is lost."""
        for peer in list(self._senders):
            if present != self._round or peer not in members:
                self._end_streams_to(peer, at_once=present == self._round)
        for task, (round, peer) in list(self._receivers.items()):
            if round == present and peer not in members:
                task.cancel()
            elif round != present:
                asyncio.get_running_loop().call_later(CLOSING_TIME, self._cut, task, (round, peer))
        if present != self._round:
            self._round = None

    def _cut(self, receiver: asyncio.Task[None], of: tuple[Attempt, str]) -> None:
        """End a stream of an earlier round. Its task may have gone on to another on the same connection."""
        if self._receivers.get(receiver) == of:
            receiver.cancel()

    def _end_streams_to(self, peer: str, at_once: bool) -> None:
        """What has not been sent yet is not sent any more. Unless `at_once`, streams end properly."""
        queue = self._queues.pop(peer)
        while not queue.empty():
            queue.get_nowait()
        for task in self._senders.pop(peer):
            queue.put_nowait(None)
            if at_once:
                task.cancel()
            else:
                asyncio.get_running_loop().call_later(CLOSING_TIME, task.cancel)

    # Out ------------------------------------------------------------------------------------------------------
    def send(self, send: SendChunk) -> None:
        if send.round != self._round:
            return
        self._queues.setdefault(send.to, asyncio.Queue()).put_nowait(send)
        self._open_streams_to(send.round, send.to)

    def _open_streams_to(self, round: Attempt, to: str) -> None:
        tasks = [task for task in self._senders.get(to, []) if not task.done()]
        most = max(FEWEST, STREAMS // len(self._queues))
        while len(tasks) < min(self._lanes.count, self._buffers.size.chunks, most):
            tasks.append(self._host.start(self._carry(round, to, self._queues[to])))
        self._senders[to] = tasks

    async def _carry(self, round: Attempt, to: str, queue: asyncio.Queue[SendChunk | None]) -> None:
        """One stream to a member, from the first chunk for it until it breaks or the round is over."""
        first = await queue.get()
        if first is None:
            return
        waiting = [first]  # until the stream is open

        async def following() -> Frame[SendChunk] | None:
            send = waiting.pop() if waiting else await queue.get()
            return Frame(send, pack(_header(send)), self._data(send)) if send else None

        sender: ChunkSender[SendChunk] | None = None
        try:
            async with self._transport.stream(to, CHUNKS) as channel:
                sender = ChunkSender(channel)
                await sender.run(pack(StreamHeader(round=round)), following, self._answered)
        except PeerUnreachableError:
            unsent = [*waiting, *(sender.pending if sender else ())]
            if not self._is_carried_by_others(to):
                while not queue.empty():
                    if send := queue.get_nowait():
                        unsent.append(send)
            self._report_unsent(round, to, unsent)
        except KeyError:
            pass  # the round is over

    def _is_carried_by_others(self, to: str) -> bool:
        """Whether other streams than the one of this task take what waits for a member."""
        return any(not task.done() for task in self._senders.get(to, ()) if task is not asyncio.current_task())

    def _data(self, send: SendChunk) -> memoryview:
        read = self._buffers.averaged if send.reduced else self._buffers.contribution
        return read(send.round, send.chunk)

    def _answered(self, send: SendChunk, is_taken: bool) -> None:
        if is_taken:
            start, stop = self._buffers.chunk_bytes(send.chunk)
            self._sent.passed(stop - start)
            self._widen(send.round, stop - start)
            self._host.handle(ChunkSent(send.round, send.to, send.chunk, send.reduced))
        else:
            self._host.handle(ChunksUnsent(send.round, send.to, (send.chunk,), send.reduced))

    def _widen(self, round: Attempt, count: int) -> None:
        """Use more connections, where those that there are do not carry all that waits."""
        has_more = any(queue.qsize() for queue in self._queues.values())
        if self._lanes.passed(count, has_more) and round == self._round:
            for peer in list(self._senders):
                self._open_streams_to(round, peer)

    def _report_unsent(self, round: Attempt, to: str, unsent: Collection[SendChunk]) -> None:
        for reduced in (False, True):
            chunks = tuple(send.chunk for send in unsent if send.reduced == reduced)
            if chunks:
                self._host.handle(ChunksUnsent(round, to, chunks, reduced))

    # In -------------------------------------------------------------------------------------------------------
    async def _receive(self, channel: Channel) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await receive_chunks(channel, self._admit)
        finally:
            self._receivers.pop(task, None)

    async def _admit(self, sender: str, packed: bytes) -> StreamArrivals:
        """Once we are in the round, too: its leader may have told the sender first."""
        round = unpack_from(sender, StreamHeader, packed).round
        try:
            async with asyncio.timeout(ADMISSION_TIMEOUT if self._peer.is_live(sender) else 0):
                await self._host.until(lambda peer: _is_in(peer, round, sender))
        except TimeoutError:
            raise RefusalError(f"not in round {round} with you") from None
        if list(self._receivers.values()).count((round, sender)) >= MOST:
            raise RefusalError("too many streams of one round")
        task = asyncio.current_task()
        assert task is not None
        self._receivers[task] = (round, sender)
        if sender not in self._from:
            self._from[sender] = RateMeter()
            self._from[sender].begin_round()
        return StreamArrivals(sender, self._buffers, lambda header, data: self._arrived(sender, round, header, data))

    def _arrived(self, sender: str, round: Attempt, header: ChunkHeader, data: bytearray) -> bool:
        """Take the chunk, if the protocol waits for it; whether the sender is rid of it."""
        exchange, current = self._peer.exchange, self._buffers.round(round)
        self._received.passed(len(data))
        self._from[sender].passed(len(data))
        if exchange is None or current is None or exchange.name != round:
            return False
        chunk = header.chunk
        wanted = exchange.wants_reduced if header.reduced else exchange.wants_contribution
        if not wanted(sender, chunk):
            return exchange.is_done_with(sender, chunk, header.reduced)
        try:
            self._workload.check(data, self._buffers.chunking.blocks(chunk)[0])
            if header.absent and not exchange.may_lack(header.absent):
                raise BadBlocksError("nobody is left in it")
        except BadBlocksError as error:
            self._host.handle(BadBlocks(round, sender, chunk, str(error)))
            return False
        if header.reduced:
            self._buffers.store(round, chunk, data)
            self._host.handle(ReducedArrived(round, sender, chunk, header.absent))
        else:
            current.contributions[chunk][sender] = data
            self._host.handle(ContributionArrived(round, sender, chunk))
        return True


class StreamArrivals:
    """The chunks that come on one stream: what is announced, and the memory for it."""

    def __init__(self, sender: str, buffers: PayloadBuffers, take: Callable[[ChunkHeader, bytearray], bool]) -> None:
        self._sender = sender
        self._buffers = buffers
        self._take = take
        self._spare = bytearray()

    def expect(self, header: bytes, length: int) -> bytearray:
        """Raises: RemoteProtocolError unless the frame announces a whole chunk of this run."""
        self._header = unpack_from(self._sender, ChunkHeader, header)
        chunk = self._header.chunk
        if chunk >= self._buffers.size.chunks:
            raise RemoteProtocolError(self._sender, f"there is no chunk {chunk} in a payload")
        start, stop = self._buffers.chunk_bytes(chunk)
        if length != stop - start:
            raise RemoteProtocolError(self._sender, f"its chunk {chunk} has {length} bytes, not {stop - start}")
        self._data = self._spare if len(self._spare) == length else self._buffers.room(length)
        return self._data

    def arrived(self) -> bool:
        # Averages are copied to their place in the payload; blocks that are to be averaged are kept where they are.
        self._spare = self._data if self._header.reduced else bytearray()
        return self._take(self._header, self._data)


def _header(send: SendChunk) -> ChunkHeader:
    return ChunkHeader(chunk=send.chunk, reduced=send.reduced, absent=send.absent)


def _is_in(peer: Peer, round: Attempt, sender: str) -> bool:
    return peer.exchange is not None and peer.exchange.name == round and sender in peer.exchange.round.remaining
