"""Who leads, and who is enough. Pure functions of the last roster and of who is alive.

Leaders can be wrong about each other (two may think they lead): safety does not rest on the election but on each
member being pledged to one leader at a time, and on any two quorums of a roster sharing a member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

LATENESS = 60.0
"""Seconds that one peer may come later to a place in the log than another: each joins attempts with numbers that are
within the other's reach."""


def highest_attempt(seconds: float) -> int:
    """Return how high attempts may be numbered so many seconds after a peer has come to a place in the log.

    No honest peers get there. The limit is an absolute one, so that a liar brings nobody out of another one's reach;
    and it rises, so that there are always higher numbers than a liar may name.
    """
    return 2**32 + int(1000 * max(0.0, seconds))


def elect(
    roster: Sequence[str], able: Collection[str], candidates: Collection[str], broken: Mapping[str, int] | None = None
) -> str | None:
    """The first of the last roster that is `able`; else the smallest id of the able; else of the `candidates`.

    `able` peers hold the state and work on the next entry; `candidates` are alive and still joining, which matters
    only before the first entry. `broken`: with how many of the others a peer can't talk; whoever has the fewest of
    these goes before all others, since a leader must be reached by all.
    """
    among = able or candidates
    if broken:
        fewest = min((broken.get(peer, 0) for peer in among), default=0)
        among = {peer for peer in among if broken.get(peer, 0) == fewest}
    return next((peer for peer in roster if peer in among), None) or min(among, default=None)


def broken_pairs(unreached: Mapping[str, Iterable[str]], peers: Iterable[str], tail: int) -> Counter[str]:
    """With how many of these peers each can't talk, as either side of a pair says.

    Args:
        unreached: by peer, the last characters of the ids of those that it can't reach.
        tail: how many characters these are.
    """
    named = {peer[-tail:]: peer for peer in peers}
    pairs = {
        frozenset((peer, named[other]))
        for peer, others in unreached.items()
        for other in others
        if other in named and peer[-tail:] in named and named[other] != peer
    }
    return Counter(peer for pair in pairs for peer in pair)


def most_named(votes: Iterable[str]) -> tuple[str, int]:
    """Return who is voted for most, and how often; nobody is voted for with an empty vote."""
    return max(Counter(filter(None, votes)).items(), key=lambda named: named[1], default=("", 0))


def quorum(roster: Iterable[str], departed: Collection[str], ready: Collection[str]) -> bool:
    """Whether `ready` holds more than half of those of the last roster who have not politely left."""
    remaining = [peer for peer in roster if peer not in departed]
    return 2 * sum(peer in ready for peer in remaining) > len(remaining) or not remaining


def culprits(
    members: Collection[str], complete: Collection[str], waiting: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """Who holds an attempt up: those who say nothing; else those who are waited for and wait for nobody; else those
    who are named most."""
    silent = [peer for peer in members if peer not in complete and peer not in waiting]
    if silent:
        return tuple(sorted(silent))
    named = Counter(peer for missing in waiting.values() for peer in missing if peer in members)
    idle = [peer for peer in named if not waiting.get(peer)]
    if idle:
        return tuple(sorted(idle))
    most = max(named.values(), default=0)
    return tuple(sorted(peer for peer, count in named.items() if count == most))
