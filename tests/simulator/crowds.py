"""What a round costs in a large swarm, by simulation: `python -m tests.simulator.crowds 16 64 256 1000`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from peers.log.certificate import Phase
from peers.log.settings import RunSettings, Timing
from peers.messages.messages import Certified, Message
from peers.protocol.effects import Effect, SendChunk
from peers.protocol.events import Event, Received
from peers.values.wire import digest_of
from tests.simulator.simulated_peer import SimulatedPeer
from tests.simulator.simulation import Swarm
from tests.simulator.tape import Packed, Tape, play

BLOCKS = 32  # and as many chunks
ROUNDS = 1
PATIENCE = 600.0  # simulated seconds for anything to come about
SPEEDS = (1.0, 1.0, 1.0, 0.7, 0.5)  # by name: some peers want shorter leases
TIMING = Timing(heartbeat=5.0, heartbeat_expiry=25.0, grace=30.0, round_timeout=60.0)
"""Heartbeats are rare: their number grows with the square of the peers, and here they are not what is measured."""
TURNS = 3
"""How often processor time is measured; the median counts."""

LARGEST = 1000
"""The size of a swarm that the bars are about."""
LEADER_MB, ALL_MB, LEADER_SECONDS = 3.0, 20.0, 1.0
DEATH_FACTOR = 3.0
"""How many times as much a round may cost whose leader dies."""


@dataclass
class Crowd(Swarm):
    """A calm swarm that keeps account of what everybody sends, and of all that happens to the peers on `tapes`."""

    tapes: dict[str, Tape] = field(default_factory=dict)
    bytes_by: dict[str, int] = field(default_factory=dict)

    @property
    def leader(self) -> str:
        """The peer that leads the first view in a calm swarm."""
        return self.successors(1)[0]

    def successors(self, number: int) -> list[str]:
        """Return the leaders of the first views."""
        log = self.living[0].peer.log
        return list(log.ring[:number])

    def settle(self, entries: int) -> bool:
        """Let time pass until all who live have so many entries. Returns whether they do within `PATIENCE`."""
        return self.run(
            PATIENCE, until=lambda: self.longest >= entries and all(peer.index >= entries for peer in self.living)
        )

    def start_on_tape(self, name: str) -> None:
        """A peer starts that will lead, or be looked at for another reason."""
        self.start(name)
        peer = self.peers[name]
        self.tapes[name] = Tape(
            name,
            self.settings,
            tuple(each.buffers.size for each in peer.fragments),
            peer.state,
            peer.peer.incarnation,
            peer.time(self.now),
        )

    def carry(self, sender: SimulatedPeer, to: SimulatedPeer, packed: bytes) -> None:
        self.bytes_by[sender.name] = self.bytes_by.get(sender.name, 0) + len(packed)
        super().carry(sender, to, packed)

    def deliver(self, to: SimulatedPeer, sender: str, packed: bytes) -> None:
        if to.alive and to.name in self.tapes:
            self.tapes[to.name].record(to.time(self.now), Packed(sender, packed))
        super().deliver(to, sender, packed)

    def tell(self, peer: SimulatedPeer, event: Event) -> list[Effect]:
        if peer.name in self.tapes and not isinstance(event, Received):  # that is on the tape as it came
            self.tapes[peer.name].record(peer.time(self.now), event)
        return super().tell(peer, event)


@dataclass(frozen=True)
class Scene:
    """One round of a crowd: what happened, who led, and which part of the tapes it is."""

    costs: dict[str, object]
    leaders: Sequence[str]
    on_tapes: Mapping[str, range]


def gather(peers: int) -> Crowd:
    """Return a swarm that has made its first entry."""
    settings = RunSettings("crowd", digest_of(b"manifest"), 5, 10, 10, peers, TIMING)
    crowd = Crowd(1, settings, block_count=BLOCKS, speeds=SPEEDS)
    names = [f"{number:052}" for number in range(peers)]  # as long as libp2p's ids
    looked_at = names[1 : len(SCENES) + 3]  # the first founds the run; these lead in the scenes, and one leads in none
    for name in names:
        if name in looked_at:
            crowd.start_on_tape(name)
        else:
            crowd.start(name)
    if not crowd.settle(1):
        raise SystemExit(f"{peers} peers have made no entry in {PATIENCE:g} seconds")
    return crowd


def measure(crowd: Crowd, what: str, rounds: int, leaders: Sequence[str]) -> Scene:
    """Return what a round costs: all peers, and these that lead it."""
    crowd.bytes_by = {}
    starts = {name: len(tape) for name, tape in crowd.tapes.items()}
    messages, chunks, began, goal = crowd.messages.copy(), crowd.chunks.copy(), crowd.now, crowd.longest + rounds
    if not crowd.settle(goal):
        raise SystemExit(f"no entry in {PATIENCE:g} seconds: {what}")
    sent = crowd.messages - messages
    costs: dict[str, object] = {
        "peers": len(crowd.peers),
        "what": what,
        "messages": sent.total() / rounds,
        "by the leader": sum(sent[name] for name in leaders) / rounds,
        "MB": sum(crowd.bytes_by.values()) / rounds / 1e6,
        "MB by the leader": sum(crowd.bytes_by.get(name, 0) for name in leaders) / rounds / 1e6,
        "chunks": (crowd.chunks - chunks).total() / rounds,
        "simulated s": (crowd.now - began) / rounds,
    }
    return Scene(costs, leaders, {name: range(start, len(crowd.tapes[name])) for name, start in starts.items()})


def with_seconds(crowd: Crowd, scenes: Sequence[Scene], alone: Executor) -> list[dict[str, object]]:
    """Return what the scenes cost, with the processor seconds of their leaders, and of a peer that leads in none."""
    seconds: dict[str, list[float]] = {}
    for name, tape in crowd.tapes.items():
        parts = [scene.on_tapes[name] for scene in scenes]
        turns = [alone.submit(play, tape, parts).result() for _ in range(TURNS)]
        seconds[name] = [median(turn) for turn in zip(*turns, strict=True)]
    member = next(name for name in crowd.tapes if not any(name in scene.leaders for scene in scenes))
    return [
        scene.costs
        | {
            "leader's CPU s": sum(seconds[name][place] for name in scene.leaders) / ROUNDS,
            "a member's CPU s": seconds[member][place] / ROUNDS,
        }
        for place, scene in enumerate(scenes)
    ]


def calm(crowd: Crowd) -> Scene:
    return measure(crowd, "a round", ROUNDS, [crowd.leader])


def death_amid_the_exchange(crowd: Crowd) -> Scene:
    """The leader dies when it has sent its first chunk; its successor goes on with the round."""
    leader, successor = crowd.successors(2)

    def on_chunk(sender: str, send: SendChunk) -> bool:
        if sender == leader:
            crowd.kill(leader)
        return True

    crowd.on_chunk = on_chunk
    scene = measure(crowd, "its leader dies amid the exchange", 1, [leader, successor])
    crowd.on_chunk = lambda sender, send: True
    return scene


def death_at_its_commit(crowd: Crowd) -> Scene:
    """The leader dies before anybody hears of its commit, when all others are bound to the entry."""
    leader, successor = crowd.successors(2)
    index = crowd.longest

    def on_message(sender: str, to: str, message: Message) -> Message | None:
        if sender != leader or not isinstance(message, Certified) or message.header.index != index:
            return message  # it may still tell somebody of the entry before
        if message.certificate is None or message.certificate.choice.phase is Phase.PREPARE:
            return message
        crowd.at(0.0, lambda: crowd.kill(leader))
        return None

    crowd.on_message = on_message
    scene = measure(crowd, "its leader dies at its commit", 1, [leader, successor])
    crowd.on_message = lambda sender, to, message: message
    return scene


SCENES: tuple[Callable[[Crowd], Scene], ...] = (calm, death_amid_the_exchange, death_at_its_commit)


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
    limits = {"MB by the leader": LEADER_MB, "MB": ALL_MB, "leader's CPU s": LEADER_SECONDS}
    return [Bar(f"{name}: {figure}", float(str(row[figure])), limit * factor) for figure, limit in limits.items()]


def main() -> None:
    """Print a line for each scene in each swarm, and the bars for the largest."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator.crowds", description=__doc__)
    parser.add_argument("peers", type=int, nargs="*", default=[64], help="sizes")
    parser.add_argument("--json", type=Path, dest="json_file", metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    rows, checked = list[dict[str, object]](), list[Bar]()
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
        for peers in options.peers:
            began = time.process_time()
            crowd = gather(peers)
            _tell(peers, "have gathered", began)
            scenes = list[Scene]()
            for act in SCENES:
                scenes.append(act(crowd))
                _tell(peers, f"have made an entry more: {scenes[-1].costs['what']}", began)
            for row in with_seconds(crowd, scenes, alone):
                rows.append(row)
                checked += bars(row) if peers == LARGEST else []
                print("  ".join(f"{name} {_cell(value)}" for name, value in row.items()), flush=True)
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


def _tell(peers: int, what: str, began: float) -> None:
    """A large swarm takes minutes: say how far it is."""
    print(f"{peers} peers {what}; {time.process_time() - began:.0f} CPU s so far", file=sys.stderr, flush=True)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
