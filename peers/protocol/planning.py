"""The plan of a round (R3): how much each member averages, by its reach and its link. Pure functions.

Only a member's own words about its links are asked for. A pair in which one does not reach the other costs both of them
alike, and the one that has most such pairs first; so a member that names all others loses its own place, and no other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from peers.log.header import Member
from peers.log.settings import Timing
from peers.log.state import TERM
from peers.messages.rounds import Round, Share
from peers.presence.reachability import SEEN_LIMIT
from peers.values.chunks import PayloadSize, payloads_moved, split_by_rate

LEAST_PAYLOADS = 2.0
"""Payloads that a link is taken to carry at least: a member's own blocks go out before the average comes in."""
SLACK = 2.0
"""Times the rate that others saw of a peer, that it may claim: in a round its link need not have been busy."""
ALIKE = 0.8
"""Of the rate of a link, that another one's is at least that is dealt as much."""
REACHED = 0.75
"""Of the other members, that must reach a member that averages."""
FAIR = 2.0
"""Fair shares that a link may carry, so that data need not go through relays. One fair share: if all averaged alike."""
MARGIN = 3.0
"""Times what most links need, that an exchange may take."""
MOST = 0.75
"""Of the members, those with the fastest links, for whose links an exchange has time."""
UNMEASURED = 0.25
"""Of the manifest's time limit, that an exchange has at least while some links are not measured."""
OVERLAP = 0.5
"""Of the overlap, in which a member's blocks may go out: the other half is for the averages to come back."""


NONE_THIN: Mapping[str, float] = {}


@dataclass(frozen=True)
class MemberLink:
    """A member's own words about its link, as its Ready has them."""

    rate: int = 0
    seen: Mapping[str, int] = field(default_factory=dict)
    relayed: frozenset[str] = frozenset()
    unreached: frozenset[str] = frozenset()


class ForATerm:
    """Peers that a leader remembers for a term of entries, as it has seen itself what they did (R3, R7)."""

    def __init__(self) -> None:
        self._since: dict[str, int] = {}

    def note(self, peers: Iterable[str], index: int) -> None:
        """Note peers at an entry, and forget those of earlier terms."""
        self._since = {peer: since for peer, since in self._since.items() if since + TERM > index}
        self._since |= dict.fromkeys(peers, index)

    def at(self, index: int) -> frozenset[str]:
        """Return the peers that are remembered at an entry."""
        return frozenset(peer for peer, since in self._since.items() if since <= index < since + TERM)


class Experience:
    """The peers that a leader does without. It deals nothing to the `undealt`, reducers that gave no average in time
    that most members got, or one without most blocks. It does not wait for the `unawaited`, joiners that did not use a
    grant."""

    def __init__(self) -> None:
        self.undealt = ForATerm()
        self.unawaited = ForATerm()


def shares(
    roster: Sequence[Member], links: Mapping[str, MemberLink], chunks: int, besides: Collection[str] = ()
) -> tuple[Share, ...]:
    """Return all members of a round, each with how many chunks it averages.

    Members that bring nothing average nothing: an average has its maker's own blocks at least. Nor do those `besides`,
    which did badly before, and those whose links carry no blocks in the run's own format, if the others can share the
    work fairly.
    """
    peers = [member.peer for member in roster]
    able = [member.peer for member in roster if member.tokens]
    thin = {member.peer for member in roster if member.format}
    for without in (besides, thin):
        good = [peer for peer in able if peer not in without]
        able = good if is_fair(good, able, len(peers)) else able
    dealt = deal(chunks, len(peers), reducers(peers, able, links), believed_rates(peers, links))
    return tuple(Share(member=member, chunks=dealt.get(member.peer, 0)) for member in roster)


def seconds_for(
    round: Round, links: Mapping[str, MemberLink], size: PayloadSize, timing: Timing, overlap: float = 0.0
) -> float:
    """Return how long the exchange of a round may take: at least the seconds of the `overlap`, in which members go on
    training."""
    rates = believed_rates(round.peers, links)
    measured = {peer: rates[peer] for peer in round.peers if peer in links and links[peer].rate}
    dealt = {share.member.peer: share.chunks for share in round.shares}
    thin = {member.peer: size.share(member.format) for member in round.contributors if member.format}
    return max(
        deadline(foreseen(dealt, round.peers, measured, size.bytes, thin), timing), min(overlap, timing.round_timeout)
    )


