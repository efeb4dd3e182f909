"""How a leader finds out who has given members of its attempt different averages.

Of two members whose payloads differ, each has what a reducer has signed to it of the first chunk that differs. Which
chunk that is shows each one from the *marks* of the other one's averages. A leader that is in the round is one of the
two. One that was late for it has none of its averages: it asks two members for their marks, and shows each the other's.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from peers.protocol.effects import Effect, Send
from peers.protocol.judge import Judge
from peers.protocol.messages import Accuse, Begin, Compare, Marked
from peers.protocol.signed_averages import Averaged
from peers.protocol.tally import Tally


class Comparison:
    """Of one attempt with a round."""

    def __init__(self, me: str, begin: Begin, judge: Judge, pause: float) -> None:
        """`pause`: seconds after which a member is asked again."""
        self._me = me
        self._attempt = begin.attempt
        self._round = begin.round
        self._judge = judge
        self._pause = pause
        self._asked_at: dict[str, float] = {}
        self._pair: tuple[str, str] | None = None
        self._marks: dict[str, bytes] = {}
        self._shown: dict[str, Averaged] = {}

    def ask(self, tally: Tally, now: float) -> list[Effect]:
        """Ask for what is still to be seen, each member once in a while."""
        if self._me in self._round.remaining:
            marks = self._judge.marks
            return self._compare(dict.fromkeys(tally.unlike(self._me), marks), now)
        if self._pair is None or not tally.are_unlike(*self._pair):
            self._pair, self._marks, self._shown = tally.pair(self._attempt.number), {}, {}
        if self._pair is None:
            return []
        one, other = self._pair
        asked: dict[str, bytes | None] = {}
        for peer, unlike in ((one, other), (other, one)):
            if peer not in self._marks:
                asked[peer] = None
            elif unlike in self._marks and peer not in self._shown:
                asked[peer] = self._marks[unlike]
        return self._compare(asked, now)

    def _compare(self, marks: Mapping[str, bytes | None], now: float) -> list[Effect]:
        due = [peer for peer in marks if now - self._asked_at.get(peer, -inf) >= self._pause]
        self._asked_at |= dict.fromkeys(due, now)
        return [Send(peer, Compare(attempt=self._attempt, marks=marks[peer])) for peer in due]

    def hear(self, sender: str, marked: Marked, tally: Tally, now: float) -> list[Effect]:
        """One of the two tells its averages from others. With both, each may be asked at once what differs."""
        if self._pair is None or sender not in self._pair or sender in self._marks:
            return []
        self._marks[sender] = marked.marks
        self._asked_at.clear()
        return self.ask(tally, now)

    def convicts(self, sender: str, accuse: Accuse) -> bool:
        """Return whether the accused has signed two averages of a chunk: what is shown, and what we or the other one of
        the two have."""
        shown = accuse.average
        if shown is None or shown.origin.reducer != accuse.accused:
            return False
        if self._pair is not None and sender in self._pair:
            self._shown[sender] = shown
        others = self._shown.values() if self._pair else [self._judge.averaged(shown.chunk)]
        return any(other is not None and self._judge.is_two_averages(self._round, other, shown) for other in others)

    def is_open_to(self, sender: str) -> bool:
        """Return whether this is one of the two, and has shown something: the other one is still to do so, or one of
        them lies, and nobody can tell which."""
        return sender in self._shown
