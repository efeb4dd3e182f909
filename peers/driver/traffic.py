"""The transfer of one peer's chunks in rounds, in both directions, and the measured rates of the link."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from peers import metrics
from peers.driver.outgoing import CHUNKS, CLOSING_TIME, Outgoing, StreamHeader, Uplink
from peers.errors import RemoteProtocolError
from peers.messages.rounds import RoundName
from peers.network.channel import Channel, PeerUnreachableError, RefusalError, receive_chunks
from peers.network.rating import RATING, Rater
from peers.network.throttle import MOST, RateMeter
from peers.protocol.effects import SendChunk
from peers.protocol.events import RateMeasured, ReachSeen
from peers.transfer.averages import Admission, ChunkHeader
from peers.transfer.buffers import PayloadBuffers
from peers.values.system import now
from peers.values.wire import unpack_from
from peers.values.workload import Workload

if TYPE_CHECKING:
    from peers.driver.driver import Driver
    from peers.network.transport import HivemindTransport

logger = logging.getLogger(__name__)

ADMISSION_TIMEOUT = 10.0  # maximum seconds that a stream waits for this peer to begin the stream's round
AGAIN = 1800.0  # seconds after which an idle machine's rates are measured again
MEASURED_PEERS = 3  # maximum number of peers with which this machine's upload and download rates are measured


class Traffic:
    """The transfer of chunks in the current rounds, at most one for each fragment: it sends this peer's chunks, and
    receives the chunks that the protocol expects."""

    def __init__(
        self, transport: HivemindTransport, workload: Workload, buffers: Sequence[PayloadBuffers], host: Driver
    ) -> None:
        self.uplink = Uplink()
        self.received_bytes = 0
        """Bytes of chunks from other members, in all rounds."""
        self._downlink = RateMeter()
        self._transport = transport
        self._outgoing = [Outgoing(transport, each, host, self.uplink) for each in buffers]
        self.admissions = [Admission(host.peer, each, workload.squared_norm) for each in buffers]
        self.buffers = buffers
        self._host = host
        self._from: dict[str, RateMeter] = {}
        self._receivers: dict[asyncio.Task[None], tuple[RoundName, str]] = {}

    async def serve(self) -> None:
        await self._transport.on_stream(CHUNKS, self._receive)

    @property
    def peaks(self) -> tuple[float, float]:
        """This machine's best upload and download rates in recent rounds, in bytes a second; 0 if unknown."""
        return self.uplink.meter.rate, self._downlink.rate

    @property
    def rate(self) -> int:
        """This machine's rate in recent rounds, usable in both directions at once, in bytes a second; 0 if unknown."""
        return int(self._transport.caps.of_both(*self.peaks))

    @property
    def last_uplink(self) -> float:
        """This machine's latest upload rate, within the volunteer's cap, in bytes a second; 0 if unknown."""
        return self._transport.caps.of_upload(self.uplink.meter.last)

    @property
    def rates(self) -> dict[str, int]:
        """The rates at which other members' data arrived in recent rounds, in bytes a second, by peer id."""
        return {peer: int(meter.rate) for peer, meter in self._from.items() if meter.rate}

    def knows(self, upload: float, download: float) -> None:
        """Record this machine's upload and download rates, measured outside a round, in bytes a second."""
        self.uplink.meter.knows(upload)
        self._downlink.knows(download)

    def begin(self, round_name: RoundName, others: int) -> None:
        """Start the transfer of chunks in a round with `others` other members."""
        self._outgoing[round_name.position.fragment].begin(round_name, others)
        for meter in (self._downlink, *self._from.values()):
            meter.begin_round()

    def send(self, send: SendChunk) -> None:
        self._outgoing[send.round_name.position.fragment].send(send)

    def tidy(self, present: Collection[RoundName]) -> None:
        """Stop the exchange of all rounds that are not in `present`. But if this peer has the payload of such a round,
        still send the round's averages to the members that wait for them."""
        of_fragment = {name.position.fragment: name for name in present}
        for fragment, outgoing in enumerate(self._outgoing):
            outgoing.tidy(of_fragment.get(fragment))
        for task, (round_name, peer) in list(self._receivers.items()):
            if round_name not in present:
                asyncio.get_running_loop().call_later(CLOSING_TIME, self._cut, task, (round_name, peer))

    def _cut(self, receiver: asyncio.Task[None], of: tuple[RoundName, str]) -> None:
        """Cancel an earlier round's stream, unless its task already handles another stream on the same connection."""
        if self._receivers.get(receiver) == of:
            receiver.cancel()

    async def _receive(self, channel: Channel) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await receive_chunks(channel, self._admit)
        finally:
            self._receivers.pop(task, None)

    async def _admit(self, sender: str, packed: bytes) -> _StreamArrivals:
        """Wait until this peer is in the stream's round, because the sender may have begun earlier. Then accept the
        stream, and return the receiver of its chunks.

        Raises:
            RefusalError: this peer does not enter the round in time, or there are too many streams.
            RemoteProtocolError: the stream's header is invalid.
        """
        round_name = unpack_from(sender, StreamHeader, packed).round_name
        fragment = round_name.position.fragment
        if fragment >= len(self.admissions):
            raise RemoteProtocolError(sender, f"there is no fragment {fragment}")
        admission = self.admissions[fragment]
        try:
            async with asyncio.timeout(ADMISSION_TIMEOUT if self._host.peer.is_live(sender) else 0):
                await self._host.until(lambda peer: admission.is_shared(round_name, sender))
        except TimeoutError:
            raise RefusalError(f"this peer is not in round {round_name} with the sender") from None
        if list(self._receivers.values()).count((round_name, sender)) >= MOST:
            raise RefusalError(f"more than {MOST} streams of one round")
        task = asyncio.current_task()
        assert task is not None
        self._receivers[task] = (round_name, sender)
        if sender not in self._from:
            self._from[sender] = RateMeter()
            self._from[sender].begin_round()
        return _StreamArrivals(self, sender, round_name)

    def take(self, sender: str, round_name: RoundName, header: ChunkHeader, data: bytearray, seconds: float) -> bool:
        """Process a chunk that took `seconds` to arrive. Return True unless the sender must send the chunk again."""
        self._downlink.passed(len(data), seconds)
        self._from[sender].passed(len(data), seconds)
        self.received_bytes += len(data)
        metrics.ROUND_BYTES.labels("received").inc(len(data))
        event, is_taken = self.admissions[round_name.position.fragment].take(sender, round_name, header, data)
        if event is not None:
            self._host.handle(event)
        return is_taken