def deadline(foreseen: Iterable[float], timing: Timing) -> float:
    """Return the seconds for an exchange, given how long each member's link is busy in it; 0: not measured.

    Links that are slower than most have no say. Once a link was in a round its rate is known.
    """
    links = list(foreseen)
    measured = sorted(seconds for seconds in links if seconds)
    if not measured:
        return timing.round_timeout
    least = timing.heartbeat_expiry
    if len(measured) < len(links):
        least = max(least, UNMEASURED * timing.round_timeout)
    needed = measured[math.ceil(MOST * len(measured)) - 1]
    return min(max(MARGIN * needed, least), timing.round_timeout)


def heirs_of(
    missing: Sequence[str], able: Sequence[str], before: Collection[tuple[str, str]] = ()
) -> tuple[tuple[str, str], ...]:
    """Return an heir for each reducer that gave nothing, among the `able`, which have given their part.

    They take turns. None gets the same chunks again as `before`.
    """
    heirs = list[tuple[str, str]]()
    for place, reducer in enumerate(missing):
        line = [*able[place % len(able) :], *able[: place % len(able)]] if able else []
        heirs += [(reducer, heir) for heir in line if heir != reducer and (reducer, heir) not in before][:1]
    return tuple(heirs)


# Who reaches whom -----------------------------------------------------------------------------------------------------
def reducers(members: Sequence[str], able: Sequence[str], links: Mapping[str, MemberLink]) -> tuple[str, ...]:
    """Return those of the able, in their order, whom enough of the other members reach.

    If the others can share the work fairly, those do not average either of whom too many are reached through a relay
    only, and then those that have any pair without a link, or a relayed one, of which both say so.
    """
    among = set(members)
    unreached = {peer: links[peer].unreached & among for peer in members if peer in links}
    relayed = {peer: (links[peer].relayed | links[peer].unreached) & among for peer in members if peer in links}
    reached = _well_reached(members, unreached)
    chosen = [peer for peer in able if peer in reached] or list(able)
    for said in (unreached, relayed):
        near = _well_reached(members, said)
        for fewer in (near, [peer for peer in near if not _in_both_words(peer, said)]):
            left = [peer for peer in chosen if peer in fewer]
            if is_fair(left, able, len(members)):
                chosen = left
    return tuple(chosen)


def _in_both_words(peer: str, said: Mapping[str, Collection[str]]) -> set[str]:
    """Return those that a member names, and that name it."""
    return {other for other in said.get(peer, ()) if peer in said.get(other, ())}


def is_fair(few: Collection[str], able: Collection[str], members: int) -> bool:
    """Return whether a few of the able can average for all without that their links carry too much."""
    if not few:
        return False
    return payloads_moved(members, 1 / len(few)) <= FAIR * payloads_moved(members, 1 / len(able))


def _well_reached(members: Sequence[str], said: Mapping[str, Collection[str]]) -> frozenset[str]:
    """Return the members that enough others reach, given whom each says that it does not reach.

    The member with most such pairs is left out first, and its pairs do not count against the others any more. Among
    members with as many pairs it is the one that names most others itself, or all of these.
    """
    pairs: dict[str, set[str]] = {peer: set() for peer in members}
    for peer, others in said.items():
        for other in others:
            if other != peer:
                pairs[peer].add(other)
                pairs[other].add(peer)
    most = (1 - REACHED) * (len(members) - 1)
    left = dict.fromkeys(members)
    while left:
        worst = max(len(pairs[peer]) for peer in left)
        if worst <= most:
            break
        those = [peer for peer in left if len(pairs[peer]) == worst]
        named = {peer: len(pairs[peer].intersection(said.get(peer, ()))) for peer in those}
        for peer in [peer for peer in those if named[peer] == max(named.values())]:
            del left[peer]
            for other in pairs.pop(peer):
                if other in pairs:
                    pairs[other].discard(peer)
    return frozenset(left)


