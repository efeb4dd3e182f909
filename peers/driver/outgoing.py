"""The chunks of rounds on their way out: one queue for each member, several streams that empty it, one link for all."""

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
CLOSING_TIME = 5.0  # seconds that a stream may take to end properly, so that its connection can be used again
LATE_FLIGHT = 2.0  # times as long as chunks took before: that is late
MEMORY = 0.25  # of how long they took, that the last one decides
LATE_CHUNK = 1.5  # times as long as a chunk should take: then it is sent on another stream, too
LEAST_PATIENCE = 1.0  # seconds before that
PATIENCE = 5.0  # seconds for which a chunk waits for those of earlier rounds
SECONDS_UNDER_WAY = 0.5  # of what our link carries
LOOK = 0.25  # seconds from one look at what is late to the next
STREAMS = 512  # to all members together, where more than the fewest are of use


class StreamHeader(Value):
    """The round that a stream's chunks are of."""

    round_name: RoundName


@dataclass(frozen=True)
class _Flight:
    """A chunk that is not answered: when it was sent first, and last; on which stream, and how often."""

    first: float
    last: float
    stream: object
    times: int
    send: SendChunk


class _Flights:
    """When each was sent, and on which stream. Where TCP waits for a lost packet, one of several connections may stand
    still for seconds, while the others have nothing left to send.

    Where all chunks take long, none of them hangs: a member whose link is slow, or shared by many, would be sent
    everything twice, and take twice as long.
    """

    def __init__(self, clock: Callable[[], float], usual: float = 0.0) -> None:
        self.usual = usual
        """Seconds from when a chunk is sent until it is answered; 0: not known."""
        self._clock = clock
        # By a chunk's number, and whether it is averaged; the one that was sent first comes first.
        self._flights: dict[tuple[int, bool], _Flight] = {}

    def begin(self, send: SendChunk, stream: object) -> None:
        """A chunk is sent on a stream, maybe once more."""
        now, before = self._clock(), self._flights.pop((send.chunk, send.reduced), None)
        first, times = (before.first, before.times + (before.stream is not stream)) if before else (now, 1)
        self._flights[send.chunk, send.reduced] = _Flight(first, now, stream, times, send)

    def end(self, send: SendChunk) -> bool:
        """A chunk was answered. Returns whether it was not before, on another stream."""
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
        """Wait for the answers of averages alone."""
        self._flights = {key: flight for key, flight in self._flights.items() if flight.send.reduced}

    def late(self, stream: object, patience: float) -> SendChunk | None:
        """Return what has been under way on another stream for longer than that, and than is usual; for twice as long
        each time, so that no link that has become slow is filled with what is there already.

        It is this stream's from now on: others that look, too, before it is sent, would send it as well.
        """
        now, limit = self._clock(), max(patience, LATE_FLIGHT * self.usual)
        for flight in self._flights.values():
            if flight.stream is not stream and now - flight.last > limit * 2 ** (flight.times - 1):
                self.begin(flight.send, stream)
                return flight.send
        return None


class Uplink:
    """Rounds of several fragments may be under way. They take their turns in the order in which they began: if they
    shared the link, each of them would be late. `meter` measures what is confirmed.
    """

    def __init__(self) -> None:
        self.meter = RateMeter()
        self.lanes = Lanes(FEWEST_WITH_BBR, MOST_WITH_BBR) if has_bbr() else Lanes()
        self.sent_bytes = 0
        self._rounds: dict[Outgoing, None] = {}  # in the order in which they began
        self._news = asyncio.Event()

    def begin_round(self, sending: Outgoing, others: int) -> None:
        """A round begins, with so many other members."""
        self.end_round(sending)
        self._rounds[sending] = None
        self.lanes.begin_round(others)
        self.meter.begin_round()

    def end_round(self, sending: Outgoing) -> None:
        """A round is over, if there is one."""
        self._rounds.pop(sending, None)
        self.moved()

    def passed(self, count: int, seconds: float) -> None:
        """So many bytes of a chunk are confirmed, which took so many seconds."""
        self.meter.passed(count, seconds)
        self.sent_bytes += count
        metrics.ROUND_BYTES.labels("sent").inc(count)

    def under_way(self, streams: int) -> int:
        """Return the bytes that each of so many streams has under way at most: what lies in buffers when another chunk
        becomes more urgent, or another stream runs dry, is out of our hands."""
        rate = self.meter.rate
        return int(min(BYTES_UNDER_WAY, SECONDS_UNDER_WAY * rate / max(streams, 1))) if rate else BYTES_UNDER_WAY

    def patience(self, streams: int, chunk: int) -> float:
        """Return the seconds after which a chunk of so many bytes, on one of so many streams, should be there."""
        rate = self.meter.rate
        return max(LEAST_PATIENCE, LATE_CHUNK * (SECONDS_UNDER_WAY + streams * chunk / rate)) if rate else math.inf

    async def turn(self, sending: Outgoing, to: str) -> None:
        """Wait until no round that began earlier has anything to send to a member; but not for one that hangs."""
        try:
            async with asyncio.timeout(PATIENCE):
                while self._earlier(sending, to):
                    await self._news.wait()
        except TimeoutError:
            for other in self._earlier(sending, to):
                other.hangs_at.add(to)

    def _earlier(self, sending: Outgoing, to: str) -> list[Outgoing]:
        """Return the rounds that began earlier and go on sending to a member."""
        earlier = takewhile(lambda one: one is not sending, self._rounds)
        return [other for other in earlier if other.has_more(to) and to not in other.hangs_at]

    def moved(self) -> None:
        """A round has nothing left to send to a member, or has ended."""
        self._news.set()
        self._news = asyncio.Event()


