"""What a peer says of itself: rarely the whole heartbeat where there are many peers, and a sign of life each time."""

from __future__ import annotations

from typing import Any

from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.life_signs import SLOTS
from peers.presence.voice import CALM, URGENT, Pace
from tests.peers.presence.whispers import Clock, Whisperer


class Speaker:
    def __init__(self, others: int) -> None:
        self.clock = Clock()
        self.one = Whisperer(self.clock)
        self.others = others
        self.sequences: list[int] = []

    def says_whole(self, after: float = 2.0, is_whole: bool = False, **changes: Any) -> bool:
        self.clock.now += after
        pace = Pace(self.others, is_whole)
        signed, _ = self.one.voice.say(self.one.heartbeat(**changes), pace, self.clock.now)
        if signed is not None:
            self.sequences.append(Heartbeat.verify(signed).sequence)
        return signed is not None


def test_among_few_each_is_a_whole_heartbeat() -> None:
    speaker = Speaker(others=30)
    assert all(speaker.says_whole() for _ in range(300))
    assert speaker.sequences == sorted(set(speaker.sequences))


def test_among_many_whole_ones_are_rare() -> None:
    speaker = Speaker(others=1000)
    wholes = [speaker.says_whole(inner_step=step) for step in range(100)]
    paced = 1 + int(200 / (CALM * 1000))
    assert paced <= sum(wholes) <= paced + 3, "and one for each new chain"


def test_what_others_act_upon_is_said_sooner_and_a_farewell_at_once() -> None:
    speaker = Speaker(others=1000)
    assert speaker.says_whole()
    changed = [speaker.says_whole(state=PeerState.READY) for _ in range(4)]
    assert changed == [False, False, False, True]
    assert 6.0 < URGENT * 1000 <= 8.0
    assert speaker.says_whole(0.1, state=PeerState.LEAVING)


def test_a_whole_one_can_be_asked_for() -> None:
    speaker = Speaker(others=1000)
    assert speaker.says_whole()
    assert not speaker.says_whole()
    assert speaker.says_whole(is_whole=True)


def test_signs_of_life_come_at_each_beat_and_among_a_thousand_at_each_other() -> None:
    for others, signs in ((100, 20), (600, 20), (1000, 10), (5000, 10)):
        clock = Clock()
        one = Whisperer(clock)
        for _ in range(21):
            one.say(Pace(others))
            clock.now += 2.0
        assert abs(len(one.signs) - signs) <= 1


def test_signs_of_life_go_on_when_a_chain_ends() -> None:
    clock = Clock()
    one, listener = Whisperer(clock).say(), Whisperer(clock).say()
    for _ in range(3 * SLOTS):
        clock.now += 2.0
        one.say(Pace(others=100_000))
        one.tells(listener)
        before = listener.knows()[one.name].sequence
        assert abs(before / 1000 - clock.wall) < 3.0


def test_when_the_clock_is_set_forward_a_new_chain_begins() -> None:
    """Regression: the old chain was behind the clock, and its signs told nobody anything until it was used up."""
    clock = Clock()
    one, listener = Whisperer(clock).say(), Whisperer(clock).say()
    one.tells(listener)
    ahead = 30_000
    for _ in range(8):
        clock.now += 2.0
        one.say(Pace(others=500), sequence=int(clock.wall * 1000) + ahead)
        one.tells(listener)
        assert listener.gossip.silences(clock.now)[one.name] == 0.0
