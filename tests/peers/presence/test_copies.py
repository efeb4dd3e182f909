"""A key copied into two machines is noticed; a former life of one's own is not taken for a copy, whatever its clock."""

from __future__ import annotations

import pytest

from peers.presence.copies import LIVES_LIMIT, SILENCE_SHARE, Copies
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.values.identity import Identity
from tests.peers.presence.beaters import Beater, Clock
from tests.peers.presence.test_heartbeat import heartbeat

LIFETIME = 20.0
SILENCE = SILENCE_SHARE * LIFETIME
OTHER_CLOCKS = [0.0, -86400.0, 59.0, 86400.0 * 365]
"""How far the clock of the other machine, or of the other life, is ahead, in seconds."""


def said(seconds: float, incarnation: int = 1, state: PeerState = PeerState.TRAINING) -> Heartbeat:
    sequence = 1_700_000_000_000 + int(1000 * seconds)
    return heartbeat(sequence=sequence, incarnation=incarnation, lifetime=LIFETIME, state=state)


class TestListening:
    """At a start, before anything is said."""

    def test_nothing_heard(self) -> None:
        copies = Copies()
        assert not copies.may_live(0.0)
        assert copies.living(0.0) is None
        assert copies.highest == 0

    @pytest.mark.parametrize("ahead", OTHER_CLOCKS)
    def test_a_former_life_ends(self, ahead: float) -> None:
        """Its heartbeats arrive from here and there, the newest not first, and older ones again."""
        copies = Copies()
        for at, second in ((0.0, -19.0), (1.0, -8.0), (1.5, -12.0), (3.0, 0.0), (6.0, -2.0)):
            copies.hear(said(ahead + second), at)
        assert copies.may_live(3.0 + SILENCE)
        assert not copies.may_live(3.1 + SILENCE)
        assert copies.living(3.0 + SILENCE) is None
        assert copies.highest == said(ahead).sequence, "what we say comes after it, whatever our clock says"

    def test_what_was_on_its_way_for_long_is_no_sign_of_life(self) -> None:
        """The DHT may have a heartbeat that is as old as its lifetime, and a peer the last one, later."""
        copies = Copies()
        copies.hear(said(-20.0), 0.0)
        copies.hear(said(0.0), 13.0)
        assert copies.living(13.0) is None
        assert not copies.may_live(13.1 + SILENCE)

    @pytest.mark.parametrize("ahead", OTHER_CLOCKS)
    def test_another_machine_goes_on(self, ahead: float) -> None:
        copies = Copies()
        for second in range(0, 40, 2):
            copies.hear(said(ahead + second), float(second))
            assert copies.may_live(float(second))
            assert (copies.living(float(second)) is not None) == (second > SILENCE + LIFETIME)
        assert copies.living(100.0) is None, "it has gone since"

    def test_one_that_has_left_is_not_waited_for(self) -> None:
        copies = Copies()
        copies.hear(said(0.0), 0.0)
        copies.hear(said(1.0, state=PeerState.LEAVING), 1.0)
        assert not copies.may_live(1.0)

    def test_what_we_say_ourselves_is_no_copy(self) -> None:
        copies = Copies()
        copies.ours = (5, 0)
        for second in range(0, 60, 2):
            copies.hear(said(float(second), incarnation=5), float(second))
        assert (copies.living(60.0), copies.highest) == (None, 0)

    def test_no_more_lives_are_remembered_than_one_has(self) -> None:
        copies = Copies()
        for incarnation in range(1000):
            copies.hear(said(0.0, incarnation), 0.0)
        assert len(copies._lives) == LIVES_LIMIT


class TestBeats:
    """Peers tell each sender of a heartbeat, and whoever asks, what they have of its own key."""

    def trio(self) -> tuple[Clock, Beater, Beater, Beater]:
        clock, key = Clock(), Identity.generate()
        return clock, Beater(clock, key), Beater(clock, key), Beater(clock)

    def test_a_newcomer_with_the_key_of_another_hears_it_go_on(self) -> None:
        clock, first, newcomer, friend = self.trio()
        friend.say()
        for _ in range(25):
            clock.now += 2.0
            first.finds(friend.say())
            first.say(incarnation=1).tells(friend)
            newcomer.finds(friend).asks(friend)
            assert newcomer.beats.copies.may_live(clock.now)
        other = newcomer.beats.copies.living(clock.now)
        assert other is not None
        assert other.incarnation == 1
        assert first.beats.copies.living(clock.now) is None, "it has said nothing that others could hear"

    def test_two_that_began_at_once_hear_of_each_other(self) -> None:
        clock, first, second, friend = self.trio()
        friend.say()
        for _ in range(25):
            for incarnation, one in ((1, first), (2, second)):
                clock.now += 1.0
                one.finds(friend.say())
                one.say(incarnation=incarnation).tells(friend)
        found = [one.beats.copies.living(clock.now) for one in (first, second)]
        assert [one.incarnation if one else None for one in found] == [2, 1]

    def test_whoever_comes_back_is_told_of_its_former_life_and_speaks_after_it(self) -> None:
        """Regression: with a clock that was ahead before, its heartbeats were old news to all others."""
        clock, before, back, friend = self.trio()
        ahead = int(clock.wall * 1000) + 30_000
        before.finds(friend.say())
        before.say(incarnation=1, sequence=ahead).tells(friend)
        back.finds(friend).asks(friend)
        assert back.beats.copies.highest == ahead
        clock.now += 1.0
        back.say(sequence=back.beats.copies.highest + 1, incarnation=2, index=7).tells(friend)
        assert friend.knows()[back.name].incarnation == 2
