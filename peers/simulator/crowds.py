"""What a round costs in a large swarm, by simulation: `python -m peers.simulator.crowds 16 64 256 1000`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from peers.log.settings import RunSettings, Timing
from peers.protocol.events import Event, SendChunk
from peers.protocol.messages import Commit, Message
from peers.simulator.simulated_peer import SimulatedPeer
from peers.simulator.simulation import Swarm
from peers.values.wire import digest_of

BLOCKS = 32  # and as many chunks
ROUNDS = 1
PATIENCE = 600.0  # simulated seconds for anything to come about
SPEEDS = (1.0, 1.0, 1.0, 0.7, 0.5)  # by name: some peers want shorter leases
TIMING = Timing(heartbeat=5.0, heartbeat_expiry=25.0, grace=30.0, round_timeout=60.0)
"""Heartbeats are rare: their number grows with the square of the peers, and here they are not what is measured."""

LARGEST = 1000
"""The size of a swarm that the bars are about."""
LEADER_MB, ALL_MB, LEADER_SECONDS = 3.0, 20.0, 1.0
DEATH_FACTOR = 3.0
"""How many times as much may be sent in a round whose leader dies."""


@dataclass
class Crowd(Swarm):
    """A calm swarm that keeps account of what everybody sends, and of how long its leaders' processors are busy."""

    leaders: set[str] = field(default_factory=set)
    bytes_by: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    _is_timed: bool = False

    @property
    def leader(self) -> str:
        """The peer that all take for their leader in a calm swarm."""
        return next(peer.name for peer in self.living if peer.peer.log.roster[0] == peer.name)

    def carry(self, sender: SimulatedPeer, to: SimulatedPeer, packed: bytes) -> None:
        self.bytes_by[sender.name] = self.bytes_by.get(sender.name, 0) + len(packed)
        super().carry(sender, to, packed)

    def deliver(self, to: SimulatedPeer, sender: str, packed: bytes) -> None:
        with self._timed(to):
            super().deliver(to, sender, packed)

    def handle(self, peer: SimulatedPeer, event: Event) -> None:
        with self._timed(peer):
            super().handle(peer, event)

    @contextmanager
    def _timed(self, peer: SimulatedPeer) -> Iterator[None]:
        if self._is_timed or peer.name not in self.leaders:
            yield
            return
        self._is_timed, before = True, time.process_time()
        yield
        self._is_timed = False
        self.seconds += time.process_time() - before


def gather(peers: int) -> Crowd:
    """Return a swarm that has made its first entry."""
    settings = RunSettings("crowd", digest_of(b"manifest"), 5, 10, 10, peers, TIMING)
    crowd = Crowd(1, settings, block_count=BLOCKS, traced=False, speeds=SPEEDS)
    for number in range(peers):
        crowd.start(f"{number:052}")  # as long as libp2p's ids
    if not crowd.run(PATIENCE, until=lambda: crowd.longest >= 1):
        raise SystemExit(f"{peers} peers have made no entry in {PATIENCE:g} seconds")
    return crowd


def measure(crowd: Crowd, what: str, rounds: int, leaders: Sequence[str]) -> dict[str, object]:
    """Return what a round costs: all peers, and these that lead it."""
    crowd.leaders, crowd.seconds, crowd.bytes_by = set(leaders), 0.0, {}
    messages, chunks, began, goal = crowd.messages.copy(), crowd.chunks.copy(), crowd.now, crowd.longest + rounds
    if not crowd.run(PATIENCE, until=lambda: crowd.longest >= goal):
        raise SystemExit(f"no entry in {PATIENCE:g} seconds: {what}")
    sent = crowd.messages - messages
    return {
        "peers": len(crowd.peers),
        "what": what,
        "messages": sent.total() / rounds,
        "by the leader": sum(sent[name] for name in leaders) / rounds,
        "MB": sum(crowd.bytes_by.values()) / rounds / 1e6,
        "MB by the leader": sum(crowd.bytes_by.get(name, 0) for name in leaders) / rounds / 1e6,
        "leader's CPU s": crowd.seconds / rounds,
        "chunks": (crowd.chunks - chunks).total() / rounds,
        "simulated s": (crowd.now - began) / rounds,
    }


