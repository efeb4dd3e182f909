"""Spot checks in a simulated swarm: each honest peer makes an average of each of its rounds again."""

from __future__ import annotations

import random
from collections.abc import Coroutine, Sequence

from peers.network.channel import PeerUnreachableError
from peers.protocol.commitment import ChunkProof
from peers.protocol.events import Event, PayloadAssembled
from peers.transfer.averages import SpotCheck
from peers.values.workload import Blocks
from tests.simulator.liars import Liar
from tests.simulator.simulated_peer import SimulatedPeer
from tests.simulator.simulated_workload import run_now
from tests.simulator.simulation import Swarm


class SimulatedSpotCheck(SpotCheck):
    """Nothing here waits for anything."""

    def __init__(self, peer: SimulatedPeer, swarm: Swarm, chance: random.Random) -> None:
        async def ask(donor: str, fragment: int, chunk: int, length: int) -> tuple[ChunkProof, Blocks]:
            for other in swarm.fetch_from(peer, (donor,)):
                buffers = other.fragments[fragment].buffers
                if isinstance(other, Liar):
                    buffers = other.contributed(peer.name, fragment)
                return buffers.proof(chunk), bytes(buffers.own_chunk(chunk))
            raise PeerUnreachableError(donor, "it is gone")

        buffers = [fragment.buffers for fragment in peer.fragments]
        super().__init__(ask, peer.workload.reduce, buffers, peer.name, chance)

    async def _all(self, asked: Sequence[Coroutine[None, None, Blocks | None]]) -> Sequence[Blocks | None]:
        return [await one for one in asked]


def check_averages(swarm: Swarm) -> None:
    """Have honest peers make averages again, as soon as all of a round is here. What they draw changes nothing else."""
    chance = random.Random(f"{swarm.seed} spot checks")

    def on_event(peer: SimulatedPeer, event: Event) -> None:
        exchange = peer.peer.exchange_of(event.round_name) if isinstance(event, PayloadAssembled) else None
        if exchange is None or not peer.is_honest:
            return
        refuted = run_now(SimulatedSpotCheck(peer, swarm, chance).check(exchange))
        if refuted is not None:
            swarm.history.refute(peer.name, refuted.reducer)
            swarm.soon(peer, refuted)

    swarm.on_event = on_event
