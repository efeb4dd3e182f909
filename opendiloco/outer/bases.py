"""What pseudo-gradients are taken from: theta of each fragment, as it was when the work on it began."""

from __future__ import annotations

from opendiloco.outer.state import OuterState
from opendiloco.shared_memory import Vector


class Bases:
    """Work on a fragment begins with its theta, which mostly stays so until the work is encoded.

    A copy is made only where an outer step is taken before: one that others have made without us. In a run that streams
    work may go on from what is encoded, where nothing comes of that: `outlives_encoding`.
    """

    def __init__(self, state: OuterState, outlives_encoding: bool = False) -> None:
        self._state = state
        self._outlives_encoding = outlives_encoding
        self._copies: list[Vector | None] = [None] * len(state.fragments)
        self._is_needed = [True] * len(state.fragments)  # until what has been trained is encoded

    def of(self, fragment: int) -> Vector:
        """Return the theta that work on this fragment has begun with."""
        copy = self._copies[fragment]
        return self._state.theta[self._state.fragments[fragment]] if copy is None else copy

    def begin(self, fragment: int) -> None:
        """Have work on a fragment begin, or go on, with its present theta."""
        self._copies[fragment], self._is_needed[fragment] = None, True

    def begin_all(self) -> None:
        for fragment in range(len(self._copies)):
            self.begin(fragment)

    def encoded(self, fragment: int) -> None:
        """What has been trained of a fragment is encoded: mostly nobody asks for its base any more."""
        if not self._outlives_encoding:
            self._copies[fragment], self._is_needed[fragment] = None, False

    def keep(self, fragment: int) -> None:
        """Keep a fragment's base: its theta is about to change."""
        if self._copies[fragment] is None and self._is_needed[fragment]:
            self._copies[fragment] = self.of(fragment).copy()

    def drop(self, fragment: int) -> None:
        """No work on a fragment goes on, if there was any: its next begins with the theta of then."""
        self._copies[fragment] = None