def calm(crowd: Crowd) -> dict[str, object]:
    return measure(crowd, "a round", ROUNDS, [crowd.leader])


def death_amid_the_exchange(crowd: Crowd) -> dict[str, object]:
    """The leader dies when it has sent its first chunk; its successor goes on with the round."""
    leader, successor = crowd.living[0].peer.log.roster[:2]

    def on_chunk(sender: str, send: SendChunk) -> bool:
        if sender == leader:
            crowd.kill(leader)
        return True

    crowd.on_chunk = on_chunk
    costs = measure(crowd, "its leader dies amid the exchange", 1, [leader, successor])
    crowd.on_chunk = lambda sender, send: True
    return costs


def death_at_its_commit(crowd: Crowd) -> dict[str, object]:
    """The leader dies before anybody hears of its commit, when all others hold the entry."""
    leader, successor = crowd.living[0].peer.log.roster[:2]

    def on_message(sender: str, to: str, message: Message) -> Message | None:
        if sender != leader or not isinstance(message, Commit):
            return message
        crowd.at(0.0, lambda: crowd.kill(leader))
        return None

    crowd.on_message = on_message
    costs = measure(crowd, "its leader dies at its commit", 1, [leader, successor])
    crowd.on_message = lambda sender, to, message: message
    return costs


SCENES: tuple[Callable[[Crowd], dict[str, object]], ...] = (calm, death_amid_the_exchange, death_at_its_commit)


@dataclass(frozen=True)
class Bar:
    """A figure that must be at most so large."""

    name: str
    value: float
    at_most: float

    @property
    def is_met(self) -> bool:
        return self.value <= self.at_most

    def __str__(self) -> str:
        return f"{self.name}: {self.value:.2f}, bar {self.at_most:g}: {'met' if self.is_met else 'MISSED'}"


def bars(row: Mapping[str, object]) -> list[Bar]:
    """The bars for a swarm of the largest size."""
    name, factor = f"{row['peers']} peers, {row['what']}", 1.0 if row["what"] == "a round" else DEATH_FACTOR
    limits = {"MB by the leader": LEADER_MB * factor, "MB": ALL_MB * factor}
    if factor == 1.0:
        limits["leader's CPU s"] = LEADER_SECONDS
    return [Bar(f"{name}: {figure}", float(str(row[figure])), limit) for figure, limit in limits.items()]


def main() -> None:
    """Print a line for each scene in each swarm, and the bars for the largest."""
    parser = argparse.ArgumentParser(prog="python -m peers.simulator.crowds", description=__doc__)
    parser.add_argument("peers", type=int, nargs="*", default=[64], help="sizes")
    parser.add_argument("--json", type=Path, dest="json_file", metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    rows, checked = list[dict[str, object]](), list[Bar]()
    for peers in options.peers:
        crowd = gather(peers)
        for scene in SCENES:
            rows.append(scene(crowd))
            checked += bars(rows[-1]) if peers == LARGEST else []
            print("  ".join(f"{name} {_cell(value)}" for name, value in rows[-1].items()), flush=True)
    for bar in checked:
        print(bar)
    missed = sum(not bar.is_met for bar in checked)
    if checked:
        print("verdict: " + (f"{missed} of {len(checked)} bars MISSED" if missed else "all bars met"))
    if options.json_file:
        facts = [
            {"name": bar.name, "value": bar.value, "at_most": bar.at_most, "is_met": bar.is_met} for bar in checked
        ]
        options.json_file.write_text(json.dumps({"rows": rows, "bars": facts}, indent=2) + "\n", encoding="utf-8")


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
