"""Which donors are asked first: those that bulk data reaches best, and by chance among these.

Everybody sees the same peers in the same order. Without chance, all joiners would ask the same few.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from peers.values.reach import Reach

CHANCE = random.Random()
PLACES: Mapping[Reach | None, int] = {Reach.OPEN: 4, Reach.PUNCHED: 4, None: 4, Reach.RELAYED: 2, Reach.NONE: 1}
"""Donors that give at once: one of this reach is added to fewer than so many. So a relay carries bulk data only where
direct donors are too few to replace one another, and an unreachable donor is tried when nobody else is left."""
ORDER: Sequence[Reach | None] = (Reach.OPEN, Reach.PUNCHED, None, Reach.RELAYED, Reach.NONE)


class ReachingTransport(Protocol):
    def reach_of(self, peer_id: str) -> Reach | None: ...


def best_first(transport: ReachingTransport, donors: Collection[str]) -> list[str]:
    """Return the donors with direct ones first and unreachable ones last; otherwise in the order that they have."""
    return sorted(donors, key=lambda donor: rank(transport, donor))


def shuffled(transport: ReachingTransport, donors: Collection[str], chance: random.Random) -> list[str]:
    """Return the donors with direct ones first and unreachable ones last; otherwise in an order of chance."""
    return best_first(transport, chance.sample(list(donors), len(donors)))


def to_ask(transport: ReachingTransport, donors: Sequence[str], most: int, chance: random.Random) -> list[str]:
    """Return whom to ask what it has: the first donor, which leads, and others by reach and chance, `most` in all.

    Those that cannot be reached are left out, unless nobody else is there.
    """
    ordered = [*donors[:1], *shuffled(transport, donors[1:], chance)]
    reachable = [donor for donor in ordered if transport.reach_of(donor) is not Reach.NONE]
    return (reachable or ordered)[:most]


def rank(transport: ReachingTransport, donor: str) -> int:
    """Return 0 for donors that are reached directly, and more the worse others are reached."""
    reach = transport.reach_of(donor)
    return 0 if reach is not None and reach.is_direct else ORDER.index(reach)
