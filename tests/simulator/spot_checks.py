"""Spot checks in a simulated swarm: each honest peer makes an average of each of its rounds again."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from peers.audit.spot_check import Sample, choose, is_refuted
from peers.messages.commitment import ChunkProof
from peers.protocol.events import AverageRefuted, Event, PayloadAssembled
from peers.protocol.exchange import Exchange
from peers.values.workload import Blocks
from tests.simulator.simulated_peer import SimulatedPeer
from tests.simulator.simulated_workload import run_now
from tests.simulator.simulation import Swarm

Shown = Sequence[tuple[ChunkProof, Blocks] | None]


def check_averages(swarm: Swarm) -> None:
    """Have honest peers make averages again, as soon as all of a round is here. What they draw changes nothing else."""
    chance = random.Random(f"{swarm.seed} spot checks")

    def on_event(peer: SimulatedPeer, event: Event) -> None:
        exchange = peer.peer.exchange_of(event.round_name) if isinstance(event, PayloadAssembled) else None
        if exchange is None or not peer.is_honest:
            return
        refuted = _refuted(peer, exchange, swarm, chance)
        if refuted is not None:
            swarm.history.refute(peer.name, refuted.reducer)
            swarm.soon(peer, refuted)

    swarm.on_event = on_event


def _refuted(peer: SimulatedPeer, exchange: Exchange, swarm: Swarm, chance: random.Random) -> AverageRefuted | None:
    """Make one of the averages again that others have made in a round, if it is this round's turn."""
    commitments, fragment = exchange.contributions.commitments, peer.fragments[exchange.name.position.fragment]
    average = choose(exchange.averages.of_others, len(commitments), chance.random)
    if average is None:
        return None
    reduce = exchange.reduction_of(average.chunk, average.absent)
    tokens = sum(weight for _, weight in reduce.members)
    place, chunks = exchange.name.position, exchange.round.chunks
    sample = Sample(average, place, chunks, tuple(reduce.weights), tokens, commitments)

    async def ask(peers: Mapping[str, int], chunk: int) -> Shown:
        there = {one.name: one for one in swarm.fetch_from(peer, tuple(peers))}
        buffers = {name: one.fragments[place.fragment].buffers for name, one in there.items()}
        buffers = {name: each for name, each in buffers.items() if each.tree is not None}  # else it has started again
        return [
            (buffers[name].proof(chunk), bytes(buffers[name].own_chunk(chunk))) if name in buffers else None
            for name in peers
        ]

    if not run_now(is_refuted(sample, fragment.workload, ask, fragment.workload.reduce)):
        return None
    return AverageRefuted(exchange.name, average.reducer, average.chunk)
