"""For how long a member that is ready waits for its leader to begin."""

from __future__ import annotations

from collections import Counter, defaultdict

from peers.log.state import LogState
from peers.presence.election import quorum
from peers.presence.presence import Presence
from peers.protocol.desk import Desk
from peers.protocol.rounds import Attempt

ATTEMPTS = 5
"""How many attempts a leader may end at one position before its members turn to another."""


class Patience:
    """Of one slot. A leader may wait for those at work, but not for ever; when most are ready, it has to begin.

    Whoever comes back to a leader that it gave up waits twice as long for it. Else peers that give up at different
    times could go round from leader to leader for ever, and never be with one of them all at once.
    """

    def __init__(self, desk: Desk, presence: Presence, log: LogState) -> None:
        self._desk = desk
        self._presence = presence
        self._log = log
        self._since = self._gathered_at = desk.now
        self._given_up: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._led_for = defaultdict[str, float](float)  # seconds in attempts of each, since it was trusted last
        self._joined: tuple[str, float] | None = None  # whose attempt we are in, and since when
        self._spent = set[str]()  # those of them that we have given up
        self._is_given_up = False
        self._declined: Attempt | None = None
        self._declined_at = desk.now

    def begin(self) -> None:
        """Somebody is asked, or another one, to begin."""
        self._since = self._gathered_at = self._desk.now
        self._is_given_up = False
        self._declined = None

    def turn_away(self, leader: str | None) -> None:
        """Most are for another one from now on. Whoever goes with them gives this leader up, too: else it would go back
        as soon as votes are split."""
        has_waited = self._desk.now - self._since > self._desk.schedule.begin(everyone_is_ready=True) / 2
        if leader not in (None, self._desk.me) and leader == self._presence.vote and has_waited:
            self._presence.distrust(leader, self._desk.now - self._since)
        self.begin()

    def join(self, leader: str, seconds: float) -> float:
        """We take part in an attempt of the leader, which it ends after so many seconds. Returns when to give it up.

        All its attempts here together get no more time than the longest one: else it could begin one after another, and
        those who have given it up would begin with it anew. Whoever leads next goes on with the same round.
        """
        self._declined = None
        now, schedule = self._desk.now, self._desk.schedule
        self.leave()
        if leader in self._spent and leader not in self._presence.distrusted:
            self._spent.discard(leader)
            self._led_for.pop(leader, None)
        self._joined = leader, now
        left = schedule.given_up(schedule.longest_attempt) - self._led_for[leader]
        return now + min(schedule.given_up(seconds), left)

    def leave(self) -> None:
        """We are in no attempt any more. Between attempts a leader has the time in which it must begin."""
        if self._joined is not None:
            leader, since = self._joined
            self._led_for[leader] += self._desk.now - since
            self._joined = None

    def give_up(self, leader: str | None) -> None:
        """We are for another one from now on, though most may not be, yet; we never give up on ourselves."""
        self.leave()
        if leader is None or leader == self._desk.me:
            self._led_for.pop(self._desk.me, None)
            self._presence.trust_all()
            return self.begin()
        self._spent.add(leader)
        self._given_up[leader] += not self._is_given_up
        self._is_given_up = True
        self._presence.distrust(leader, max(self._led_for[leader], self._desk.now - self._since))

    def attempt_ended(self, leader: str, is_mute: bool) -> None:
        """The leader has ended an attempt. One that does so again and again may never come to an entry: what it lacks
        itself, or refuses to give, it blames on nobody. So one that `is_mute`, and gives nothing that it owes, is given
        up sooner; at once if it was given up here before."""
        mute = ATTEMPTS if self._given_up[leader] else ATTEMPTS // 2 + 1
        self._ended[leader] += mute if is_mute else 1
        if self._ended[leader] >= ATTEMPTS:
            self._ended[leader] = 0
            self.give_up(leader)

    def decline(self, attempt: Attempt) -> bool:
        """What a leader hands on is not taken over here. Returns whether it is the first time in this attempt.

        It may have seen fewer than we do for a moment. If it goes on, in this attempt or in others, those of whom it
        does not hear have another leader, and we follow that one: else there would be two that both wait for each
        other's members.
        """
        known, self._declined = self._declined, attempt
        if known is None or known.leader != attempt.leader:
            self._declined_at = self._desk.now
        return attempt != known

    def is_over(self, leader: str | None) -> bool:
        """Whether the leader could have begun long ago, or has waited for those at work for longer than it may."""
        now, schedule, times = self._desk.now, self._desk.schedule, 1 << self._given_up[leader or ""]
        if not self._are_most_ready():
            self._gathered_at = now
        if self._is_given_up or (self._declined is not None and now - self._declined_at > schedule.death):
            return True
        overdue = now - max(self._gathered_at, self._since) > times * schedule.begin(everyone_is_ready=True)
        return overdue or now - self._since > times * schedule.begin(everyone_is_ready=False)

    def _are_most_ready(self) -> bool:
        ready = {self._desk.me, *self._presence.live().ready}
        if not self._log.roster:
            return len(ready) >= self._desk.settings.minimum_peers
        return quorum(self._log.voters, self._presence.membership.departed(self._log), ready)
