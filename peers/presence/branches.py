"""Branches of the log that other peers name in their heartbeats: which peers are further on, and which to ask (R21)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from peers.log.header import UNKNOWN_STATE
from peers.log.lineage import Branch, Lineage
from peers.log.state import LogState
from peers.presence.heartbeat import Heartbeat
from peers.presence.membership import DONATING

if TYPE_CHECKING:
    from peers.presence.presence import Presence

VAIN = 2
"""Number of failed requests for a peer's log, after which its claims count as unproven."""
FORGOTTEN = 3600.0
"""Seconds after which the failed requests to a peer are forgotten."""


class Branches:
    """Other peers' claims about their places in the log, and pauses for peers whose answers were of no use."""

    def __init__(self, presence: Presence, me: str, expiry: float, pause: float) -> None:
        """Create an object for the peer `me`. Another peer that does not send the log or state that it was asked for is
        not asked again for `expiry` to `pause` seconds."""
        self._presence = presence
        self._me = me
        self._expiry = expiry
        self._pause = pause
        self._gave_nothing_until: dict[str, float] = {}
        # by peer: number of pauses in asking for its log, and the time on our clock at which the last pause ends
        self._passed_over: dict[str, tuple[int, float]] = {}
        self._claimants: tuple[tuple[object, ...], tuple[str, ...]] = ((), ())

    # Donors ---------------------------------------------------------------------------------------------------
    def donors(self) -> set[str]:
        """Return the ids of live peers that can send the run's state, except those that lately sent none."""
        return {peer for peer, beat in self._live().items() if beat.state in DONATING} - self.unhelpful

    @property
    def unhelpful(self) -> frozenset[str]:
        """The peers that are not asked for the run's state at present, because they lately sent none."""
        return frozenset(self._unexpired(self._gave_nothing_until))

    def gave_nothing(self, peer: str) -> None:
        """Stop asking a peer for the run's state for a while, because it sent none."""
        until = {peer: self._presence.now + self._pause}
        self._gave_nothing_until = self._unexpired(self._gave_nothing_until) | until

    def ask_again(self, peer: str) -> None:
        """End the pause that `gave_nothing` began for a peer, because no other peer is left to ask for the state."""
        self._gave_nothing_until.pop(peer, None)

    def pass_over(self, peer: str) -> None:
        """Prefer other peers' logs for a while, longer each time, since `peer` lacks the place that it claims."""
        now, forgotten = self._presence.now, self._presence.now - FORGOTTEN
        self._passed_over = {one: passed for one, passed in self._passed_over.items() if passed[1] > forgotten}
        times = self._passed_over.get(peer, (0, 0.0))[0] + 1
        self._passed_over[peer] = times, now + min(self._pause, self._expiry * 2.0 ** min(times - 1, 16))

    def look_again(self) -> None:
        """Allow requests for the logs of peers that `pass_over` excluded, since the network or the log has changed."""
        self._passed_over.clear()

    @property
    def unproven(self) -> frozenset[str]:
        """The peers that claim to be further on in the log, but whose logs have repeatedly not shown it."""
        return frozenset(peer for peer, (times, _) in self._passed_over.items() if times >= VAIN)

    # Peers that are further on --------------------------------------------------------------------------------
    def claimant(self, log: LogState, lineage: Lineage, archive_contradicts: bool = False) -> str | None:
        """Return the live peer whose log to ask for first, because the peer claims to be further on than our log or on
        another branch; None if there is none."""
        return next(iter(self._find(log, lineage, archive_contradicts)), None)

    def furthest(self, log: LogState, lineage: Lineage, archive_contradicts: bool = False) -> str | None:
        """Return the live peer whose log to ask for first, as `claimant` does, but pass over peers at an index before
        the oldest head that `lineage` has. Return None if no peer is left."""
        claimants, live = self._find(log, lineage, archive_contradicts), self._live()
        return next((peer for peer in claimants if live[peer].index >= lineage.known_from), None)

    def is_behind(self, log: LogState, lineage: Lineage, archive_contradicts: bool = False) -> bool:
        """Return True if at least half of the live members and bystanders of the last entry claim to be further on than
        our log. If none of them is live, one peer's claim is enough."""
        live, away = self._live(), self._presence.unreached
        others = {peer for peer in log.incarnations if peer != self._me and peer in live} - away
        claimants = self._find(log, lineage, archive_contradicts)
        further = {peer for peer in claimants if live[peer].index > log.position.index}
        return 2 * len(further & others) >= len(others) if others else bool(further)

    def _find(self, log: LogState, lineage: Lineage, archive_contradicts: bool) -> tuple[str, ...]:
        """Return the claimants: live peers that say they are further on than our log, or at a place that is not in it.

        Members of our last roster come first, and among them the peer that claims the most training. Their logs will
        show whether a claim is true.

        Peers further back than our lineage reaches are claimants, too, if a minority made an entry of our log, if an
        archive has signed another log (`archive_contradicts`), or if no live peer's head is in our lineage.
        """
        now = self._presence.now
        passed_over = frozenset(peer for peer, (_, until) in self._passed_over.items() if now < until)
        besides = self.unhelpful | self._presence.unreached | passed_over
        asked = (self._live(), log, besides, self.unproven, lineage, archive_contradicts)
        if not _is_same(asked, self._claimants[0]):
            self._claimants = asked, self._find_anew(log, lineage, besides, archive_contradicts)
        return self._claimants[1]

    def _find_anew(
        self, log: LogState, lineage: Lineage, besides: frozenset[str], archive_contradicts: bool
    ) -> tuple[str, ...]:
        index, unproven = log.position.index, self.unproven
        givers = [beat for beat in self._live().values() if beat.state in DONATING]
        # If a minority made entries of our log, peers before the oldest head that we know may be on the majority's log.
        first = lineage.known_from if lineage.doubt is not None else 0
        is_lost = archive_contradicts or all(lineage.head_at(beat.index) != beat.head for beat in givers)
        claims = {
            beat.peer: (
                beat.peer not in unproven,  # else a few peers with the largest claims would be asked for ever
                beat.index >= lineage.known_from,
                beat.peer in log.incarnations,
                beat.lineage_tokens,
                _inverted(beat.head),
                beat.peer,
            )
            for beat in givers
            if (
                not first <= beat.index <= index
                or lineage.lacks(beat.index, beat.head)
                or (is_lost and lineage.head_at(beat.index) != beat.head)
            )
            and beat.lineage_tokens > 0
            and beat.peer not in besides
        }
        return tuple(sorted(claims, key=lambda peer: claims[peer], reverse=True))

    # The majority's place in the log --------------------------------------------------------------------------
    def state_of_most(self, log: LogState, ours: bytes, incarnation: int) -> bytes | None:
        """Return the state digest that more than half of the log's voters name, or None. `ours` is this peer's digest.

        So a single liar, or a single peer with faulty memory, cannot outvote the others.
        """
        own_digest = [ours] if log.counts(self._me, incarnation) else []
        return state_named(log, self._live().values(), own_digest)

    def are_most_elsewhere(self, log: LogState, branch: Branch, incarnation: int) -> bool | None:
        """Return True if the live voters of `log` that are not on `branch` make a quorum, False if they do not, None if
        that depends on peers further on than the known part of the branch. A minority made `branch` after `log`.

        This peer counts as not on `branch`, if it votes in this `incarnation`.
        """
        beats = [beat for beat in self._live().values() if log.counts(beat.peer, beat.incarnation)]
        end = branch.end.position.index
        further = {beat.peer for beat in beats if beat.index > end}
        elsewhere = {beat.peer for beat in beats if branch.heads.get(beat.index) != beat.head} - further
        elsewhere |= {beat.peer for beat in beats if beat.index <= log.position.index}
        elsewhere |= {self._me} if log.counts(self._me, incarnation) else set()
        if elsewhere and self._presence.is_quorum(log, elsewhere):
            return True
        return None if further and self._presence.is_quorum(log, elsewhere | further) else False

    def are_more_there(self, branch: Branch, log: LogState, lineage: Lineage) -> bool | None:
        """Return True if more live peers are on `branch` than on our log, False if fewer, None if equally many."""
        beats = self._live().values()
        there = {beat.peer for beat in beats if beat.index and branch.heads.get(beat.index) == beat.head}
        others = [beat for beat in beats if beat.index <= log.position.index and beat.peer not in there]
        here = 1 + sum(not lineage.lacks(beat.index, beat.head) for beat in others)
        return None if len(there) == here else len(there) > here

    def _live(self) -> Mapping[str, Heartbeat]:
        return self._presence.live()

    def _unexpired(self, untils: Mapping[str, float]) -> dict[str, float]:
        return {peer: until for peer, until in untils.items() if self._presence.now < until}


