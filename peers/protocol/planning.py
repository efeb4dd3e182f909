"""Who reduces in a round, and how much: by who reaches whom, and by what links carry. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from peers.presence.reachability import SEEN_LIMIT
from peers.presence.standing import Pairs
from peers.values.chunks import payloads_moved, split_by_rate

LEAST_PAYLOADS = 2.0
"""That a link is taken to carry at least: a member's own blocks go out before the average comes in."""
SLACK = 2.0
"""How much more than others saw of a peer it may say that its link carries: in a round it need not have been busy."""

ALIKE = 0.8
"""Of the rate of a link, that another one's is at least that is dealt as much."""
FEW = 3
"""Members that reduce, if as many can: of two that wait for each other nobody can tell which of them holds the others
up."""
MOST_PAYLOADS = 8.0
"""That a reducer's link should carry, if others can share the work: of 200 members one alone would carry 199."""
SPARED = 16
"""Members of whom one may be left out so that more can reduce, though somebody reaches it."""


@dataclass(frozen=True)
class Plan:
    """Who may reduce, in roster order, and who cannot take part since too few can exchange data with it."""

    reducers: tuple[str, ...]
    left_out: frozenset[str]


def plan(leader: str, members: Sequence[str], trained: Collection[str], pairs: Pairs) -> Plan:
    """Choose the reducers: they have trained, and all other members reach them.

    Everybody sends blocks to every reducer and gets averages from it; two that reduce nothing exchange nothing. Of
    those whom all reach, the ones with the fewest pairs reduce that only a relay connects: it then carries the least;
    but so many that none of them has to carry more than `MOST_PAYLOADS`. If no member is reached by all, as few as
    possible are left out, so that one is; never the leader. There is no plan for who leads and can't exchange data with
    anybody who has trained.
    """
    able = [peer for peer in members if peer in trained]
    centres = [peer for peer in able if leader not in pairs.broken_with(peer)]
    if not centres:
        return Plan((), frozenset())
    unled = pairs.broken_with(leader)  # if somebody is to be left out, best those who can hardly be led
    centre = min(centres, key=lambda peer: (len(pairs.broken_with(peer)), len(unled - pairs.broken_with(peer))))
    left_out = pairs.broken_with(centre)
    left_out |= _hinderers(leader, [peer for peer in members if peer not in left_out], able, left_out, pairs)
    reached = _reached(able, left_out, pairs)
    relayed = {peer: len(pairs.relayed_with(peer) - left_out) for peer in reached}
    wanted = min(_fewest_reducers(len(members) - len(left_out)), len(reached))
    worst = sorted(relayed.values())[wanted - 1]
    return Plan(tuple(peer for peer in reached if relayed[peer] <= worst), left_out)


def _reached(able: Sequence[str], left_out: frozenset[str], pairs: Pairs) -> list[str]:
    """Return those of the able whom all that remain reach."""
    return [peer for peer in able if peer not in left_out and pairs.broken_with(peer) <= left_out]


def _fewest_reducers(members: int) -> int:
    """Return how many members must share the reducing, at least."""
    return max(1, math.ceil((members - 2) / (MOST_PAYLOADS - 1)))


def _hinderers(
    leader: str, members: Sequence[str], able: Sequence[str], left_out: frozenset[str], pairs: Pairs
) -> frozenset[str]:
    """Return the few members, if there are such, without whom enough others could reduce.

    Whoever says that it can't talk to most others would else have one of them do the work of all.
    """
    more: frozenset[str] = frozenset()
    for _ in range(len(members) // SPARED + 1):
        if len(_reached(able, left_out | more, pairs)) >= _fewest_reducers(len(members) - len(more)):
            return more
        others = [peer for peer in members if peer != leader and peer not in more]
        broken = {peer: len(pairs.broken_with(peer) - left_out - more) for peer in others}
        more |= {max(others, key=lambda peer: broken[peer])} if others else frozenset()
    return frozenset()


def credible_rates(claimed: Mapping[str, int], seen: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """What members' links carry, in bytes a second: as they say, but not much more than the others saw come from them.

    `seen` holds, by member, the rates at which others' data came to it. What the others saw adds up, since a peer sends
    to all of them at once; it counts when at least half of them speak. Nobody is taken for slower than the slowest.
    Links that nobody measured count as the slowest known one; 0 if none is known.
    """
    slowest = min((rate for rate in claimed.values() if rate), default=0)
    sums = dict.fromkeys(claimed, 0)
    for witness, rates in seen.items():
        for peer, rate in rates.items():
            if peer in sums and peer != witness:
                sums[peer] += rate
    speaking = [peer for peer, rates in seen.items() if rates]
    credible: dict[str, float] = {}
    for peer, rate in claimed.items():
        others = len(claimed) - 1
        witnesses = sum(witness != peer for witness in speaking)
        share = max(1.0, others / SEEN_LIMIT)  # in a large swarm each speaks of some others only
        cap = SLACK * share * sums[peer] if sums[peer] and 2 * witnesses >= others else float("inf")
        credible[peer] = float(min(rate or slowest, max(cap, slowest)))
    return credible


def deal(chunk_count: int, members: int, reducers: Sequence[str], rates: Mapping[str, float]) -> dict[str, int]:
    """How many chunks each reducer averages, such that all links are done together; a few reducers at least have one,
    unless that is more than a payload for them to send."""
    alike = evened_out([rates[peer] for peer in reducers])
    chunks = split_by_rate(chunk_count, alike, members)
    idle = sorted((place for place, count in enumerate(chunks) if not count), key=lambda place: -alike[place])
    more = FEW - (len(chunks) - len(idle)) if members <= chunk_count else 0
    for place in idle[: max(0, more)]:
        busiest = max(range(len(chunks)), key=chunks.__getitem__)
        if chunks[busiest] > 1:
            chunks[busiest], chunks[place] = chunks[busiest] - 1, 1
    return dict(zip(reducers, chunks, strict=True))


def evened_out(rates: Sequence[float]) -> list[float]:
    """Return the rates, of which those that are about the same are the same: their mean.

    A tenth more of a link is a third more to reduce; so what rates are off by would make rounds longer than links that
    are not quite alike do.
    """
    places = sorted(range(len(rates)), key=lambda place: -rates[place])
    even = list(rates)
    while places:
        group = [place for place in places if rates[place] >= ALIKE * rates[places[0]]]
        for place in group:
            even[place] = sum(rates[one] for one in group) / len(group)
        places = places[len(group) :]
    return even


def foreseen(chunks: Mapping[str, int], members: Sequence[str], rates: Mapping[str, float], size: int) -> list[float]:
    """Seconds for which each member's link is busy with its blocks, the average, and its part. 0: not known."""
    whole = max(sum(chunks.values()), 1)
    moved = {peer: payloads_moved(len(members), chunks.get(peer, 0) / whole) for peer in members}
    return [size * max(moved[peer], LEAST_PAYLOADS) / rates[peer] if rates.get(peer) else 0.0 for peer in members]


def why_left_out(broken: Collection[str]) -> str:
    """Return what a peer is told that can exchange no data with these."""
    others = sorted(broken)
    named = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if len(others) > 4 else "")
    return f"no data can be exchanged between this peer and {named}, and somebody must reach everybody"
