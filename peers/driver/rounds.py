"""The data of one peer's rounds: its chunks on their way in both directions, averages, and the payload in the end."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from peers import metrics
from peers.audit.spot_check import Sample, choose, is_refuted
from peers.messages.commitment import ChunkProof
from peers.messages.rounds import RoundName
from peers.protocol.effects import AssemblePayload, OpenRound, ReduceChunk
from peers.protocol.events import AverageRefuted, PayloadAssembled
from peers.protocol.exchange import Exchange
from peers.transfer.averages import ask_for_contributions, average_chunk, serve_contributions
from peers.transfer.buffers import PayloadBuffers
from peers.values.system import now
from peers.values.workload import Blocks, Workload

if TYPE_CHECKING:
    from peers.driver.driver import Driver
    from peers.network.transport import HivemindTransport


from typing import TYPE_CHECKING

from peers.driver.outgoing import CHUNKS, CLOSING_TIME, Outgoing, StreamHeader, Uplink
from peers.errors import RemoteProtocolError
from peers.network.channel import Channel, Expect, PeerUnreachableError, RefusalError, receive_chunks
from peers.network.rating import RATING, Rater
from peers.network.throttle import MOST, RateMeter
from peers.protocol.effects import SendChunk
from peers.protocol.events import RateMeasured, ReachSeen
from peers.transfer.averages import Admission, ChunkHeader
from peers.values.wire import unpack_from

if TYPE_CHECKING:
    from peers.driver.driver import Driver
    from peers.network.transport import HivemindTransport

logger = logging.getLogger(__name__)

ADMISSION_TIMEOUT = 10.0  # seconds that a member may be ahead of us in beginning a round
AGAIN = 1800.0  # seconds after which the link is measured once more, when it is free
TRIES = 3  # peers that are asked for a measurement before the next heartbeat


class Traffic:
    """The chunks of the present rounds, one round for each fragment at most: sends them, and receives those that the
    protocol waits for."""

    def __init__(
        self, transport: HivemindTransport, workload: Workload, buffers: Sequence[PayloadBuffers], host: Driver
    ) -> None:
        """`buffers` are of each fragment."""
        self.uplink = Uplink()
        self.received_bytes = 0
        """Of chunks that came from other members, in all rounds."""
        self._downlink = RateMeter()
        self._transport = transport
        self._outgoing = [Outgoing(transport, each, host, self.uplink) for each in buffers]
        self.admissions = [Admission(host.peer, each, workload.squared_norm) for each in buffers]
        self._host = host
        self._from: dict[str, RateMeter] = {}
        self._receivers: dict[asyncio.Task[None], tuple[RoundName, str]] = {}

    async def serve(self) -> None:
        await self._transport.on_stream(CHUNKS, self._receive)

    @property
    def peaks(self) -> tuple[float, float]:
        """Bytes a second that the link was seen to carry away, and to bring, in rounds; 0: not known."""
        return self.uplink.meter.rate, self._downlink.rate

    @property
    def rate(self) -> int:
        """Bytes a second that the link was seen to carry each way in rounds; 0: not known."""
        return int(self._transport.caps.of_both(*self.peaks))

    @property
    def rates(self) -> dict[str, int]:
        """Bytes a second at which other members' data came in, in the last rounds."""
        return {peer: int(meter.rate) for peer, meter in self._from.items() if meter.rate}

    def knows(self, upload: float, download: float) -> None:
        """Take in what the link carries, measured while there was no round."""
        self.uplink.meter.knows(upload)
        self._downlink.knows(download)

    def begin(self, round_name: RoundName, others: int) -> None:
        """Move chunks of this round, which has so many other members."""
        self._outgoing[round_name.position.fragment].begin(round_name, others)
        for meter in (self._downlink, *self._from.values()):
            meter.begin_round()

    def send(self, send: SendChunk) -> None:
        self._outgoing[send.round_name.position.fragment].send(send)

    def tidy(self, present: Collection[RoundName]) -> None:
        """End the streams of other rounds than the `present` ones."""
        of_fragment = {name.position.fragment: name for name in present}
        for fragment, outgoing in enumerate(self._outgoing):
            outgoing.tidy(of_fragment.get(fragment))
        for task, (round_name, peer) in list(self._receivers.items()):
            if round_name not in present:
                asyncio.get_running_loop().call_later(CLOSING_TIME, self._cut, task, (round_name, peer))

    def _cut(self, receiver: asyncio.Task[None], of: tuple[RoundName, str]) -> None:
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

    async def _admit(self, sender: str, packed: bytes) -> Expect:
        """Let a stream begin as soon as we are in its round, too: its leader may have told the sender first.

        Raises: RefusalError, RemoteProtocolError.
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
            raise RefusalError(f"not in round {round_name} with you") from None
        if list(self._receivers.values()).count((round_name, sender)) >= MOST:
            raise RefusalError("too many streams of one round")
        task = asyncio.current_task()
        assert task is not None
        self._receivers[task] = (round_name, sender)
        if sender not in self._from:
            self._from[sender] = RateMeter()
            self._from[sender].begin_round()

        def expect(packed: bytes, length: int) -> tuple[bytearray, Callable[[], bool]]:
            """Raises: RemoteProtocolError unless the frame announces a whole chunk of this run."""
            header, began = unpack_from(sender, ChunkHeader, packed), now()
            admission.check_size(sender, header, length)
            data = bytearray(length)
            return data, lambda: self._take(sender, round_name, header, data, now() - began)

        return expect

    def _take(self, sender: str, round_name: RoundName, header: ChunkHeader, data: bytearray, seconds: float) -> bool:
        """Take in a chunk that took so many seconds to come. Return whether the sender is rid of it."""
        self._downlink.passed(len(data), seconds)
        self._from[sender].passed(len(data), seconds)
        self.received_bytes += len(data)
        metrics.ROUND_BYTES.labels("received").inc(len(data))
        event, is_taken = self.admissions[round_name.position.fragment].take(sender, round_name, header, data)
        if event is not None:
            self._host.handle(event)
        return is_taken


class Scout:
    """Looks around once in a heartbeat, and measures our link, before any round and now and then between two.

    What rounds show of a link is what they ask of it: whoever reduces little sends little, and would seem to have a
    slow link.
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
        """Tell the protocol how we reach others, and what our link carries."""
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
        """Measure with one of these peers; the others are asked if it is busy."""
        for peer in random.sample(peers, min(len(peers), TRIES)):
            try:
                async with self._transport.stream(peer, RATING) as channel:
                    upload, download = await self._rater.ask(channel)
            except PeerUnreachableError as error:
                logger.debug("no measurement: %s", error)
                continue
            logger.info("our link carries %.0f Mbit/s up, %.0f down", 8e-6 * upload, 8e-6 * download)
            self._traffic.knows(upload, download)
            return


