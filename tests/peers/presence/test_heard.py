"""What a peer remembers of others: proven, newest, and bounded."""

from __future__ import annotations

import pytest

from peers.errors import RemoteProtocolError
from peers.presence import heard as module
from peers.presence.heard import CLOCK_TOLERANCE, HEARTBEATS_AT_ONCE, Heard, Word
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.voice import Pace
from tests.peers.presence.whispers import LARGE, RUN, Clock, Whisperer

TELLER = "teller"


class Listener:
    def __init__(self) -> None:
        self.clock = Clock()
        self.heard = Heard(RUN, 0)
        self.one = Whisperer(self.clock)

    def take(self, signed: bytes, slots: int = 0, link: bytes = b"") -> bool:
        word = self.heard.word_of(signed, slots, link, TELLER, self.clock.now)
        return self.heard.take(word, self.clock.wall)

    def confirm(self, at: int = -1, **changes: int | bytes) -> bool:
        sign = self.one.signs[at]._replace(**changes)  # type: ignore[arg-type]
        return self.heard.confirm(sign, TELLER, self.clock.now, self.clock.wall)

    def says_after(self, seconds: float) -> None:
        self.clock.now += seconds
        self.one.say(LARGE)

    @property
    def silence(self) -> float:
        word = self.heard.get(self.one.name)
        assert word is not None
        return self.clock.now - word.at


@pytest.fixture
def listener() -> Listener:
    listener = Listener()
    assert listener.take(listener.one.say().signed)
    return listener


def test_a_sign_of_life_is_as_good_as_a_heartbeat(listener: Listener) -> None:
    before = listener.heard.get(listener.one.name)
    assert before is not None
    first = before.newest.sequence
    listener.says_after(8.0)
    assert listener.confirm()
    assert listener.silence == 0.0
    assert before.newest.sequence == first + 8000


def test_what_was_heard_before_keeps_nobody_alive(listener: Listener) -> None:
    for _ in range(3):
        listener.says_after(4.0)
    assert listener.confirm()
    listener.clock.now += 5.0
    assert not any(listener.confirm(at) for at in (-1, -2, -3))
    assert not listener.take(listener.one.signed)
    assert listener.silence == 5.0


def test_a_sign_that_is_not_its_owners_is_refused(listener: Listener) -> None:
    listener.says_after(4.0)
    with pytest.raises(RemoteProtocolError, match="not its owner's"):
        listener.confirm(link=bytes(12))
    with pytest.raises(RemoteProtocolError, match="not its owner's"):
        listener.confirm(slots=200)
    with pytest.raises(KeyError):
        listener.confirm(tag=bytes(8))
    stranger = Whisperer(listener.clock).say()
    listener.clock.now += 2.0
    stranger.say(LARGE)
    with pytest.raises(RemoteProtocolError, match="does not lead to the seal"):
        listener.take(stranger.signed, 4, listener.one.signs[-1].link)


def test_a_heartbeat_comes_with_its_newest_sign(listener: Listener) -> None:
    other = Whisperer(listener.clock).say()
    listener.clock.now += 30.0
    other.say(LARGE)
    assert listener.take(other.signed, other.signs[-1].slots, other.signs[-1].link)
    word = listener.heard.get(other.name)
    assert word is not None
    assert word.newest.sequence == Heartbeat.verify(other.signed).sequence + 30_000


def test_a_heartbeat_that_is_known_may_bring_a_newer_sign(listener: Listener) -> None:
    """Regression: it was dropped, and with it the sign, which nobody told again."""
    listener.says_after(6.0)
    assert listener.take(listener.one.signed, listener.one.signs[-1].slots, listener.one.signs[-1].link)
    assert listener.silence == 0.0
    assert not listener.confirm()


def test_an_older_heartbeat_than_its_life_sign_is_news_but_no_life(listener: Listener) -> None:
    """The heartbeat may come later than a sign of life that was given after it."""
    listener.clock.now += 1.0
    listener.one.say(index=9)
    listener.says_after(4.0)
    assert listener.confirm()
    listener.clock.now += 3.0
    assert listener.take(listener.one.signed)
    assert listener.silence == 3.0
    word = listener.heard.get(listener.one.name)
    assert word is not None
    assert word.newest.index == 9


