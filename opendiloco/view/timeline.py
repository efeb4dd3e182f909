"""When a run took its outer steps, as seen from here. The log says nothing of it: clocks differ."""

from __future__ import annotations

import statistics
from typing import NamedTuple

SHOWN = 240
"""Entries that are remembered: the newest."""
USUAL = 20
"""Of which so many say how long one takes."""


class Span(NamedTuple):
    """An entry that was made at `at`, seconds since the epoch; `seconds` after the one before, of which
    `round_seconds` were its round's. None: not seen from here."""

    at: float
    seconds: float | None
    round_seconds: float | None
    present: int
    """Peers that worked on it."""


class Timeline:
    """Made from what most peers say, each time that somebody looks: as exact as looks are frequent."""

    def __init__(self) -> None:
        self.spans: dict[int, Span] = {}
        """By the index of the entry."""
        self._step: int | None = None
        self._since: float | None = None  # when the present outer step was seen to begin
        self._round_since: float | None = None

    @property
    def usual_seconds(self) -> float | None:
        """Return how long an outer step takes, as the newest did."""
        known = [span.seconds for span in list(self.spans.values())[-USUAL:] if span.seconds is not None]
        return statistics.median(known) if known else None

    def observe(self, outer_step: int, is_averaging: bool, present: int, at: float) -> None:
        """Note that most peers have taken so many outer steps, and whether a round is under way for the next one."""
        if self._step is not None and outer_step > self._step:
            is_next = outer_step == self._step + 1
            seconds = at - self._since if is_next and self._since is not None else None
            in_round = at - self._round_since if is_next and self._round_since is not None else None
            self.spans[outer_step - 1] = Span(at, seconds, in_round, present)
            while len(self.spans) > SHOWN:
                del self.spans[next(iter(self.spans))]
        if outer_step != self._step:
            is_first_look = self._step is None
            if self._step is not None and outer_step < self._step:  # another lineage, or a liar
                self.spans = {index: span for index, span in self.spans.items() if index < outer_step}
            self._step, self._round_since = outer_step, None
            self._since = None if is_first_look else at
        if is_averaging and self._round_since is None:
            self._round_since = at