class _StreamArrivals:
    """The receiver of one stream's chunks. It holds the announced chunk's header, and memory for the chunk's data."""

    def __init__(self, traffic: Traffic, sender: str, round_name: RoundName) -> None:
        self._traffic = traffic
        self._sender = sender
        self._round = round_name
        self._admission = traffic.admissions[round_name.position.fragment]
        self._buffers = traffic.buffers[round_name.position.fragment]
        self._spare = bytearray()

    def expect(self, header: bytes, length: int) -> bytearray:
        """Return memory for an announced chunk. Raises: RemoteProtocolError if `length` is not a whole chunk's."""
        self._header = unpack_from(self._sender, ChunkHeader, header)
        self._admission.check_size(self._sender, self._round, self._header, length)
        self._data = self._spare if len(self._spare) == length else self._buffers.room(length)
        self._began = now()
        return self._data

    def arrived(self) -> bool:
        # Averages are copied into the payload, so their memory is reused; blocks to be averaged stay in their memory.
        self._spare = self._data if self._header.reduced else bytearray()
        return self._traffic.take(self._sender, self._round, self._header, self._data, now() - self._began)


class Scout:
    """The reporter, at each heartbeat, of this peer's links to other peers. It also measures the rate of this machine's
    internet link, before any round and now and then between rounds.

    Rounds show only the rate that they need: a peer that reduces little sends little, and would seem to have a slow
    link.
    """

    def __init__(self, transport: HivemindTransport, traffic: Traffic, host: Driver) -> None:
        self._transport = transport
        self._traffic = traffic
        self._host = host
        self._rater = Rater(transport.no_round)
        self._measuring: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        await self._transport.on_stream(RATING, self._rater.answer)

    def look(self) -> None:
        """Report the links to other peers and this machine's rate (bytes a second) to the protocol. Measure the rate
        over direct links if the last measurement is AGAIN seconds old, and no round is under way."""
        links = self._transport.links
        reach = links.reach()
        self._host.handle(ReachSeen(reach, self._traffic.rates, links.sought()))
        direct = [peer for peer, way in reach.items() if way.is_direct]
        if self._traffic.rate:
            self._host.handle(RateMeasured(self._traffic.rate))
        is_measuring = self._measuring is not None and not self._measuring.done()
        is_time = self._traffic.uplink.meter.known_for > AGAIN and self._rater.is_idle and not is_measuring
        if direct and is_time:
            self._measuring = self._host.start(self._measure(direct))

    async def _measure(self, peers: list[str]) -> None:
        """Measure this machine's link by transfers with some of `peers`, one after another. Record the median rate in
        each direction, or of two rates the higher one. One slow or lying peer of three cannot push the median beyond
        the rates of the other two."""
        rates = list[tuple[float, float]]()
        for peer in random.sample(peers, min(len(peers), MEASURED_PEERS)):
            try:
                async with self._transport.stream(peer, RATING) as channel:
                    rates.append(await self._rater.ask(channel))
            except PeerUnreachableError as error:
                logger.debug("no measurement: %s", error)
        if rates:
            upload, download = (sorted(each)[len(each) // 2] for each in zip(*rates, strict=True))
            logger.info("this machine's link carries %.0f Mbit/s up, %.0f Mbit/s down", 8e-6 * upload, 8e-6 * download)
            self._traffic.knows(upload, download)
