"""The plan of a round (R3): how many chunks each member averages, by its reach and its link's rate. Pure functions.

The plan uses only a member's own reports about its links. A pair in which one does not reach the other counts against
both alike, and the member with most such pairs loses its place first; so a member that names all others loses only its
own place.
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
"""Minimum number of payloads that a link is assumed to carry: a member's own blocks go out before the average comes
in."""
SLACK = 2.0
"""Multiple of the rate that others saw of a peer up to which its own claim is believed, since a link may have been idle
for part of the round."""
ALIKE = 0.8
"""Share of a link's rate above which another link counts as equally fast."""
REACHED = 0.75
"""Share of the other members that must reach a member that averages."""
FAIR = 2.0
"""Maximum load of a link, in fair shares, to keep data away from relays. A fair share is its load if all average
alike."""
MARGIN = 3.0
"""Time limit of an exchange, as a multiple of what most links need."""
MOST = 0.75
"""Share of the members, the fastest links first, whose needs set the time limit."""
UNMEASURED = 0.25
"""Minimum time limit while some links are not measured, as a share of the manifest's round timeout."""
OVERLAP = 0.5
"""Share of the overlap in which a member's blocks may go out. The rest is for the averages to come back."""


NONE_THIN: Mapping[str, float] = {}


@dataclass(frozen=True)
class MemberLink:
    """A member's own report about its link, from its Ready: its rate and the rates at which others' data reached it, in
    bytes a second, and the members that it reaches only through relays, or not at all."""

    rate: int = 0
    seen: Mapping[str, int] = field(default_factory=dict)
    relayed: frozenset[str] = frozenset()
    unreached: frozenset[str] = frozenset()


class ForATerm:
    """Peers that a leader remembers for a term of TERM entries, because they were late or failed (R3, R7)."""

    def __init__(self) -> None:
        self._since: dict[str, int] = {}

    def note(self, peers: Iterable[str], index: int) -> None:
        """Remember the peers for TERM entries, beginning with entry `index`, and forget those whose time is over."""
        self._since = {peer: since for peer, since in self._since.items() if since + TERM > index}
        self._since |= dict.fromkeys(peers, index)

    def at(self, index: int) -> frozenset[str]:
        """Return the peers that were noted for the entry `index`, or for one of the TERM - 1 entries before it."""
        return frozenset(peer for peer, since in self._since.items() if since <= index < since + TERM)


class Experience:
    """The peers that a leader leaves out. `undealt` are reducers that get no chunks, because their averages were late,
    reached few members or had most blocks absent. `unawaited` are joiners that did not use a grant; the leader does not
    wait for them."""

    def __init__(self) -> None:
        self.undealt = ForATerm()
        self.unawaited = ForATerm()


def shares(
    roster: Sequence[Member], links: Mapping[str, MemberLink], chunks: int, failed: Collection[str] = ()
) -> tuple[Share, ...]:
    """Return all members of a round, each with the number of chunks that it averages.

    Members without tokens average nothing, since an average has at least its maker's own blocks. Members that `failed`
    as reducers before, and those whose links are too thin for the run's own format, average nothing if the others can
    share the work fairly.
    """
    peers = [member.peer for member in roster]
    able = [member.peer for member in roster if member.tokens]
    thin = {member.peer for member in roster if member.format}
    for without in (failed, thin):
        good = [peer for peer in able if peer not in without]
        able = good if is_fair(good, able, len(peers)) else able
    dealt = deal(chunks, len(peers), reducers(peers, able, links), believed_rates(peers, links))
    return tuple(Share(member=member, chunks=dealt.get(member.peer, 0)) for member in roster)


def seconds_for(
    round: Round, links: Mapping[str, MemberLink], size: PayloadSize, timing: Timing, overlap: float = 0.0
) -> float:
    """Return the time limit of a round's exchange in seconds: at least the `overlap`, the seconds that members train
    during the exchange."""
    rates = believed_rates(round.peers, links)
    measured = {peer: rates[peer] for peer in round.peers if peer in links and links[peer].rate}
    dealt = {share.member.peer: share.chunks for share in round.shares}
    thin = {member.peer: size.share(member.format) for member in round.contributors if member.format}
    return max(
        deadline(foreseen(dealt, round.peers, measured, size.bytes, thin), timing), min(overlap, timing.round_timeout)
    )


