"""Who leads, and who is enough. Pure functions of the last roster and of who is alive.

Leaders can be wrong about each other (two may think they lead): safety does not rest on the election but on each
member being pledged to one leader at a time, and on any two quorums of a roster sharing a member.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def elect(roster: Sequence[str], able: Collection[str], candidates: Collection[str]) -> str | None:
    """The first of the last roster that is `able`; else the smallest id of the able; else of the `candidates`.

    `able` peers hold the state and work on the next entry; `candidates` are alive and still joining, which matters
    only before the first entry.
    """
    for peer in roster:
        if peer in able:
            return peer
    return min(able, default=None) or min(candidates, default=None)


def quorum(roster: Iterable[str], left: Collection[str], ready: Collection[str]) -> bool:
    """Whether `ready` holds more than half of those of the last roster who have not politely left."""
    remaining = [peer for peer in roster if peer not in left]
    return 2 * sum(peer in ready for peer in remaining) > len(remaining) or not remaining


def take_order(roster: Sequence[str], members: Iterable[str]) -> list[str]:
    """Roster order for the next entry: those of the last one in their old order, then newcomers by id."""
    old = {peer: place for place, peer in enumerate(roster)}
    return sorted(members, key=lambda peer: (old.get(peer, len(old)), peer))