REDUCERS = 2  # chunks averaged at once
Shown: TypeAlias = Sequence[tuple[ChunkProof, Blocks] | None]


class RoundCosts(NamedTuple):
    """What all rounds of one peer have cost so far: seconds in them, and bytes of chunks. Of the last rounds, the best
    rate of each direction in any half second, in bytes a second; 0: not measured."""

    seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    peak_sent: float = 0.0
    peak_received: float = 0.0


class Rounds:
    """One peer's rounds, of which one is under way at a time for each fragment."""

    def __init__(
        self, transport: HivemindTransport, workload: Workload, buffers: Sequence[PayloadBuffers], host: Driver
    ) -> None:
        """`buffers` are of each fragment."""
        self._transport = transport
        self._workload = workload
        self._buffers = buffers
        self._host = host
        self.traffic = Traffic(transport, workload, buffers, host)
        self._run = host.peer.settings.run
        self._members: dict[int, frozenset[str]] = {}  # of each fragment's last round
        self._reducing = asyncio.Semaphore(REDUCERS)
        self._assembling = asyncio.Lock()
        self._rounds: dict[int, RoundName] = {}  # by fragment
        self._began_at: float | None = None
        self._seconds = 0.0

    @property
    def costs(self) -> RoundCosts:
        """Return the costs of all rounds until now, the present one's included."""
        present = 0.0 if self._began_at is None else now() - self._began_at
        traffic = self.traffic
        return RoundCosts(self._seconds + present, traffic.uplink.sent_bytes, traffic.received_bytes, *traffic.peaks)

    async def serve(self) -> None:
        await self.traffic.serve()
        members = self._members
        await serve_contributions(
            self._transport, self._run, self._buffers, lambda fragment, peer: peer in members.get(fragment, ())
        )

    def _buffers_of(self, round_name: RoundName) -> PayloadBuffers:
        return self._buffers[round_name.position.fragment]

    def open(self, opening: OpenRound) -> None:
        metrics.ROUNDS.inc()
        self._end_clock()
        self._began_at = now()
        self._buffers_of(opening.round.name).open(opening.round.name)
        self._members[opening.round.name.position.fragment] = frozenset(opening.round.peers)
        self.traffic.begin(opening.round.name, len(opening.round.peers) - 1)

    async def average(self, reduce: ReduceChunk) -> None:
        async with self._reducing:
            exchange, buffers = self._host.peer.exchange_of(reduce.round_name), self._buffers_of(reduce.round_name)
            event = await average_chunk(self._workload.reduce, buffers, exchange, reduce) if exchange else None
            if event is not None:
                self._host.handle(event)

    async def assemble(self, assemble: AssemblePayload) -> None:
        """Keep a payload whose chunks are all here, on the disk, too. Payloads of one round come in their order."""
        round_name, exchange = assemble.round_name, self._host.peer.exchange_of(assemble.round_name)
        buffers = self._buffers_of(round_name)
        async with self._assembling:
            if not buffers.round(round_name):
                return
            digest = buffers.assemble(round_name)
            payload = buffers.kept.get(digest)
            assert payload is not None, "what was kept last is never dropped"
            trouble = await self._host.replication.recorder.keep_payload(round_name.position.index, payload)
            self._host.handle(PayloadAssembled(round_name, digest, trouble))
        if exchange is not None:
            self._host.start(self._check_an_average(exchange))

    async def _check_an_average(self, exchange: Exchange) -> None:
        """Make one of the averages again that others have made, if it is this round's turn."""
        average = choose(exchange.averages.of_others, len(exchange.contributions.commitments), random.random)
        if average is None:
            return
        buffers, reduce = self._buffers_of(exchange.name), exchange.reduction_of(average.chunk, average.absent)

        async def ask(peers: Sequence[str], fragment: int, chunk: int, length: int) -> Shown:
            return await ask_for_contributions(self._transport, self._run, exchange.me, buffers, peers, chunk)

        sample = Sample(
            average,
            exchange.name.position,
            exchange.round.chunks,
            tuple(reduce.weights),
            sum(weight for _, weight in reduce.members),
            exchange.contributions.commitments,
        )
        if await is_refuted(sample, self._workload.fragments[buffers.fragment], ask, self._workload.reduce):
            self._host.handle(AverageRefuted(exchange.name, average.reducer, average.chunk))

    def follow(self) -> None:
        """Release what belongs to other rounds than the protocol's present ones."""
        peer = self._host.peer
        if peer.is_exchanging:
            self._transport.no_round.rate = self.traffic.rate
            self._transport.no_round.clear()
        else:  # also while a round may go on some time: perhaps when somebody has joined
            self._transport.no_round.set()
        rounds = {fragment: round.exchange.name for fragment, round in peer.rounds.items() if round.exchange}
        before, self._rounds = self._rounds, rounds
        if rounds == before:
            return
        for fragment in before.keys() - rounds.keys():
            self._buffers[fragment].close()
        if not rounds:
            self._end_clock()
        self.traffic.tidy(rounds.values())

    def _end_clock(self) -> None:
        """Count the time of the rounds that have ended, if any was under way."""
        if self._began_at is not None:
            seconds = now() - self._began_at
            self._began_at = None
            self._seconds += seconds
            metrics.ROUND_SECONDS.inc(seconds)