# What links carry -----------------------------------------------------------------------------------------------------
def believed_rates(peers: Iterable[str], links: Mapping[str, MemberLink]) -> dict[str, float]:
    """Return what the links of these members are taken to carry, in bytes a second."""
    known = {peer: links.get(peer, MemberLink()) for peer in peers}
    claimed = {peer: link.rate for peer, link in known.items()}
    return credible_rates(claimed, {peer: link.seen for peer, link in known.items()})


def credible_rates(claimed: Mapping[str, int], seen: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Return what members' links carry, in bytes a second: as they say, but not much more than others saw of them.

    `seen` holds, by member, the rates at which others' data came to it. What the others saw adds up, since a peer sends
    to all of them at once; it counts when at least half of them speak. Nobody is taken for slower than the slowest.
    Links that were not measured count as the slowest known one; 0 if none is known.
    """
    slowest = min((rate for rate in claimed.values() if rate), default=0)
    sums = dict.fromkeys(claimed, 0)
    for witness, rates in seen.items():
        for peer, rate in rates.items():
            if peer in sums and peer != witness:
                sums[peer] += rate
    speaking = {peer for peer, rates in seen.items() if rates}
    credible: dict[str, float] = {}
    for peer, rate in claimed.items():
        others = len(claimed) - 1
        witnesses = len(speaking) - (peer in speaking)
        share = max(1.0, others / SEEN_LIMIT)  # in a large swarm each speaks of some others only
        cap = SLACK * share * sums[peer] if sums[peer] and 2 * witnesses >= others else float("inf")
        credible[peer] = float(min(rate or slowest, max(cap, slowest)))
    return credible


def deal(chunk_count: int, members: int, reducers: Sequence[str], rates: Mapping[str, float]) -> dict[str, int]:
    """Return how many chunks each reducer averages, such that all links are done together."""
    chunks = split_by_rate(chunk_count, evened_out([rates[peer] for peer in reducers]), members)
    return dict(zip(reducers, chunks, strict=True))


def evened_out(rates: Sequence[float]) -> list[float]:
    """Return the rates, of which those that are about the same are the same: their mean.

    A tenth more of a link is a third more to average; so what rates are off by would make rounds longer than links that
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


def foreseen(
    chunks: Mapping[str, int],
    members: Sequence[str],
    rates: Mapping[str, float],
    size: int,
    thin: Mapping[str, float] = NONE_THIN,
) -> list[float]:
    """Return for how long each member's link is busy with its blocks, the average, and its part; 0: not known. `thin`
    are the shares of a payload that members in thinner formats send."""
    whole = max(sum(chunks.values()), 1)
    moved = {peer: payloads_moved(len(members), chunks.get(peer, 0) / whole) for peer in members}
    busy = {peer: max(moved[peer], LEAST_PAYLOADS) + thin.get(peer, 1.0) - 1.0 for peer in members}
    return [size * busy[peer] / rates[peer] if rates.get(peer) else 0.0 for peer in members]


# What a member sends --------------------------------------------------------------------------------------------------
def seconds_to_send(allowed: float | None, timing: Timing, overlap: float = 0.0) -> float:
    """Return the seconds in which a member's blocks should be out, so that the others do not wait for them: what most
    members' links need, or half of the `overlap`. `allowed` is what its last exchange might take; None: the first."""
    allowed = UNMEASURED * timing.round_timeout if allowed is None else allowed
    return max(allowed / MARGIN, OVERLAP * min(overlap, allowed))


def format_for(size: PayloadSize, uplink: float, seconds: float) -> int:
    """Return the first format in which an uplink carries a contribution in so many seconds, or else the smallest one.
    `uplink` is in bytes a second; 0: not measured, which is taken to be enough."""
    sizes = enumerate(size.by_format)
    fitting = (format for format, count in sizes if not uplink or count <= uplink * seconds)
    return next(fitting, len(size.thinner))
