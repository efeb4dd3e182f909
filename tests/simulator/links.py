"""The links of a simulated network: who reaches whom, how fast, and how much each link has carried.

A peer's link has a rate up and a rate down, which all its chunks share, one after another. Control messages are small
and take a pair's delay alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from peers.values.wire import Reach

Pair = tuple[str, str]
SLOWNESS = 40.0
DETOUR = 5.0
UNLIMITED = float("inf")


@dataclass(frozen=True)
class Rate:
    """Bytes a second that a peer's link carries each way."""

    up: float = UNLIMITED
    down: float = UNLIMITED


@dataclass(frozen=True)
class Faults:
    """How badly the network behaves: chances per message (`suspicion`: per tick), delays in seconds."""

    loss: float = 0.0
    duplication: float = 0.0
    stream_failure: float = 0.0
    longest_delay: float = 0.05
    suspicion: float = 0.0
    """That a peer takes another one for dead, until it hears from it again."""
    slow: tuple[str, ...] = ()
    """Peers whose chunks take `SLOWNESS` times as long."""
    broken: tuple[Pair, ...] = ()
    """Pairs between which nothing passes."""
    one_way: tuple[Pair, ...] = ()
    """Pairs of which nothing passes from the first to the second."""
    relayed: tuple[Pair, ...] = ()
    """Pairs whose chunks take `DETOUR` times as long."""
    delays: tuple[tuple[Pair, float], ...] = ()
    """Seconds that everything takes besides, either way between two peers."""
    rates: tuple[tuple[str, Rate], ...] = ()
    """The links of peers that are limited."""

    @cached_property
    def _ways(self) -> dict[Pair, Reach]:
        """How those reach others between which something stands."""
        both = [(self.relayed, Reach.RELAYED), (self.broken, Reach.NONE)]
        ways = {pair: way for pairs, way in both for one, other in pairs for pair in ((one, other), (other, one))}
        return ways | dict.fromkeys(self.one_way, Reach.NONE)

    @cached_property
    def _delays(self) -> dict[frozenset[str], float]:
        return {frozenset(pair): seconds for pair, seconds in self.delays}

    @cached_property
    def _rates(self) -> dict[str, Rate]:
        return dict(self.rates)

    @property
    def hinders(self) -> bool:
        """Whether anything stands between any two peers."""
        return bool(self.broken or self.relayed or self.one_way)

    def reach(self, sender: str, to: str) -> Reach:
        """Return how a peer reaches another one."""
        return self._ways.get((sender, to), Reach.OPEN) if self._ways else Reach.OPEN

    def delay(self, sender: str, to: str) -> float:
        """Return the seconds that everything takes besides between two peers."""
        return self._delays.get(frozenset((sender, to)), 0.0) if self._delays else 0.0

    def rate(self, peer: str) -> Rate:
        """Return what a peer's link carries."""
        return self._rates.get(peer, UNLIMITED_RATE)


UNLIMITED_RATE = Rate()


class Links:
    """The traffic of all links: until when each is busy, and the bytes that it has carried."""

    def __init__(self) -> None:
        self.up = Counter[str]()
        """Bytes of chunks that each peer has sent."""
        self.down = Counter[str]()
        """Bytes of chunks that have been sent to each peer."""
        self._busy_until: dict[Pair, tuple[object, float]] = {}  # by peer and direction, and with which round

    def transfer(self, sender: str, to: str, round: object, size: int, faults: Faults, now: float) -> float:
        """Note a chunk of a round that is sent now. Return the seconds until its last byte has passed both links."""
        self.up[sender] += size
        self.down[to] += size
        sent_at = self._pass((sender, "up"), round, size, faults.rate(sender).up, now)
        return self._pass((to, "down"), round, size, faults.rate(to).down, sent_at) - now

    def _pass(self, link: Pair, round: object, size: int, rate: float, at: float) -> float:
        """Return when bytes have passed a link that carries them one chunk after another. Those of an earlier round are
        dropped, and hold nothing up."""
        if rate == UNLIMITED:
            return at
        busy_with, until = self._busy_until.get(link, (round, at))
        done = (max(at, until) if busy_with == round else at) + size / rate
        self._busy_until[link] = round, done
        return done

    def count_anew(self) -> None:
        """Begin to count the bytes at zero."""
        self.up.clear()
        self.down.clear()

    def busiest(self, payload: int) -> tuple[str, float]:
        """Return the peer whose link has carried most either way, and how many payloads that are."""
        return max(((peer, self.carried(peer) / payload) for peer in self._peers), key=lambda one: (one[1], one[0]))

    def fair_share(self, payload: int) -> float:
        """Return how many payloads a link has carried on average, the busier way of each."""
        peers = list(self._peers)
        return sum(self.carried(peer) for peer in peers) / len(peers) / payload

    def carried(self, peer: str) -> int:
        """Return the bytes that a peer's link has carried the busier way."""
        return max(self.up[peer], self.down[peer])

    @property
    def _peers(self) -> Iterable[str]:
        return sorted(self.up.keys() | self.down.keys())
