"""What a round costs in a large swarm, by simulation: `python -m peers.simulator.crowds 64 256 1000`."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from peers.log.settings import RunSettings, Timing
from peers.protocol.events import Event
from peers.protocol.messages import Message, Packer
from peers.simulator.simulated_peer import SimulatedPeer
from peers.simulator.simulation import Swarm
from peers.values.wire import digest_of

BLOCKS = 256  # 64 chunks
ROUNDS = 2


@dataclass
class Crowd(Swarm):
    """A calm swarm that keeps account of what its first leader does."""

    leader: str = ""
    leader_seconds: float = 0.0
    leader_bytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._packer = Packer(self.settings.run)

    def send(self, sender: SimulatedPeer, to: str, message: Message) -> None:
        if sender.name == self.leader:
            self.leader_bytes += len(self._packer.pack(message))
        super().send(sender, to, message)

    def handle(self, peer: SimulatedPeer, event: Event) -> None:
        if peer.name != self.leader:
            super().handle(peer, event)
            return
        before = time.process_time()
        super().handle(peer, event)
        self.leader_seconds += time.process_time() - before


def measure(peers: int) -> dict[str, float]:
    """Per round: what all send, what the leader sends, and how long its processor is busy with it."""
    timing = Timing(grace=30.0, round_timeout=60.0)
    settings = RunSettings("crowd", digest_of(b"manifest"), 5, 10, 10, peers, timing)
    crowd = Crowd(1, settings, block_count=BLOCKS, wire_checks=1 << 30, traced=False)
    for number in range(peers):
        crowd.start(f"{number:052}")  # as long as libp2p's ids
    if not crowd.run(600.0, until=lambda: crowd.longest >= 1):
        raise SystemExit(f"{peers} peers have made no entry in ten minutes")
    crowd.leader = next(iter(crowd.peers))
    messages, chunks = crowd.messages.copy(), crowd.chunks.copy()
    began = crowd.now
    crowd.run(600.0, until=lambda: crowd.longest >= 1 + ROUNDS)
    sent, moved = crowd.messages - messages, crowd.chunks - chunks
    return {
        "peers": peers,
        "messages": sent.total() / ROUNDS,
        "by the leader": sent[crowd.leader] / ROUNDS,
        "MB by the leader": crowd.leader_bytes / ROUNDS / 1e6,
        "chunks": moved.total() / ROUNDS,
        "leader's CPU s": crowd.leader_seconds / ROUNDS,
        "simulated s": (crowd.now - began) / ROUNDS,
    }


def main() -> None:
    """One line per size of a swarm."""
    parser = argparse.ArgumentParser(prog="python -m peers.simulator.crowds", description=__doc__)
    parser.add_argument("peers", type=int, nargs="*", default=[64], help="sizes")
    print("per round:")
    for peers in parser.parse_args().peers:
        print("  ".join(f"{name} {value:.6g}" for name, value in measure(peers).items()), flush=True)


if __name__ == "__main__":
    main()