class Outgoing:
    """Sends the chunks of one fragment's present round; and of the last one, until the next begins, the averages that
    others still lack: most members decide what a round came to, and the slowest need its payload all the same."""

    def __init__(self, transport: HivemindTransport, buffers: PayloadBuffers, host: Driver, uplink: Uplink) -> None:
        self._transport = transport
        self._buffers = buffers
        self._host = host
        self._uplink = uplink
        self._round: RoundName | None = None
        self._queues: dict[str, asyncio.Queue[SendChunk | None]] = {}
        self._senders: dict[str, list[asyncio.Task[None]]] = {}
        self._flights: dict[str, _Flights] = {}
        self._usual: dict[str, float] = {}  # seconds that a chunk took to each member of the last round
        self.hangs_at = set[str]()
        """Members for whom chunks wait, and none was sent for long: later rounds do not wait for that."""

    def begin(self, round_name: RoundName, others: int) -> None:
        """Send chunks of this round, which has so many other members."""
        self._end()
        self._usual = {peer: flights.usual for peer, flights in self._flights.items()}
        self._round, self._flights = round_name, {}
        self.hangs_at.clear()
        self._uplink.begin_round(self, others)

    def tidy(self, present: RoundName | None) -> None:
        """Send nothing more of another round than the `present` one, but for averages if we have all of them."""
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
        """Send nothing more of our round."""
        for peer in list(self._senders):
            self._end_streams_to(peer)
        self._round = None
        self._uplink.end_round(self)

    def _end_streams_to(self, peer: str) -> None:
        """Send nothing more to a member. A stream has some time to end properly."""
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
        """One stream to a member, from the first chunk for it until it breaks or the round is over."""
        usual, stream = self._usual.get(to, 0.0), object()
        flights = self._flights.setdefault(to, _Flights(asyncio.get_running_loop().time, usual))
        waiting = [await self._next(to, queue, flights, stream)]  # until the stream is open, and it is our turn
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
            if all(task.done() for task in others):  # nobody else takes what waits for this member
                while not queue.empty():
                    if send := queue.get_nowait():
                        unsent.append(send)
                self._uplink.moved()
            self._report_unsent(round_name, to, unsent)
        except KeyError:
            pass  # the round is over

    async def _next(
        self, to: str, queue: asyncio.Queue[SendChunk | None], flights: _Flights, stream: object
    ) -> SendChunk | None:
        """Return what is to be sent next; None ends the stream. When nothing waits, that is what hangs on another."""
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
        """Return whether our round is over, and its averages are given to members that lack them."""
        return self._round is not None and self._buffers.last(self._round) is not None

    def has_more(self, to: str) -> bool:
        """Whether anything waits to be sent to a member."""
        return to in self._queues and not self._queues[to].empty()

    @property
    def _streams(self) -> int:
        """Return how many streams our round has."""
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
        """Use more connections, where those that there are do not carry all that waits."""
        has_more = any(queue.qsize() for queue in self._queues.values())
        if self._uplink.lanes.passed(count, has_more) and round_name == self._round:
            for peer in list(self._senders):
                self._open_streams_to(round_name, peer)

    def _report_unsent(self, round_name: RoundName, to: str, unsent: Collection[SendChunk]) -> None:
        for reduced in (False, True):
            chunks = tuple(send.chunk for send in unsent if send.reduced == reduced)
            if chunks:
                self._host.handle(ChunksUnsent(round_name, to, chunks, reduced))