def state_named(log: LogState, beats: Iterable[Heartbeat], more_votes: Sequence[bytes] = ()) -> bytes | None:
    """Return the state digest that more than half of the log's voters name for the log's head; None if there is none.
    A voter names a digest by its heartbeat in `beats`. Each digest in `more_votes` counts as another voter's."""
    head = log.position.head
    here = [beat.state_digest for beat in beats if beat.head == head and log.counts(beat.peer, beat.incarnation)]
    for digest, count in Counter([*more_votes, *here]).most_common(1):
        return digest if 2 * count > len(log.voters) else None
    return None


def reported_state(branch: Branch, beats: Iterable[Heartbeat], place: LogState) -> bytes | None:
    """Return the state digest that more than half of the live voters name for a place on a branch.

    UNKNOWN_STATE if they name none, or are elsewhere in the log; None if no voter is live. Voters on another branch
    cannot know the state, and do not count: after a fork they may be the majority.
    """
    voters = [beat for beat in beats if place.counts(beat.peer, beat.incarnation)]
    there = [beat for beat in voters if beat.head == place.position.head or not _has_parted(beat, place, branch)]
    named = Counter(_state_named_by(beat, place, branch) for beat in there)
    for digest, count in named.most_common(1):
        return digest if 2 * count > len(there) else UNKNOWN_STATE
    return UNKNOWN_STATE if voters else None