def test_a_peer_that_starts_again_is_believed(listener: Listener) -> None:
    listener.says_after(6.0)
    assert listener.confirm()
    listener.clock.now += 1.0
    again = Whisperer(listener.clock, listener.one.identity).say(state=PeerState.JOINING)
    assert listener.take(again.signed)
    assert not listener.take(listener.one.signed), "its former life is over"
    with pytest.raises(KeyError):
        listener.confirm()


def test_neither_the_far_future_nor_the_far_past_is_believed(listener: Listener) -> None:
    ahead, behind = (Whisperer(listener.clock) for _ in range(2))
    wall = listener.clock.wall * 1000
    assert not listener.take(ahead.say(sequence=int(wall + 1000 * (CLOCK_TOLERANCE + 1))).signed)
    assert not listener.take(behind.say(sequence=int(wall - 1000 * (CLOCK_TOLERANCE + 21))).signed)
    slow = Whisperer(listener.clock).say(sequence=int(wall - 1000 * CLOCK_TOLERANCE))
    assert listener.take(slow.signed)


def test_signs_that_were_held_back_are_worth_nothing_after_a_while(listener: Listener) -> None:
    """Whoever alone heard a peer's last signs can't keep it alive with them one by one."""
    for _ in range(10):
        listener.says_after(4.0)
    listener.clock.now += CLOCK_TOLERANCE + 21.0
    assert not any(listener.confirm(at) for at in range(10))


def test_who_talks_without_end_is_heard_now_and_then(listener: Listener) -> None:
    taken = 0
    for sequence in range(1, 1001):
        listener.clock.now += 0.01
        taken += listener.take(listener.one.say(index=sequence).signed)
    assert taken <= HEARTBEATS_AT_ONCE + 10.0 / module.SECONDS_PER_HEARTBEAT
    assert listener.take(listener.one.say(state=PeerState.LEAVING).signed), "but always its farewell"


def test_where_there_are_many_whoever_gives_signs_all_the_time_is_heard_now_and_then(listener: Listener) -> None:
    """Each sign that is news is told on by everybody."""
    for _ in range(999):
        other = Whisperer(listener.clock)
        listener.heard._words[other.name] = Word.__new__(Word)
    taken, silence = 0, 0.0
    for _ in range(60):
        listener.clock.now += 0.5
        listener.one.say(Pace(others=0))
        taken += listener.confirm()
        silence = max(silence, listener.silence)
    assert taken <= 30.0 / (0.003 * 1000) * module.HASTE + 1
    assert silence <= 1.0


def test_a_large_heartbeat_counts_as_several(listener: Listener) -> None:
    taken = 0
    for sequence in range(1, 21):
        listener.clock.now += 0.5
        taken += listener.take(listener.one.say(index=sequence, addresses=("/ip4/" + "1" * 250,) * 8).signed)
    assert 4 <= taken <= 10


def test_no_more_peers_are_remembered_than_there_is_room_for(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PEERS_LIMIT", 5)
    for _ in range(10):
        listener.take(Whisperer(listener.clock).say().signed)
    assert len(listener.heard) == 5
    listener.clock.now += CLOCK_TOLERANCE + 21.0
    assert listener.take(Whisperer(listener.clock).say().signed), "those of long ago make room"
    assert len(listener.heard) == 1


def test_whoever_is_silent_is_told_to_nobody_and_yet_not_forgotten(listener: Listener) -> None:
    """If it were, others could tell us of it as of a new peer, and we them, for ever."""
    listener.clock.now += 21.0
    assert list(listener.heard.fresh(listener.clock.now)) == []
    assert listener.heard.after(0, listener.clock.now, 10) == []
    assert not listener.take(listener.one.signed)


def test_what_is_new_since_a_serial(listener: Listener) -> None:
    others = [Whisperer(listener.clock).say() for _ in range(3)]
    for other in others:
        listener.take(other.signed)
    serial = listener.heard.serial
    listener.says_after(2.0)
    listener.confirm()
    newer = listener.heard.after(serial, listener.clock.now, 10)
    assert [word.heartbeat.peer for word in newer] == [listener.one.name]
    oldest = listener.heard.after(0, listener.clock.now, 2)
    assert [word.heartbeat.peer for word in oldest] == [others[0].name, others[1].name]
