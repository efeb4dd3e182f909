"""Sending of a round's chunks, with a queue and several streams for each member, and one uplink for all rounds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from peers import metrics
from peers.messages.rounds import RoundName
from peers.network.channel import BYTES_UNDER_WAY, ChunkSender, Frame, PeerUnreachableError
from peers.network.sockets import has_bbr
from peers.network.throttle import FEWEST, FEWEST_WITH_BBR, MOST_WITH_BBR, Lanes, RateMeter
from peers.protocol.effects import SendChunk
from peers.protocol.events import ChunkSent, ChunksUnsent
from peers.transfer.averages import ChunkHeader
from peers.transfer.buffers import PayloadBuffers
from peers.values.wire import Value, pack

if TYPE_CHECKING:
    from peers.driver.driver import Driver
    from peers.network.transport import HivemindTransport

CHUNKS = "chunks"
CLOSING_TIME = 5.0  # maximum seconds for a stream to end properly, so that its connection can be used again
LATE_FLIGHT = 2.0  # a chunk is late after this many times the member's usual answer time
MEMORY = 0.25  # weight of the last chunk's answer time in the member's average answer time
LATE_CHUNK = 1.5  # a chunk is sent again on another stream after this many times the seconds expected for it
LEAST_PATIENCE = 1.0  # minimum seconds before a chunk is sent again on another stream
PATIENCE = 5.0  # maximum seconds for which a chunk waits for chunks of earlier rounds
SECONDS_UNDER_WAY = 0.5  # maximum unconfirmed data on all streams together, in seconds that the uplink needs for it
LOOK = 0.25  # seconds between two checks for late chunks
STREAMS = 512  # maximum number of streams to all members together; but each member has at least FEWEST


class StreamHeader(Value):
    """The header of a stream of chunks, which names the chunks' round."""

    round_name: RoundName


@dataclass(frozen=True)
class _Flight:
    """A chunk that was sent but is not answered: the times in seconds of its first and last sending, the last stream
    that sent it, and the number of streams that sent it."""

    first: float
    last: float
    stream: object
    times: int
    send: SendChunk


class _Flights:
    """The chunks that were sent to one member but are not answered. If TCP waits for a lost packet, one of several
    connections may stall for seconds, so its chunks are sent again on another connection.

    If all chunks take long, none of them hangs. Sending them again would only double the load of a link that is slow or
    shared by many.
    """

    def __init__(self, clock: Callable[[], float], usual: float = 0.0) -> None:
        self.usual = usual
        """Seconds from sending a chunk until its answer; 0 if unknown."""
        self._clock = clock
        # The unanswered chunks. The first one is the chunk whose last sending is longest ago. A key has the chunk's
        # number, and True for an average or False for a contribution's blocks.
        self._flights: dict[tuple[int, bool], _Flight] = {}

    def begin(self, send: SendChunk, stream: object) -> None:
        """Record that a chunk is sent on this stream, for the first time or again."""
        now, before = self._clock(), self._flights.pop((send.chunk, send.reduced), None)
        first, times = (before.first, before.times + (before.stream is not stream)) if before else (now, 1)
        self._flights[send.chunk, send.reduced] = _Flight(first, now, stream, times, send)

    def end(self, send: SendChunk) -> bool:
        """Remove an answered chunk. Return True if no answer for this chunk arrived before."""
        flight = self._flights.pop((send.chunk, send.reduced), None)
        if flight is None:
            return False
        took = self._clock() - flight.first
        self.usual = self.usual + MEMORY * (took - self.usual) if self.usual else took
        return True

    @property
    def are_answered(self) -> bool:
        return not self._flights

    def forget_blocks(self) -> None:
        """Remove the chunks of contributions, so that only averages still await answers."""
        self._flights = {key: flight for key, flight in self._flights.items() if flight.send.reduced}

    def late(self, stream: object, patience: float) -> SendChunk | None:
        """Return a chunk that another stream sent, and whose answer is late; None if there is none. The limit is
        `patience` seconds, or LATE_FLIGHT times the usual answer time if that is longer. It doubles with each further
        stream that sent the chunk, so that copies do not fill a slow link.

        The chunk counts as sent on this stream from now on, so that no other stream sends it, too.
        """
        now, limit = self._clock(), max(patience, LATE_FLIGHT * self.usual)
        for flight in self._flights.values():
            if flight.stream is not stream and now - flight.last > limit * 2 ** (flight.times - 1):
                self.begin(flight.send, stream)
                return flight.send
        return None