def deadline(foreseen: Iterable[float], timing: Timing) -> float:
    """Return the time limit of an exchange in seconds. `foreseen` has the seconds for which each member's link is
    expected to be busy (0: not measured).

    Links that are slower than most do not count. A link's rate is known once it was in a round.
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
    """Return pairs of a silent reducer and its heir. The heirs are chosen in turn among the members `able` to average.

    No heir gets chunks that it had `before`.
    """
    heirs = list[tuple[str, str]]()
    for place, reducer in enumerate(missing):
        line = [*able[place % len(able) :], *able[: place % len(able)]] if able else []
        heirs += [(reducer, heir) for heir in line if heir != reducer and (reducer, heir) not in before][:1]
    return tuple(heirs)


# Reachability ---------------------------------------------------------------------------------------------------------
def reducers(members: Sequence[str], able: Sequence[str], links: Mapping[str, MemberLink]) -> tuple[str, ...]:
    """Return the members that average, in the order of `able`: each one of `able` that at least the share REACHED of
    the other members reaches. If there are none, return all of `able`.

    If the others can share the work fairly, two groups do not average either: first members that too many others reach
    only through a relay, then members with any pair without a link, or with a relayed one, that both sides report.
    """
    among = set(members)
    unreached = {peer: links[peer].unreached & among for peer in members if peer in links}
    relayed = {peer: (links[peer].relayed | links[peer].unreached) & among for peer in members if peer in links}
    reached = _well_reached(members, unreached)
    chosen = [peer for peer in able if peer in reached] or list(able)
    for reported in (unreached, relayed):
        near = _well_reached(members, reported)
        for fewer in (near, [peer for peer in near if not _reported_by_both(peer, reported)]):
            left = [peer for peer in chosen if peer in fewer]
            if is_fair(left, able, len(members)):
                chosen = left
    return tuple(chosen)


def _reported_by_both(peer: str, reported: Mapping[str, Collection[str]]) -> set[str]:
    return {other for other in reported.get(peer, ()) if peer in reported.get(other, ())}


def is_fair(few: Collection[str], able: Collection[str], members: int) -> bool:
    """Return True if `few` of the `able` members can average for all, without much more load on a link than if all able
    members averaged."""
    if not few:
        return False
    return payloads_moved(members, 1 / len(few)) <= FAIR * payloads_moved(members, 1 / len(able))


def _well_reached(members: Sequence[str], reported: Mapping[str, Collection[str]]) -> frozenset[str]:
    """Return the members that have a bad link to at most the share 1 - REACHED of the others. `reported` maps each
    member to those to which it reports a bad link: no connection, or a relayed one.

    The member with most bad links is left out first, and its links do not count against the others any more. Among
    members with equally many, those that report most of their bad links themselves are left out.
    """
    pairs: dict[str, set[str]] = {peer: set() for peer in members}
    for peer, others in reported.items():
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
        named = {peer: len(pairs[peer].intersection(reported.get(peer, ()))) for peer in those}
        for peer in [peer for peer in those if named[peer] == max(named.values())]:
            del left[peer]
            for other in pairs.pop(peer):
                if other in pairs:
                    pairs[other].discard(peer)
    return frozenset(left)


# Link rates -----------------------------------------------------------------------------------------------------------
def believed_rates(peers: Iterable[str], links: Mapping[str, MemberLink]) -> dict[str, float]:
    """Return the assumed rates of these members' links, in bytes a second, from the members' own reports."""
    known = {peer: links.get(peer, MemberLink()) for peer in peers}
    claimed = {peer: link.rate for peer, link in known.items()}
    return credible_rates(claimed, {peer: link.seen for peer, link in known.items()})


def credible_rates(claimed: Mapping[str, int], seen: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Return the believed rates of members' links, in bytes a second: their claims, but at most a multiple of the rates
    that others saw.

    `seen` holds, by member, the rates at which other members' data reached it. These rates are added up, since a peer
    sends to all others at once; they count if at least half of the others report any. No link counts as slower than the
    slowest claim. Links that were not measured count as the slowest known one; 0 if none is known.
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
        # Each witness reports the rates of at most SEEN_LIMIT peers, so estimate the sum of all witnesses' rates.
        scale = max(1.0, others / SEEN_LIMIT)
        cap = SLACK * scale * sums[peer] if sums[peer] and 2 * witnesses >= others else float("inf")
        credible[peer] = float(min(rate or slowest, max(cap, slowest)))
    return credible


def deal(chunk_count: int, members: int, reducers: Sequence[str], rates: Mapping[str, float]) -> dict[str, int]:
    """Return the number of chunks that each reducer averages, so that all links finish together. `rates` are in bytes a
    second."""
    chunks = split_by_rate(chunk_count, evened_out([rates[peer] for peer in reducers]), members)
    return dict(zip(reducers, chunks, strict=True))


def evened_out(rates: Sequence[float]) -> list[float]:
    """Return the rates of links, with each group of similar rates replaced by its mean.

    A link that is a tenth faster would get a third more to average. So errors of the rates would lengthen rounds more
    than small differences between links do.
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
    """Return the seconds for which each member's link is expected to be busy in an exchange; 0 if its rate is unknown.
    `size` is the payload's size in bytes. `thin` maps members with a thinner format to the share of `size` that
    they send."""
    whole = max(sum(chunks.values()), 1)
    moved = {peer: payloads_moved(len(members), chunks.get(peer, 0) / whole) for peer in members}
    busy = {peer: max(moved[peer], LEAST_PAYLOADS) + thin.get(peer, 1.0) - 1.0 for peer in members}
    return [size * busy[peer] / rates[peer] if rates.get(peer) else 0.0 for peer in members]


# Contributions --------------------------------------------------------------------------------------------------------
def seconds_to_send(allowed: float | None, timing: Timing, overlap: float = 0.0) -> float:
    """Return the seconds within which a member should send its blocks, so that no other member waits: a third of
    `allowed`, or half of the `overlap` if that is longer.

    Args:
        allowed: time limit of the last exchange in seconds; None before the first: a quarter of the round timeout.
        overlap: seconds that members train during the exchange; more than `allowed` count as `allowed`.
    """
    allowed = UNMEASURED * timing.round_timeout if allowed is None else allowed
    return max(allowed / MARGIN, OVERLAP * min(overlap, allowed))


def format_for(size: PayloadSize, uplink: float, seconds: float) -> int:
    """Return the number of the first format in which an uplink carries a contribution in this many seconds; if there is
    none, the smallest format's. `uplink` is in bytes a second; 0 (not measured) counts as enough."""
    sizes = enumerate(size.by_format)
    fitting = (format for format, count in sizes if not uplink or count <= uplink * seconds)
    return next(fitting, len(size.thinner))
