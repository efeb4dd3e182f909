"""What a leader remembers of peers beyond one position: who held rounds up, and who said that it cannot reach whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

FORGIVEN = 3600.0
"""Seconds after its last exclusion is over, after which a peer's strikes are forgotten."""
REPLANS = 2
"""How often one peer may have the leader plan a round anew before it is the one to be left out."""
OFTEN_LATE = 2
"""Entries that were made without a peer's work, since one had it: nobody waits for as long any more."""


@dataclass(frozen=True)
class Said:
    """A peer's own words about whom it reaches with difficulty (through a relay, for instance), or not at all."""

    relayed: frozenset[str] = frozenset()
    unreached: frozenset[str] = frozenset()


class Standing:
    """Kept for as long as the peer runs, while leaders come and go with each position."""

    def __init__(self, bar: float) -> None:
        """`bar`: seconds for which the first strike leaves a peer out; the second twice as long, and so on."""
        self.round_seconds = 0.0
        """How long the last round took that we have led."""
        self._bar = bar
        self._strikes: Counter[str] = Counter()
        self._barred_until: dict[str, float] = {}
        self._said: dict[str, Said] = {}
        self._replans: Counter[str] = Counter()
        self._replanned: set[str] = set()  # for whom, since the last entry
        self._missed = Counter[str]()  # entries that were made without a peer's work, which was expected

    # Who holds others up --------------------------------------------------------------------------------------
    def bar(self, peer: str, now: float) -> None:
        """Leave a peer out for a while, longer each time."""
        if now - self._barred_until.get(peer, now) > FORGIVEN:
            del self._strikes[peer]
        self._strikes[peer] += 1
        self._barred_until[peer] = now + self._strikes[peer] * self._bar

    def barred(self, now: float) -> frozenset[str]:
        return frozenset(peer for peer, until in self._barred_until.items() if now < until)

    def may_replan(self, peer: str) -> bool:
        """Whether to believe once more that a round must be planned anew for this peer."""
        self._replans[peer] += 1
        self._replanned.add(peer)
        return self._replans[peer] <= REPLANS

    def entry_made(self, peers: Iterable[str]) -> None:
        """These took part in an entry. One that did so without having it planned anew is believed more readily again;
        one that has each entry planned anew is not."""
        for peer in set(peers) - self._replanned:
            self._replans[peer] = max(0, self._replans[peer] - 1)
        self._replanned.clear()

    def work_came(self, peers: Collection[str], expected: Collection[str]) -> None:
        """An entry has the work of these peers, of those of whom work was expected."""
        for peer in expected:
            self._missed[peer] += 1
        for peer in peers:
            self._missed.pop(peer, None)

    def are_often_late(self, peers: Collection[str]) -> bool:
        """Whether each of these was late for several entries, and in none since. One that is slow and in time for every
        other entry is not."""
        return all(self._missed[peer] >= OFTEN_LATE for peer in peers)

    # Who reaches whom -----------------------------------------------------------------------------------------
    def said(self, peer: str, relayed: Iterable[str], unreached: Iterable[str]) -> None:
        """What the peer says now replaces what it said before."""
        said = Said(frozenset(relayed), frozenset(unreached))
        if said == Said():
            self._said.pop(peer, None)
        else:
            self._said[peer] = said

    def failed(self, peer: str, others: Iterable[str]) -> None:
        """In the middle of a round the peer found that it can exchange nothing with these: they should not have to."""
        known = self._said.get(peer, Said())
        self._said[peer] = Said(known.relayed.union(others), known.unreached)

    def pairs(self, members: Collection[str]) -> Pairs:
        """What is known of these members, one with another: what either of a pair says holds for both."""
        among = set(members)
        said = {peer: self._said[peer] for peer in among & self._said.keys()}
        broken = _symmetric({peer: one.unreached & among for peer, one in said.items()})
        relayed = _symmetric({peer: one.relayed & among for peer, one in said.items()})
        return Pairs(broken, relayed)


@dataclass(frozen=True)
class Pairs:
    """By member, with whom it can exchange nothing, and with whom only with difficulty."""

    broken: Mapping[str, frozenset[str]]
    relayed: Mapping[str, frozenset[str]]

    def broken_with(self, peer: str) -> frozenset[str]:
        return self.broken.get(peer, frozenset())

    def relayed_with(self, peer: str) -> frozenset[str]:
        return self.relayed.get(peer, frozenset())


def _symmetric(said: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    both: dict[str, set[str]] = {}
    for peer, others in said.items():
        for other in others - {peer}:
            both.setdefault(peer, set()).add(other)
            both.setdefault(other, set()).add(peer)
    return {peer: frozenset(others) for peer, others in both.items()}
