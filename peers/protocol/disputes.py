"""Pairs of members that can exchange nothing in the running attempt, as either of the two says.

Their links may have broken, or one of them gives the other what is of no use, or says so: nobody else can know. So a
leader plans the round anew, so that they need not talk; but a member at odds with most others is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from peers.log.settings import Timing


class Disputes:
    """Of one attempt."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._since: dict[tuple[str, str], float] = {}  # pairs, as the first of the two says
        self._said: dict[str, frozenset[str]] = {}  # what each says now
        self._heard: dict[str, float] = {}  # when members last spoke of the attempt

    def heard(self, member: str, now: float) -> None:
        self._heard[member] = now

    def says(self, member: str, others: Iterable[str], now: float) -> None:
        """With these the member can exchange nothing."""
        before, self._said[member] = self._said.get(member, frozenset()), frozenset(others) - {member}
        for other in before - self._said[member]:
            del self._since[member, other]
        for other in self._said[member]:
            self._since.setdefault((member, other), now)

    def has_lasted(self, member: str, other: str, now: float) -> bool:
        """Whether a pair has been unable to talk for as long as it takes to see that one of the two is dead, and the
        other one has spoken meanwhile. Heartbeats alone do not tell: they count for as long, and a little more."""
        since = self._since[member, other]
        has_been_heard = self._heard.get(other, 0.0) > since + self._timing.heartbeat
        return has_been_heard and now - since >= self._timing.heartbeat_expiry

    def outcasts(self, members: Collection[str]) -> set[str]:
        """Return those who can exchange nothing with more than half of the other members, and with two at least."""
        at_odds: dict[str, set[str]] = {member: set() for member in members}
        for member, others in self._said.items():
            for other in others & at_odds.keys():
                if member in at_odds:
                    at_odds[member].add(other)
                    at_odds[other].add(member)
        most = max(2.0, len(members) / 2)
        return {member for member, others in at_odds.items() if len(others) >= most}