class Uplink:
    """The uplink that the rounds of several fragments share. The rounds send in the order in which they began, because
    all would be late if they sent at once. `meter` measures confirmed bytes."""

    def __init__(self) -> None:
        self.meter = RateMeter()
        self.lanes = Lanes(FEWEST_WITH_BBR, MOST_WITH_BBR) if has_bbr() else Lanes()
        self.sent_bytes = 0
        self._rounds: dict[Outgoing, None] = {}  # the senders of the current rounds, oldest round first
        self._news = asyncio.Event()

    def begin_round(self, sending: Outgoing, others: int) -> None:
        """Register the round that `sending` sends, with `others` other members."""
        self.end_round(sending)
        self._rounds[sending] = None
        self.lanes.begin_round(others)
        self.meter.begin_round()

    def end_round(self, sending: Outgoing) -> None:
        """Remove the round that `sending` sends, and wake the rounds that wait for it."""
        self._rounds.pop(sending, None)
        self.moved()

    def passed(self, count: int, seconds: float) -> None:
        """Count the bytes of a confirmed chunk, and the seconds from sending to confirmation."""
        self.meter.passed(count, seconds)
        self.sent_bytes += count
        metrics.ROUND_BYTES.labels("sent").inc(count)

    def under_way(self, streams: int) -> int:
        """Return the maximum unconfirmed bytes on each stream if there are `streams` streams. The limit is low, because
        bytes in buffers cannot be recalled for a more urgent chunk, or for an idle stream."""
        rate = self.meter.rate
        return int(min(BYTES_UNDER_WAY, SECONDS_UNDER_WAY * rate / max(streams, 1))) if rate else BYTES_UNDER_WAY

    def patience(self, streams: int, chunk: int) -> float:
        """Return the seconds after which a chunk of `chunk` bytes, on one of `streams` streams, should have arrived;
        infinity if the rate is unknown."""
        rate = self.meter.rate
        return max(LEAST_PATIENCE, LATE_CHUNK * (SECONDS_UNDER_WAY + streams * chunk / rate)) if rate else math.inf

    async def turn(self, sending: Outgoing, to: str) -> None:
        """Wait until no earlier round has chunks to send to member `to`, for at most PATIENCE seconds. Then mark the
        earlier rounds that still have chunks for it as hanging."""
        try:
            async with asyncio.timeout(PATIENCE):
                while self._earlier(sending, to):
                    await self._news.wait()
        except TimeoutError:
            for other in self._earlier(sending, to):
                other.hangs_at.add(to)

    def _earlier(self, sending: Outgoing, to: str) -> list[Outgoing]:
        """Return the senders of rounds that began before `sending` and still have chunks for `to`. Leave out senders
        that sent no chunk to `to` for PATIENCE seconds (`hangs_at`)."""
        earlier = takewhile(lambda one: one is not sending, self._rounds)
        return [other for other in earlier if other.has_more(to) and to not in other.hangs_at]

    def moved(self) -> None:
        """Wake the rounds that wait for their turn to send."""
        self._news.set()
        self._news = asyncio.Event()