def _has_parted(beat: Heartbeat, place: LogState, branch: Branch) -> bool:
    """Return True if a peer has reached the index of `place`, but on another branch than `branch`."""
    head = place.position.head if beat.index == place.position.index else branch.heads.get(beat.index)
    return beat.index >= place.position.index and head not in (None, beat.head)


def _state_named_by(beat: Heartbeat, place: LogState, branch: Branch) -> bytes:
    """Return the state digest that a peer names for a place: its own if it is there, the one that the branch's next
    entry claims if the peer is further on along the branch, otherwise UNKNOWN_STATE."""
    if beat.head == place.position.head:
        return beat.state_digest
    has_gone_on = beat.index > place.position.index and branch.heads.get(beat.index) == beat.head
    return branch.claimed.get(place.position.index, UNKNOWN_STATE) if has_gone_on else UNKNOWN_STATE


def _is_same(asked: Sequence[object], before: Sequence[object]) -> bool:
    """Return True if the inputs of `_find` equal the last ones, so that its last result (slow to find) is reused."""
    if len(asked) != len(before):
        return False
    for one, other in zip(asked, before, strict=True):  # `all` takes twice as long, and _is_same runs at each event
        if one is not other and not (isinstance(one, frozenset) and one == other):
            return False
    return True


def _inverted(digest: bytes) -> int:
    """Return a number that orders digests in reverse, so that of equal claims the smaller digest comes first."""
    return -int.from_bytes(digest, "big")
