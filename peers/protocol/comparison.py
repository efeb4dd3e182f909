"""How a leader finds out who has given members of its attempt different averages.

Of two members whose payloads differ, each has what a reducer has signed to it of the first chunk that differs. Which
chunk that is shows each one from the *marks* of the other one's averages. A leader that is in the round is one of the
two. One that was late for it has none of its averages: it asks two members for their marks, and shows each the other's.
One of the two may be the liar, and show what it likes: so after a while it asks two others.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from peers.protocol.effects import Effect, Send
from peers.protocol.judge import Judge
from peers.protocol.messages import Accuse, Begin, Compare, Marked
from peers.protocol.signed_averages import Averaged
from peers.protocol.tally import Tally

PATIENCE = 3
"""Times that two members are asked until two others are."""


class Comparison:
    """Of one attempt with a round."""

    def __init__(self, me: str, begin: Begin, judge: Judge, pause: float) -> None:
        """`pause`: seconds after which a member is asked again."""
        self._attempt = begin.attempt
        self._round = begin.round
        self._is_late = me not in begin.round.remaining
        self._me = me
        self._judge = judge
        self._pause = pause
        self._asked_at: dict[tuple[str, bytes | None], float] = {}  # who was asked, and shown which marks
        self._pair: tuple[str, str] | None = None
        self._since = -inf
        self._turn = begin.attempt.number
        self._marks: dict[str, bytes] = {}
        self._shown: dict[str, Averaged] = {}
        self._have_answered = set[str]()  # of the two

    def ask(self, tally: Tally, now: float) -> list[Effect]:
        """Ask for what is still to be seen, each member once in a while."""
        if not self._is_late:
            others = tally.unlike(self._me)
            if others and self._me not in self._marks:
                self._marks[self._me] = self._judge.marks  # once: it takes long, and this is asked at each message
            return self._compare(dict.fromkeys(others, self._marks.get(self._me)), now)
        had_time = now - self._since >= PATIENCE * self._pause
        if self._pair is None or had_time or not tally.are_unlike(*self._pair):
            self._pair, self._since = tally.pair(self._turn), now
            self._turn += 1
            self._have_answered.clear()
        if self._pair is None:
            return []
        one, other = self._pair
        asked: dict[str, bytes | None] = {}
        for peer, unlike in ((one, other), (other, one)):
            if peer not in self._marks:
                asked[peer] = None
            elif unlike in self._marks and peer not in self._have_answered:
                asked[peer] = self._marks[unlike]
        return self._compare(asked, now)

    def _compare(self, marks: Mapping[str, bytes | None], now: float) -> list[Effect]:
        due = {asked: now for asked in marks.items() if now - self._asked_at.get(asked, -inf) >= self._pause}
        self._asked_at |= due
        return [Send(peer, Compare(attempt=self._attempt, marks=shown)) for peer, shown in due]

    def hear(self, sender: str, marked: Marked, tally: Tally, now: float) -> list[Effect]:
        """A member tells its averages from others. With both, each may be asked at once what differs."""
        if (sender, None) not in self._asked_at or sender in self._marks:
            return []
        self._marks[sender] = marked.marks
        return self.ask(tally, now)

    def convicts(self, sender: str, accuse: Accuse) -> bool:
        """Return whether the accused has signed two averages of a chunk: what is shown, and what we have, or others
        have shown."""
        shown = accuse.average
        if shown is None or shown.origin.reducer != accuse.accused:
            return False
        others = [*self._shown.values()] if self._is_late else [self._judge.averaged(shown.chunk)]
        if self.has_asked(sender, accuse):
            self._shown[sender] = shown
            self._have_answered.add(sender)
        return any(other is not None and self._judge.is_two_averages(self._round, other, shown) for other in others)

    def has_asked(self, sender: str, accuse: Accuse) -> bool:
        """Return whether a late leader has asked the sender for what it shows. It is not to blame where that fits
        nothing: another one may lie, or be still to answer, and others may be asked by then."""
        return self._is_late and accuse.average is not None and (sender, None) in self._asked_at
