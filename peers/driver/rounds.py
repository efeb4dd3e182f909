"""The data of rounds: buffers, the averaging of chunks, checks of other members' averages, and the final payload."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from peers import metrics
from peers.audit.spot_check import Sample, choose, is_refuted
from peers.driver.traffic import Traffic
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

REDUCERS = 2  # maximum number of chunks that this peer averages at the same time
Shown: TypeAlias = Sequence[tuple[ChunkProof, Blocks] | None]


class RoundCosts(NamedTuple):
    """The costs of all rounds of one peer so far: seconds, and bytes of chunks. Each peak is the best rate in any half
    second of the last rounds, in bytes a second (0 if not measured)."""

    seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    peak_sent: float = 0.0
    peak_received: float = 0.0


class Rounds:
    """The part of the driver that handles the data of rounds, at most one round at a time for each fragment."""

    def __init__(
        self, transport: HivemindTransport, workload: Workload, buffers: Sequence[PayloadBuffers], host: Driver
    ) -> None:
        self._transport = transport
        self._workload = workload
        self._buffers = buffers
        self._host = host
        self.traffic = Traffic(transport, workload, buffers, host)
        self._run = host.peer.settings.run
        self._members: dict[int, frozenset[str]] = {}  # members of each fragment's last round, by fragment
        self._reducing = asyncio.Semaphore(REDUCERS)
        self._assembling = asyncio.Lock()
        self._rounds: dict[int, RoundName] = {}  # current rounds, by fragment
        self._began_at: float | None = None
        self._seconds = 0.0

    @property
    def costs(self) -> RoundCosts:
        """The seconds and bytes of all rounds so far, including the current round, and the peak rates."""
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
        """Assemble a round's payload from its chunks, write it to the disk, and report it to the protocol. Calls are
        carried out one after another."""
        round_name, exchange = assemble.round_name, self._host.peer.exchange_of(assemble.round_name)
        buffers = self._buffers_of(round_name)
        async with self._assembling:
            if not buffers.round(round_name):
                return
            digest = buffers.assemble(round_name)
            payload = buffers.kept.get(digest)
            assert payload is not None, "the payload kept last is never dropped"
            trouble = await self._host.replication.recorder.keep_payload(round_name.position.index, payload)
            self._host.handle(PayloadAssembled(round_name, digest, trouble))
        if exchange is not None:
            self._host.start(self._check_an_average(exchange))

    async def _check_an_average(self, exchange: Exchange) -> None:
        """Compute another member's average again, if this round is chosen at random. If the average was wrong, report
        it to the protocol."""
        average = choose(exchange.averages.of_others, len(exchange.contributions.commitments), random.random)
        if average is None:
            return
        buffers, reduce = self._buffers_of(exchange.name), exchange.reduction_of(average.chunk, average.absent)

        async def ask(peers: Mapping[str, int], chunk: int) -> Shown:
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
        """Release the data of rounds that are over. Delay this peer's less urgent streams only while a round exchanges
        data."""
        peer = self._host.peer
        if peer.is_exchanging:
            self._transport.no_round.rate = self.traffic.rate
            self._transport.no_round.clear()
        else:  # no data is exchanged, though a round may be open and wait long for peers
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
        if self._began_at is not None:
            seconds = now() - self._began_at
            self._began_at = None
            self._seconds += seconds
            metrics.ROUND_SECONDS.inc(seconds)
