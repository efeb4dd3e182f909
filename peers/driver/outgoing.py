"""The chunks of rounds on their way out: one queue for each member, and several streams that empty it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from peers import metrics
from peers.driver.host import Host
from peers.driver.incoming import CHUNKS, CLOSING_TIME, StreamHeader
from peers.links.sockets import has_bbr
from peers.protocol.effects import SendChunk
from peers.protocol.events import ChunkSent, ChunksUnsent
from peers.protocol.rounds import Attempt
from peers.streams.channel import Channel, PeerUnreachableError
from peers.streams.chunk_streams import ChunkSender, Frame
from peers.streams.lanes import FEWEST, MOST, MOST_WITH_BBR, Lanes
from peers.streams.throttle import RateMeter
from peers.transfer.admission import ChunkHeader
from peers.transfer.buffers import PayloadBuffers
from peers.values.wire import pack

STREAMS = 512  # to all members together, where more than the fewest are of use


class OutgoingTransport(Protocol):
    def stream(self, peer_id: str, protocol: str) -> AbstractAsyncContextManager[Channel]: ...


class Uplink:
    """What our link carries away in all rounds together: `meter` measures what is confirmed."""

    def __init__(self) -> None:
        self.meter = RateMeter()
        self.lanes = Lanes(MOST_WITH_BBR if has_bbr() else MOST)
        self.sent_bytes = 0

    def begin_round(self, others: int) -> None:
        """A round begins, with so many other members."""
        self.lanes.begin_round(others)
        self.meter.begin_round()

    def passed(self, count: int) -> None:
        """So many bytes of a chunk are confirmed."""
        self.meter.passed(count)
        self.sent_bytes += count
        metrics.ROUND_BYTES.labels("sent").inc(count)


class Outgoing:
    """Sends the chunks of one fragment's present round."""

    def __init__(self, transport: OutgoingTransport, buffers: PayloadBuffers, host: Host, uplink: Uplink) -> None:
        self._transport = transport
        self._buffers = buffers
        self._host = host
        self._uplink = uplink
        self._round: Attempt | None = None
        self._queues: dict[str, asyncio.Queue[SendChunk | None]] = {}
        self._senders: dict[str, list[asyncio.Task[None]]] = {}

    def begin(self, round_name: Attempt, others: int) -> None:
        """Send chunks of this round, which has so many other members."""
        for peer in list(self._senders):
            self._end_streams_to(peer, at_once=False)
        self._round = round_name
        self._uplink.begin_round(others)

    def tidy(self, present: Attempt | None, members: Collection[str]) -> None:
        """End streams that nobody waits for: of other rounds than `present`, and to members that are lost."""
        for peer in list(self._senders):
            if present != self._round or peer not in members:
                self._end_streams_to(peer, at_once=present == self._round)
        if present != self._round:
            self._round = None

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

    def send(self, send: SendChunk) -> None:
        if send.round_name != self._round:
            return
        self._queues.setdefault(send.to, asyncio.Queue()).put_nowait(send)
        self._open_streams_to(send.round_name, send.to)

    def _open_streams_to(self, round_name: Attempt, to: str) -> None:
        tasks = [task for task in self._senders.get(to, []) if not task.done()]
        most = max(FEWEST, STREAMS // len(self._queues))
        while len(tasks) < min(self._uplink.lanes.count, self._buffers.size.chunks, most):
            tasks.append(self._host.start(self._carry(round_name, to, self._queues[to])))
        self._senders[to] = tasks

    async def _carry(self, round_name: Attempt, to: str, queue: asyncio.Queue[SendChunk | None]) -> None:
        """One stream to a member, from the first chunk for it until it breaks or the round is over."""
        first = await queue.get()
        if first is None:
            return
        waiting = [first]  # until the stream is open

        async def following() -> Frame[SendChunk] | None:
            send = waiting.pop() if waiting else await queue.get()
            return Frame(send, pack(self._header(send)), self._data(send)) if send else None

        sender: ChunkSender[SendChunk] | None = None
        try:
            async with self._transport.stream(to, CHUNKS) as channel:
                sender = ChunkSender(channel)
                await sender.run(pack(StreamHeader(round_name=round_name)), following, self._answered)
        except PeerUnreachableError:
            unsent = [*waiting, *(sender.pending if sender else ())]
            if not self._is_carried_by_others(to):
                while not queue.empty():
                    if send := queue.get_nowait():
                        unsent.append(send)
            self._report_unsent(round_name, to, unsent)
        except KeyError:
            pass  # the round is over

    def _is_carried_by_others(self, to: str) -> bool:
        """Whether other streams than the one of this task take what waits for a member."""
        return any(not task.done() for task in self._senders.get(to, ()) if task is not asyncio.current_task())

    def _data(self, send: SendChunk) -> memoryview:
        read = self._buffers.averaged if send.reduced else self._buffers.contribution
        return read(send.round_name, send.chunk)

    def _header(self, send: SendChunk) -> ChunkHeader:
        return ChunkHeader.of(send, self._buffers)

    def _answered(self, send: SendChunk, is_taken: bool) -> None:
        if is_taken:
            start, stop = self._buffers.chunk_bytes(send.chunk)
            self._uplink.passed(stop - start)
            self._widen(send.round_name, stop - start)
            self._host.handle(ChunkSent(send.round_name, send.to, send.chunk, send.reduced))
        else:
            self._host.handle(ChunksUnsent(send.round_name, send.to, (send.chunk,), send.reduced))

    def _widen(self, round_name: Attempt, count: int) -> None:
        """Use more connections, where those that there are do not carry all that waits."""
        has_more = any(queue.qsize() for queue in self._queues.values())
        if self._uplink.lanes.passed(count, has_more) and round_name == self._round:
            for peer in list(self._senders):
                self._open_streams_to(round_name, peer)

    def _report_unsent(self, round_name: Attempt, to: str, unsent: Collection[SendChunk]) -> None:
        for reduced in (False, True):
            chunks = tuple(send.chunk for send in unsent if send.reduced == reduced)
            if chunks:
                self._host.handle(ChunksUnsent(round_name, to, chunks, reduced))
