"""The data of the present round: room for it, its chunks on their way, their averages, and the payload in the end."""

from __future__ import annotations

import asyncio
from typing import Protocol

from peers import metrics
from peers.driver.host import Host
from peers.driver.traffic import StreamTransport, Traffic
from peers.protocol.effects import AssemblePayload, OpenRound, ReduceChunk, SendChunk
from peers.protocol.events import PayloadAssembled
from peers.protocol.messages import Round
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.chunk_average import average_chunk
from peers.values.workload import Workload

REDUCERS = 2  # chunks averaged at once


class RoundTransport(StreamTransport, Protocol):
    no_round: asyncio.Event


class Rounds:
    """One peer's rounds, of which one is under way at a time."""

    def __init__(self, transport: RoundTransport, workload: Workload, buffers: PayloadBuffers, host: Host) -> None:
        self._transport = transport
        self._workload = workload
        self._buffers = buffers
        self._host = host
        self.traffic = Traffic(transport, workload, buffers, host)
        self._reducing = asyncio.Semaphore(REDUCERS)
        self._round: Round | None = None

    async def serve(self) -> None:
        await self.traffic.serve()

    def open(self, opening: OpenRound) -> None:
        metrics.ROUNDS.inc()
        self._buffers.open(opening.round.name)
        self.traffic.begin(opening.round.name, len(opening.round.remaining) - 1)

    def send(self, send: SendChunk) -> None:
        self.traffic.send(send)

    def average(self, reduce: ReduceChunk) -> None:
        self._host.start(self._average(reduce))

    async def _average(self, reduce: ReduceChunk) -> None:
        async with self._reducing:
            event = await average_chunk(self._workload, self._buffers, self._host.peer.me, reduce)
        if event is not None:
            self._host.handle(event)

    def assemble(self, assemble: AssemblePayload) -> None:
        round_name = assemble.round_name
        if self._buffers.round(round_name):
            self._host.handle(PayloadAssembled(round_name, self._buffers.assemble(round_name)))

    def follow(self) -> None:
        """Release what belongs to another round than the protocol's present one, or to members that it has lost."""
        peer = self._host.peer
        if peer.is_exchanging:
            self._transport.no_round.clear()
        else:  # also while a round may go on some time: perhaps when somebody has joined
            self._transport.no_round.set()
        round = peer.exchange.round if peer.exchange else None
        if round is self._round:
            return
        self._round = round
        if round is None:
            self._buffers.close()
        self.traffic.tidy(round.name if round else None, round.remaining if round else ())
