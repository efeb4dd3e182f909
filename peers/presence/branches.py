"""The branches of the log that other peers name in their heartbeats: who is further on, and whom to ask (R21)."""

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
"""Times that a peer was asked for its log in vain, after which no peer waits for it."""
FORGOTTEN = 3600.0
"""Seconds after which it is forgotten that a peer was asked in vain."""


class Branches:
    """Other peers' claims about the log, and the peers that it was no use to ask. Outlives positions of the log."""

    def __init__(self, presence: Presence, me: str, expiry: float, pause: float) -> None:
        """`expiry` and `pause`: as of a Presence."""
        self._presence = presence
        self._me = me
        self._expiry = expiry
        self._pause = pause
        self._gave_nothing_until: dict[str, float] = {}
        self._passed_over: dict[str, tuple[int, float]] = {}  # how often, and until when
        self._claimants: tuple[tuple[object, ...], tuple[str, ...]] = ((), ())

    # Whom to ask ----------------------------------------------------------------------------------------------
    def donors(self) -> set[str]:
        """Return the peers that have a state to give."""
        return {peer for peer, beat in self._live().items() if beat.state in DONATING} - self.unhelpful

    @property
    def unhelpful(self) -> frozenset[str]:
        """Peers that are not asked for their state, since they gave none a short while ago."""
        return frozenset(self._still(self._gave_nothing_until))

    def gave_nothing(self, peer: str) -> None:
        """Ask others for their state for a while."""
        until = {peer: self._presence.now + self._pause}
        self._gave_nothing_until = self._still(self._gave_nothing_until) | until

    def ask_again(self, peer: str) -> None:
        """Ask a peer again: to have nobody to ask is worse."""
        self._gave_nothing_until.pop(peer, None)

    def pass_over(self, peer: str) -> None:
        """Look at others first for a while, longer each time: a peer's log led nowhere."""
        now, forgotten = self._presence.now, self._presence.now - FORGOTTEN
        self._passed_over = {one: passed for one, passed in self._passed_over.items() if passed[1] > forgotten}
        times = self._passed_over.get(peer, (0, 0.0))[0] + 1
        self._passed_over[peer] = times, now + min(self._pause, self._expiry * 2.0 ** min(times - 1, 16))

    def look_again(self) -> None:
        """Look at all peers again: what counts has changed."""
        self._passed_over.clear()

    @property
    def vain(self) -> frozenset[str]:
        """Peers that say that they are further on, and again and again did not show it."""
        return frozenset(peer for peer, (times, _) in self._passed_over.items() if times >= VAIN)

    # Who is further on ----------------------------------------------------------------------------------------
    def claimant(self, log: LogState, lineage: Lineage, is_astray: bool = False) -> str | None:
        """Return the first of the claimants, if there are any."""
        return next(iter(self._find(log, lineage, is_astray)), None)

    def furthest(self, log: LogState, lineage: Lineage, is_astray: bool = False) -> str | None:
        """Return the first of the claimants that are no further back than our log remembers: any others may be on it,
        too."""
        claimants, live = self._find(log, lineage, is_astray), self._live()
        return next((peer for peer in claimants if live[peer].index >= lineage.known_from), None)

    def is_behind(self, log: LogState, lineage: Lineage, is_astray: bool = False) -> bool:
        """Return whether half of the members and bystanders that are here, at least, say that they are further on.
        Where none of them is here, one peer is enough."""
        live, away = self._live(), self._presence.unreached
        others = {peer for peer in log.incarnations if peer != self._me and peer in live} - away
        claimants = self._find(log, lineage, is_astray)
        further = {peer for peer in claimants if live[peer].index > log.position.index}
        return 2 * len(further & others) >= len(others) if others else bool(further)

    def _find(self, log: LogState, lineage: Lineage, is_astray: bool) -> tuple[str, ...]:
        """Return the live peers that say that they are where our log does not lead, or further on: those of our last
        roster first, and the one first that says it has trained most. Whether that is true, their logs will show.

        A peer that `is_astray`, since archives have signed another log, looks at all that are not where its own has
        led. So does one on whose lineage too few went on, at those further back than it remembers: they may be with the
        others.
        """
        now = self._presence.now
        passed_over = frozenset(peer for peer, (_, until) in self._passed_over.items() if now < until)
        besides = self.unhelpful | self._presence.unreached | passed_over
        asked = (self._live(), log, besides, self.vain, lineage, is_astray)
        if not _is_same(asked, self._claimants[0]):
            self._claimants = asked, self._find_anew(log, lineage, besides, is_astray)
        return self._claimants[1]

    def _find_anew(self, log: LogState, lineage: Lineage, besides: frozenset[str], is_astray: bool) -> tuple[str, ...]:
        index, vain = log.position.index, self.vain
        givers = [beat for beat in self._live().values() if beat.state in DONATING]
        # A peer that went on alone, and has come far, remembers no more where it parted from the others.
        first = lineage.known_from if lineage.doubt is not None else 0
        is_lost = is_astray or all(lineage.head_at(beat.index) != beat.head for beat in givers)
        claims = {
            beat.peer: (
                beat.peer not in vain,  # or a few that claim most would be looked at in turn for ever
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

    # Where most are -------------------------------------------------------------------------------------------
    def state_of_most(self, log: LogState, ours: bytes, incarnation: int) -> bytes | None:
        """Return the digest that more than half of the log's voters, and we with `ours`, have for the state there, if
        any. So one liar, or one whose memory fails, is wrong by itself."""
        mine = [ours] if log.counts(self._me, incarnation) else []
        return state_named(log, self._live().values(), mine)

    def are_most_elsewhere(self, doubt: LogState, branch: Branch, incarnation: int) -> bool | None:
        """Return whether a quorum at a place, we included, is alive, and not where a branch leads from there; None:
        some are further than it leads, and it depends on them. `incarnation` is ours."""
        beats = [beat for beat in self._live().values() if doubt.counts(beat.peer, beat.incarnation)]
        end = branch.end.position.index
        further = {beat.peer for beat in beats if beat.index > end}
        elsewhere = {beat.peer for beat in beats if branch.heads.get(beat.index) != beat.head} - further
        elsewhere |= {beat.peer for beat in beats if beat.index <= doubt.position.index}
        elsewhere |= {self._me} if doubt.counts(self._me, incarnation) else set()
        if elsewhere and self._presence.is_quorum(doubt, elsewhere):
            return True
        return None if further and self._presence.is_quorum(doubt, elsewhere | further) else False

    def are_more_there(self, branch: Branch, log: LogState, lineage: Lineage) -> bool | None:
        """Return whether more live peers are on a branch than with us; None: as many."""
        beats = self._live().values()
        there = {beat.peer for beat in beats if beat.index and branch.heads.get(beat.index) == beat.head}
        others = [beat for beat in beats if beat.index <= log.position.index and beat.peer not in there]
        here = 1 + sum(not lineage.lacks(beat.index, beat.head) for beat in others)
        return None if len(there) == here else len(there) > here

    def _live(self) -> Mapping[str, Heartbeat]:
        return self._presence.live()

    def _still(self, untils: Mapping[str, float]) -> dict[str, float]:
        return {peer: until for peer, until in untils.items() if self._presence.now < until}


def state_named(log: LogState, beats: Iterable[Heartbeat], besides: Sequence[bytes] = ()) -> bytes | None:
    """Return the digest that more than half of the log's voters name for the state there, if any."""
    head = log.position.head
    here = [beat.state_digest for beat in beats if beat.head == head and log.counts(beat.peer, beat.incarnation)]
    for digest, count in Counter([*besides, *here]).most_common(1):
        return digest if 2 * count > len(log.voters) else None
    return None


def state_told(branch: Branch, beats: Iterable[Heartbeat], place: LogState) -> bytes | None:
    """Return the digest that more than half of the voters at a place of a branch that are here name for the state
    there; UNKNOWN_STATE if they do not, or are elsewhere in the log; None if none of them is here. Voters that are on
    another branch can't know the state, and have no say: after a fork they may be most."""
    voters = [beat for beat in beats if place.counts(beat.peer, beat.incarnation)]
    there = [beat for beat in voters if beat.head == place.position.head or not _has_parted(beat, place, branch)]
    named = Counter(_state_named_by(beat, place, branch) for beat in there)
    for digest, count in named.most_common(1):
        return digest if 2 * count > len(there) else UNKNOWN_STATE
    return UNKNOWN_STATE if voters else None


def _has_parted(beat: Heartbeat, place: LogState, branch: Branch) -> bool:
    """Return whether a peer is on another branch than this one, as far on as the place at least."""
    head = place.position.head if beat.index == place.position.index else branch.heads.get(beat.index)
    return beat.index >= place.position.index and head not in (None, beat.head)


def _state_named_by(beat: Heartbeat, place: LogState, branch: Branch) -> bytes:
    """Return the state that a peer says it has or had at a place: one that went on from there had what the branch's
    next entry claims."""
    if beat.head == place.position.head:
        return beat.state_digest
    has_gone_on = beat.index > place.position.index and branch.heads.get(beat.index) == beat.head
    return branch.claimed.get(place.position.index, UNKNOWN_STATE) if has_gone_on else UNKNOWN_STATE


def _is_same(asked: Sequence[object], before: Sequence[object]) -> bool:
    """Return whether a question is the one that was asked last: with many peers, the answer takes long to find."""
    if len(asked) != len(before):
        return False
    for one, other in zip(asked, before, strict=True):  # `all` takes twice as long, and this is asked at each event
        if one is not other and not (isinstance(one, frozenset) and one == other):
            return False
    return True


def _inverted(digest: bytes) -> int:
    """Return a number that orders digests the other way round, so that the smaller one wins a tie."""
    return -int.from_bytes(digest, "big")
