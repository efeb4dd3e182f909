"""What the members of an attempt say has come of it, as its leader hears."""

from __future__ import annotations

from collections.abc import Collection
from math import inf, lcm

from peers.protocol.messages import Complete, Result, Told


class Tally:
    """Of one attempt."""

    def __init__(self) -> None:
        self.complete: dict[str, Complete] = {}
        """Who has signed what it says."""
        self.differing_since = inf
        """When members were first heard to say different things, if they still do."""
        self._said: dict[str, Result] = {}
        self._sayers: dict[Result, dict[str, None]] = {}  # in a large round asked for at each of a thousand messages
        self._waiting: dict[str, tuple[float, tuple[str, ...]]] = {}  # when each said so last, and for whom

    def hear(self, sender: str, said: Told, now: float) -> bool:
        """Take in what a member says. Returns whether it is its first word."""
        is_first = sender not in self._said
        if isinstance(said, Complete):
            self.complete[sender] = said
        if isinstance(said, Complete) or sender not in self.complete:
            self._note(sender, said.outcome)
        self.differing_since = min(self.differing_since, now) if len(self._sayers) > 1 else inf
        return is_first

    def _note(self, sender: str, outcome: Result) -> None:
        before = self._said.get(sender)
        if before is not None:
            del self._sayers[before][sender]
            if not self._sayers[before]:
                del self._sayers[before]
        self._said[sender] = outcome
        self._sayers.setdefault(outcome, {})[sender] = None

    def waits(self, sender: str, missing: tuple[str, ...], now: float) -> None:
        """A member still needs something from these."""
        self._waiting[sender] = now, missing

    def waiting(self, since: float) -> dict[str, tuple[str, ...]]:
        """Return for whom members wait that have said so since then."""
        return {peer: missing for peer, (said_at, missing) in self._waiting.items() if said_at > since}

    def is_complete(self, members: Collection[str]) -> bool:
        """Return whether all members have signed."""
        return len(self.complete) >= len(members)

    def have_spoken(self, members: Collection[str]) -> bool:
        """Return whether all members have said what they have."""
        return len(self._said) >= len(members)

    @property
    def differing(self) -> list[str]:
        """Those who say something else than most do."""
        return self._others_than(self._usual) if len(self._sayers) > 1 else []

    @property
    def _usual(self) -> Result:
        return max(self._sayers, key=lambda outcome: len(self._sayers[outcome]))

    def _others_than(self, outcome: Result) -> list[str]:
        return [peer for other, peers in self._sayers.items() if other != outcome for peer in peers]

    def unlike(self, member: str) -> list[str]:
        """Return those who say something else than this member, if that has said anything."""
        return self._others_than(self._said[member]) if member in self._said else []

    def are_unlike(self, one: str, other: str) -> bool:
        """Return whether both have spoken, and say different things."""
        said = [self._said[peer] for peer in (one, other) if peer in self._said]
        return len(said) == 2 and said[0] != said[1]

    def pair(self, turn: int) -> tuple[str, str] | None:
        """Return one that says what most do, and one that says something else, others in each turn, and each with each
        in the end; None: all agree."""
        differing = self.differing
        if not differing:
            return None
        usual = list(self._sayers[self._usual])
        shift = turn // lcm(len(usual), len(differing))
        return usual[turn % len(usual)], differing[(turn + shift) % len(differing)]