class Outgoing:
    """The sender of one fragment's chunks. After a round, until the next begins, it still sends averages to members
    that miss some, because a round can be decided before the slowest members have its payload."""

    def __init__(self, transport: HivemindTransport, buffers: PayloadBuffers, host: Driver, uplink: Uplink) -> None:
        self._transport = transport
        self._buffers = buffers
        self._host = host
        self._uplink = uplink
        self._round: RoundName | None = None
        self._queues: dict[str, asyncio.Queue[SendChunk | None]] = {}
        self._senders: dict[str, list[asyncio.Task[None]]] = {}
        self._flights: dict[str, _Flights] = {}
        self._usual: dict[str, float] = {}  # average seconds from sending a chunk to its answer, by member
        self.hangs_at = set[str]()
        """Members to which no chunk was sent for long, although chunks wait. Later rounds do not wait for them."""

    def begin(self, round_name: RoundName, others: int) -> None:
        """Start sending chunks of a round with `others` other members, and stop sending for the round before."""
        self._end()
        self._usual = {peer: flights.usual for peer, flights in self._flights.items()}
        self._round, self._flights = round_name, {}
        self.hangs_at.clear()
        self._uplink.begin_round(self, others)

    def tidy(self, present: RoundName | None) -> None:
        """Stop sending for any round except `present`. If this peer has the payload of the round before, still send
        that round's averages."""
        if self._round is None or self._round == present:
            return
        if not self._is_over:
            self._end()
            return
        for queue in self._queues.values():
            waiting = [queue.get_nowait() for _ in range(queue.qsize())]
            for send in waiting:
                if send is not None and send.reduced:
                    queue.put_nowait(send)
        for flights in self._flights.values():
            flights.forget_blocks()
        self._uplink.moved()

    def _end(self) -> None:
        for peer in list(self._senders):
            self._end_streams_to(peer)
        self._round = None
        self._uplink.end_round(self)

    def _end_streams_to(self, peer: str) -> None:
        """Drop the chunks that wait for a member, and end the streams to it within CLOSING_TIME seconds."""
        queue = self._queues.pop(peer)
        while not queue.empty():
            queue.get_nowait()
        self._uplink.moved()
        for task in self._senders.pop(peer):
            queue.put_nowait(None)
            asyncio.get_running_loop().call_later(CLOSING_TIME, task.cancel)

    def send(self, send: SendChunk) -> None:
        if send.round_name != self._round or self._is_over:
            return
        self._queues.setdefault(send.to, asyncio.Queue()).put_nowait(send)
        self._open_streams_to(send.round_name, send.to)

    def _open_streams_to(self, round_name: RoundName, to: str) -> None:
        tasks = [task for task in self._senders.get(to, []) if not task.done()]
        most = max(FEWEST, STREAMS // len(self._queues))
        while len(tasks) < min(self._uplink.lanes.count, self._buffers.size.chunks, most):
            tasks.append(self._host.start(self._carry(round_name, to, self._queues[to])))
        self._senders[to] = tasks

    async def _carry(self, round_name: RoundName, to: str, queue: asyncio.Queue[SendChunk | None]) -> None:
        """Send chunks to a member on one stream, until the stream breaks or the round is over."""
        usual, stream = self._usual.get(to, 0.0), object()
        flights = self._flights.setdefault(to, _Flights(asyncio.get_running_loop().time, usual))
        # The first chunk waits in this list until the stream is open and this round may send.
        waiting = [await self._next(to, queue, flights, stream)]
        if waiting == [None]:
            return

        async def following() -> Frame[SendChunk] | None:
            if not waiting:
                waiting.append(await self._next(to, queue, flights, stream))
            if waiting[0] is None:
                return None
            await self._uplink.turn(self, to)
            send = waiting.pop()
            assert send is not None
            flights.begin(send, stream)
            return send, pack(ChunkHeader.of(send, self._buffers)), self._data(send)

        sender: ChunkSender[SendChunk] | None = None
        try:
            async with self._transport.stream(to, CHUNKS) as channel:
                sender = ChunkSender(channel, lambda: self._uplink.under_way(self._streams))
                await sender.run(pack(StreamHeader(round_name=round_name)), following, self._answered)
        except PeerUnreachableError:
            unsent = [send for send in waiting if send] + list(sender.pending if sender else ())
            others = [task for task in self._senders.get(to, ()) if task is not asyncio.current_task()]
            if all(task.done() for task in others):  # no other stream can send the chunks that wait for this member
                while not queue.empty():
                    if send := queue.get_nowait():
                        unsent.append(send)
                self._uplink.moved()
            self._report_unsent(round_name, to, unsent)
        except KeyError:
            pass  # the round is over, and its buffers are gone

    async def _next(
        self, to: str, queue: asyncio.Queue[SendChunk | None], flights: _Flights, stream: object
    ) -> SendChunk | None:
        """Wait for a chunk to send on a stream, and return it: the next waiting chunk, or if no chunk waits, one that
        another stream sent but that is late. Return None to end the stream."""
        while not (self._is_over and queue.empty() and flights.are_answered):
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK):
                    send = await queue.get()
                    self.hangs_at.discard(to)
                    if queue.empty():
                        self._uplink.moved()
                    return send
            patience = self._uplink.patience(self._streams, self._buffers.chunk_length(0))
            if late := flights.late(stream, patience):
                return late
        return None

    @property
    def _is_over(self) -> bool:
        """True once this peer has the round's payload, so that only averages for other members are left to send."""
        return self._round is not None and self._buffers.last(self._round) is not None

    def has_more(self, to: str) -> bool:
        """Return True if a chunk waits to be sent to this member."""
        return to in self._queues and not self._queues[to].empty()

    @property
    def _streams(self) -> int:
        return sum(len(tasks) for tasks in self._senders.values())

    def _data(self, send: SendChunk) -> memoryview:
        return self._buffers.read(send.round_name, send.chunk, send.reduced)

    def _answered(self, send: SendChunk, is_taken: bool, seconds: float) -> None:
        flights = self._flights.get(send.to) if send.round_name == self._round else None
        is_first = flights is None or flights.end(send)
        if is_taken:
            if is_first:
                count = self._buffers.chunk_length(send.chunk, 0 if send.reduced else self._buffers.own_format)
                self._uplink.passed(count, seconds)
                self._widen(send.round_name, count)
            self._host.handle(ChunkSent(send.round_name, send.to, send.chunk, send.reduced))
        else:
            self._host.handle(ChunksUnsent(send.round_name, send.to, (send.chunk,), send.reduced))

    def _widen(self, round_name: RoundName, count: int) -> None:
        """Open more streams to each member if `count` newly confirmed bytes show that the present ones are too few."""
        has_more = any(queue.qsize() for queue in self._queues.values())
        if self._uplink.lanes.passed(count, has_more) and round_name == self._round:
            for peer in list(self._senders):
                self._open_streams_to(round_name, peer)

    def _report_unsent(self, round_name: RoundName, to: str, unsent: Collection[SendChunk]) -> None:
        for reduced in (False, True):
            chunks = tuple(send.chunk for send in unsent if send.reduced == reduced)
            if chunks:
                self._host.handle(ChunksUnsent(round_name, to, chunks, reduced))
