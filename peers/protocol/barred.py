"""Those who say that they are ready and are left out, since they held an attempt up; and their pardons.

A bar keeps whoever holds attempts up from doing so again while others can go on without it. Where they can't, to wait
for its end helps nobody: so then it is taken in all the same. That is done a few times at one position only, since one
that holds up every attempt would keep the others from going on as a minority.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping

from peers.protocol.messages import Ready

PARDONS = 3
"""How often one peer is taken in at a position, though it is barred. Before the first entry all may be needed: ever."""


class Barred:
    """Of one position, as its leader knows."""

    def __init__(self, may_be_needed_ever: bool) -> None:
        self.ready: dict[str, Ready] = {}
        """What those say that are left out."""
        self.pardoned = dict[str, Ready]()
        """What those said that are not left out of the attempt that may begin now."""
        self._since: dict[str, float] = {}
        self._times = Counter[str]()
        self._limit = math.inf if may_be_needed_ever else PARDONS

    def says_ready(self, peer: str, ready: Ready, now: float) -> None:
        self.ready[peer] = ready
        self._since.setdefault(peer, now)

    def hopeful(self) -> dict[str, Ready]:
        """Return those who may be pardoned once more, and what they say."""
        return {peer: said for peer, said in self.ready.items() if self._times[peer] < self._limit}

    @property
    def hopeful_since(self) -> float:
        """Since when all of these have been ready: those who are late otherwise are waited for from then on."""
        return max((self._since[peer] for peer in self.hopeful()), default=-math.inf)

    def pardon(self) -> dict[str, Ready]:
        """Return those who are taken in, and what they say."""
        self.pardoned = self.hopeful()
        for peer in self.pardoned:
            del self.ready[peer]
        return self.pardoned

    def attempt_begins(self, members: Collection[str]) -> None:
        """A pardon is for one attempt."""
        self._times.update(self.pardoned.keys() & set(members))
        self.pardoned = {}

    def take_back(self, admitted: Collection[str]) -> list[str]:
        """Return those who were taken in for an attempt that did not begin: others may come that need them not. Who was
        not `admitted` has had its answer, and has to say Ready again."""
        taken_back = {peer: said for peer, said in self.pardoned.items() if peer in admitted}
        self.ready, self.pardoned = taken_back | self.ready, {}
        return list(taken_back)

    def forget(self, starts: Mapping[str, int]) -> None:
        """Whoever lives as another start has said something else, or says so soon."""
        self.ready = {peer: said for peer, said in self.ready.items() if starts.get(peer) == said.incarnation}
