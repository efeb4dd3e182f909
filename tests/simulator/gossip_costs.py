"""What gossip costs, and how fast it is: `python -m tests.simulator.gossip_costs 16 128 1000`.

What a large swarm costs follows from two smaller ones, whose peers say as little as those of the large one, and in one
of which only some say anything. How fast its news is shows a swarm of its size in which a few speak.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from tests.simulator.gossiping import Crowd, GossipingPeer, Weather

WEATHER = Weather(loss=0.01, cut=0.05, relayed=0.1)
START, SETTLE, MEASURE = 30.0, 10.0, 30.0  # seconds; as long as a peer of 1,000 takes from heartbeat to heartbeat
STEP = 0.1  # seconds between two looks at who knows what
ALL_SPEAK = 130  # peers at most, for all of them to speak
SMALLER = 200  # peers of the swarms in the place of a larger one
SOME = 70  # of them, that speak in one of the two
FEW = 40  # that speak in the swarm of the true size
TRACED = 8  # peers whose news is followed


class Costs(NamedTuple):
    """Bytes a second of one peer in the mean, and of the busiest; seconds until news is with 999 of 1,000 peers; CPU
    seconds a second that one peer takes."""

    sent: float
    received: float
    most: float
    median: float
    slowest: float
    cpu: float


class Tracer:
    """Follows what some peers say."""

    def __init__(self, crowd: Crowd, traced: Sequence[GossipingPeer]) -> None:
        self._crowd = crowd
        self._traced = traced
        self._said: dict[tuple[str, int], float] = {}
        self._newest: dict[str, int] = {}
        self.delays: list[float] = []

    def look(self) -> None:
        crowd = self._crowd
        for peer in self._traced:
            own = peer.gossip.own
            if own is not None and own.sequence != self._newest.get(peer.name):
                self._newest[peer.name] = own.sequence
                self._said[peer.name, own.sequence] = crowd.now
        for (name, sequence), at in list(self._said.items()):
            words = (one.gossip.heard.get(name) for one in crowd.living)
            knowing = sum(word is not None and word.sequence >= sequence for word in words)
            if knowing >= 0.999 * len(crowd.living):
                self.delays.append(crowd.now - at)
                del self._said[name, sequence]


def measure(size: int, speaking: int, scale: int) -> Costs:
    """Let a swarm settle, and count what it says then. Its peers take it for as large as `scale`."""
    crowd = Crowd(1, WEATHER, scale)
    crowd.has_dht = size == scale  # else a larger share of all would be in its sample
    for number in range(size):
        peer = crowd.start(crowd.living[-8:], after=START * number / speaking if number < speaking else None)
        if speaking == size:
            peer.say()
    if speaking < size:
        _know_all(crowd)
    crowd.run(START + SETTLE)
    tracer = Tracer(crowd, crowd.living[:TRACED])
    for peer in crowd.living:
        peer.sent = peer.received = 0
    began, cpu = crowd.now, time.process_time()
    while crowd.now < began + MEASURE:
        crowd.run(STEP)
        tracer.look()
    cpu = (time.process_time() - cpu) / size / MEASURE
    sent, received = ([one.sent for one in crowd.living], [one.received for one in crowd.living])
    most = max(map(max, zip(sent, received, strict=True)))
    delays = tracer.delays or [float("nan")]
    means = statistics.mean(sent) / MEASURE, statistics.mean(received) / MEASURE
    return Costs(*means, most / MEASURE, statistics.median(delays), max(delays), cpu)


def _know_all(crowd: Crowd) -> None:
    """Have all choose their partners among all, even those of whom they hear nothing."""
    names = list(crowd.peers)
    for peer in crowd.living:
        others = [name for name in names if name != peer.name]
        peer.gossip.others = lambda now, others=others: others  # type: ignore[method-assign,misc]


def costs_of(size: int) -> Costs:
    if size <= ALL_SPEAK:
        return measure(size, size, size)
    some, all_speak = (measure(SMALLER, speaking, size) for speaking in (SOME, SMALLER))
    times = (size - SOME) / (SMALLER - SOME)
    costs = Costs(*(first + times * (second - first) for first, second in zip(some, all_speak, strict=True)))
    news = measure(size, FEW, size)
    most = costs.sent * all_speak.most / all_speak.sent
    return costs._replace(most=most, median=news.median, slowest=news.slowest)


def main(sizes: Sequence[int]) -> None:
    print("| peers | sends, KB/s | receives | the busiest | news is everywhere after, s | at most | CPU of one peer |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for size in sizes:
        costs = costs_of(size)
        rates = " | ".join(f"{1e-3 * rate:.1f}" for rate in costs[:3])
        print(f"| {size:,} | {rates} | {costs.median:.1f} | {costs.slowest:.1f} | {costs.cpu:.1%} |", flush=True)


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]])
