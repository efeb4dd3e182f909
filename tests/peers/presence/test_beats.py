"""Beats: what a peer hears itself counts, a stranger's cost nothing, and nobody speaks for another."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.errors import RemoteProtocolError
from peers.presence.beats import REFRESH_SHARE, WHO_BURST, Call
from peers.presence.calls import (
    BEAT,
    BEAT_BYTES,
    HEARTBEAT,
    KNOWN_LIMIT,
    NOTHING_TO_SAY,
    PAGE,
    REQUEST_BYTES,
    SHORT,
    Answer,
    Beat,
    Page,
    Request,
    tag_of,
)
from peers.presence.heartbeat import SIZE_LIMIT, PeerState
from peers.presence.heartbeat_store import HEARTBEATS_AT_ONCE
from peers.values.identity import Identity
from peers.values.wire import MESSAGE_LIMIT, PROTOCOL_VERSION, pack, unpack
from tests.peers.presence.beaters import LIFETIME, RUN, Beater, Clock, couple

MOST = 2**62 - 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


def beat_of(beater: Beater, **changes: Any) -> Beat:
    return Beat.of(beater.heartbeat(**changes))


class TestWords:
    """What goes over the wire."""

    def test_a_beat_is_short(self, clock: Clock) -> None:
        numbers = dict.fromkeys(("sequence", "incarnation", "index", "view", "inner_step"), MOST)
        for state in PeerState:
            beat = beat_of(Beater(clock), state=state, speed=1e300, head=bytes(range(32)), **numbers)
            assert len(pack(beat)) <= BEAT_BYTES
            assert unpack(Beat, pack(beat)) == beat
        assert len(pack(beat_of(Beater(clock)))) <= 60

    def test_the_largest_of_each_fit_into_a_message(self, clock: Clock) -> None:
        beat = beat_of(Beater(clock))
        assert len(pack(Answer(wants=True, beat=beat, heartbeats=(bytes(SIZE_LIMIT),) * 2))) <= 3 * SIZE_LIMIT
        largest = Request(run="r" * 128, known=bytes(KNOWN_LIMIT * SHORT))
        assert Request.unpack("a", pack(largest)) == largest
        assert len(pack(largest)) <= REQUEST_BYTES
        page = Page(heartbeats=(bytes(SIZE_LIMIT),) * PAGE)
        assert Page.unpack("a", page.packed()) == page
        assert len(pack(page)) <= MESSAGE_LIMIT

    @given(st.binary(max_size=200))
    def test_garbage_is_refused_in_words(self, data: bytes) -> None:
        with pytest.raises(RemoteProtocolError):
            Request.unpack("a", data)
        with pytest.raises(RemoteProtocolError):
            Page.unpack("a", data)

    def test_another_version_is_named(self) -> None:
        request = Request(version=PROTOCOL_VERSION + 1, run=RUN, known=b"")
        with pytest.raises(RemoteProtocolError, match=f"version is {PROTOCOL_VERSION + 1}, ours is {PROTOCOL_VERSION}"):
            Request.unpack("a", pack(request))

    @pytest.mark.parametrize("known", [b"1234567", b"123456789"])
    def test_tags_are_whole(self, known: bytes) -> None:
        with pytest.raises(RemoteProtocolError, match="no whole number"):
            Request.unpack("a", pack(Request(run=RUN, known=known)))

    def test_a_bomb_is_not_inflated(self) -> None:
        bomb = Page(heartbeats=(bytes(SIZE_LIMIT),) * PAGE).packed()
        with pytest.raises(RemoteProtocolError, match="cut off"):
            Page.unpack("a", bomb + b"x")
        with pytest.raises(RemoteProtocolError, match="cut off"):
            Page.unpack("a", bomb[:-3])


class TestMeeting:
    def test_two_calls_make_two_strangers_known_to_each_other(self, clock: Clock) -> None:
        one, other = Beater(clock).say(), Beater(clock).say()
        one.finds(other)
        assert one.tells(other) == [HEARTBEAT]
        assert (one.heard(), other.heard()) == ({other.name}, {one.name})

    def test_then_beats_are_enough(self, clock: Clock) -> None:
        one, other = couple(clock)
        for second in range(1, 4):
            clock.now += 2.0
            one.say(inner_step=second, state=PeerState.READY, view=second, speed=7.0, leads=False)
            assert one.tells(other) == [BEAT]
            seen = other.knows()[one.name]
            assert (seen.inner_step, seen.state, seen.view, seen.speed, seen.leads) == (
                (second, PeerState.READY, second, 7.0, False)
            )
            assert other.beats.silences(clock.now)[one.name] == 0.0

    def test_what_beats_do_not_tell_is_signed(self, clock: Clock) -> None:
        one, other = couple(clock)
        for changes in ({"index": 2, "head": b"2" * 32}, {"trouble": "slow"}, {"team": "t"}):
            clock.now += 2.0
            one.say(**changes)
            assert one.tells(other) == [HEARTBEAT]
            seen = other.knows()[one.name]
            assert all(getattr(seen, name) == value for name, value in changes.items())

    def test_a_signed_heartbeat_comes_now_and_then(self, clock: Clock) -> None:
        one, other = couple(clock)
        calls = []
        for _ in range(12):
            clock.now += 2.0
            calls += one.say().tells(other)
        assert calls.count(HEARTBEAT) == 24 // int(REFRESH_SHARE * LIFETIME)

    def test_a_beat_of_an_unknown_peer_asks_for_its_heartbeat_and_leaves_nothing_behind(self, clock: Clock) -> None:
        one, other = couple(clock)
        other.beats.store.drop(one.name)
        call = one.beats.call_for(other.name)
        assert call is not None
        assert call.name == BEAT
        assert unpack(Answer, other.hears(one.name, call)).wants
        assert len(other.beats.store) == 0
        assert one.tells(other) == [BEAT, HEARTBEAT]
        assert other.heard() == {one.name}

    def test_a_heartbeat_that_was_lost_is_sent_again(self, clock: Clock) -> None:
        one, other = couple(clock)
        clock.now += 2.0
        one.say(index=2, head=b"2" * 32)
        one.beats.call_for(other.name)
        one.beats.failed(other.name, clock.now)
        clock.now += 2.0
        assert one.say(index=2, head=b"2" * 32).tells(other) == [HEARTBEAT]
        assert other.knows()[one.name].index == 2

    def test_a_beat_from_elsewhere_in_the_log_is_a_sign_of_life_alone(self, clock: Clock) -> None:
        one, other = couple(clock)
        clock.now += 2.0
        beat = beat_of(one, index=2, state=PeerState.READY)
        answer = other.beats.hear_beat(one.name, beat, clock.now, clock.wall)
        assert unpack(Answer, answer).wants
        seen = other.knows()[one.name]
        assert (seen.index, seen.state, seen.sequence) == (1, PeerState.TRAINING, beat.sequence)
        assert other.heard() == {one.name}

    def test_a_heartbeat_that_grows_old_is_asked_for(self, clock: Clock) -> None:
        one, other = couple(clock)
        for _ in range(9):
            clock.now += 2.0
            answer = other.beats.hear_beat(one.name, beat_of(one), clock.now, clock.wall)
        assert unpack(Answer, answer).wants

    def test_a_farewell_is_signed(self, clock: Clock) -> None:
        one, other = couple(clock)
        clock.now += 2.0
        answer = other.beats.hear_beat(one.name, beat_of(one, state=PeerState.LEAVING), clock.now, clock.wall)
        assert unpack(Answer, answer).wants
        assert other.knows()[one.name].state is PeerState.TRAINING
        clock.now += 2.0
        assert one.say(state=PeerState.LEAVING).tells(other) == [HEARTBEAT]
        assert other.knows()[one.name].state is PeerState.LEAVING
        assert other.beats.others(clock.now) == []


class TestLife:
    """Who lives is judged by what one hears itself."""

    def test_who_is_silent_is_not_heard_any_more(self, clock: Clock) -> None:
        one, other = couple(clock)
        clock.now += LIFETIME / 2
        assert one.heard() == {other.name}
        clock.now += 0.1
        assert one.heard() == set()

    def test_an_answer_is_a_sign_of_life(self, clock: Clock) -> None:
        one, other = couple(clock)
        clock.now += 9.0
        one.say().tells(other)
        clock.now += 9.0
        assert one.heard() == {other.name}

    def test_what_others_hand_out_keeps_nobody_alive(self, clock: Clock) -> None:
        """Whoever has a heartbeat of a dead peer may have kept it back."""
        one, other = couple(clock)
        third = Beater(clock).say().finds(one)
        assert third.asks(one) == {one.name, other.name}
        assert third.heard() == {one.name}, "found in the DHT, where it was left by itself"
        assert set(third.knows()) == {one.name, other.name}
        third.tells_all(one, other)
        assert third.heard() == {one.name, other.name}

    def test_the_same_words_again_keep_nobody_alive(self, clock: Clock) -> None:
        one, other = couple(clock)
        clock.now += 2.0
        assert not other.beats.found(one.signed, clock.now, clock.wall)
        clock.now += 9.0
        assert other.heard() == set()

    def test_a_beat_from_the_future_counts_nothing(self, clock: Clock) -> None:
        one, other = couple(clock)
        clock.now += 2.0
        before = other.knows()[one.name]
        other.beats.hear_beat(one.name, beat_of(one, sequence=MOST), clock.now, clock.wall)
        assert other.knows()[one.name] == before

    def test_an_older_beat_changes_nothing(self, clock: Clock) -> None:
        one, other = couple(clock)
        clock.now += 2.0
        one.say(inner_step=5).tells(other)
        other.beats.hear_beat(one.name, beat_of(one, sequence=1, inner_step=3), clock.now, clock.wall)
        assert other.knows()[one.name].inner_step == 5

    def test_a_peer_that_starts_again_is_believed(self, clock: Clock) -> None:
        one, other = couple(clock)
        clock.now += 2.0
        again = Beater(clock, one.identity).say(incarnation=1, index=0)
        beat = again.beats.call_for(other.name)
        assert beat is not None
        answer = other.beats.hear_beat(one.name, beat_of(again, incarnation=1), clock.now, clock.wall)
        assert unpack(Answer, answer).wants, "another incarnation is unknown"
        again.tells(other)
        assert other.knows()[one.name].incarnation == 1


class TestLies:
    def test_nobody_speaks_for_another(self, clock: Clock) -> None:
        one, other = couple(clock)
        third = Beater(clock).say()
        with pytest.raises(RemoteProtocolError, match="sent the heartbeat of"):
            other.beats.hear_heartbeat(one.name, third.signed, clock.now, clock.wall)
        call = one.beats.call_for(other.name)
        assert call is not None
        with pytest.raises(RemoteProtocolError, match="sent the heartbeat of"):
            one.beats.answered(
                other.name, call, pack(Answer(wants=False, heartbeats=(third.signed,))), clock.now, clock.wall
            )
        one.beats.choose((), clock.now)
        assert one.beats.audience.due(clock.now) == [], "whoever lies is left alone for a while"

    def test_whoever_wants_to_be_told_again_and_again_is_told_twice(self, clock: Clock) -> None:
        one, other = couple(clock)
        calls = []
        while call := one.beats.call_for(other.name):
            calls.append(call.name)
            if not one.beats.answered(other.name, call, pack(Answer(wants=True)), clock.now, clock.wall):
                break
        assert calls == [BEAT, HEARTBEAT]

    def test_whoever_signs_without_end_is_heard_now_and_then(self, clock: Clock) -> None:
        one, other = couple(clock)
        taken = set()
        for step in range(1, 100):
            signed = one.heartbeat(sequence=int(clock.wall * 1000) + step, index=step).sign(one.identity)
            other.beats.hear_heartbeat(one.name, signed, clock.now, clock.wall)
            taken.add(other.knows()[one.name].index)
        assert len(taken) <= HEARTBEATS_AT_ONCE + 1
        clock.now += 9.0
        assert other.heard() == {one.name}, "it lives all the same"

    def test_first_heartbeats_of_all_strangers_together_are_rationed(self, clock: Clock) -> None:
        one, known = couple(clock)
        crowd = [Identity.generate() for _ in range(1000)]
        for identity in crowd:
            signed = Beater(clock, identity).heartbeat(trouble="x" * 500).sign(identity)
            one.beats.hear_heartbeat(identity.peer_id, signed, clock.now, clock.wall)
        assert len(one.beats.store) < 500
        clock.now += 2.0
        known.say(index=2, head=b"2" * 32).tells(one)
        assert one.knows()[known.name].index == 2, "those who are known have nothing to do with it"

    def test_pages_are_rationed(self, clock: Clock) -> None:
        one, _ = couple(clock)
        served = 0
        for number in range(4 * WHO_BURST):
            request = one.beats.request([f"p{n}" for n in range(2000)])
            if one.beats.hand_out(f"stranger{number}", request, clock.now, clock.wall) == NOTHING_TO_SAY:
                break
            served += len(request.known)
        assert WHO_BURST <= served <= 2 * WHO_BURST

    def test_another_run_is_refused(self, clock: Clock) -> None:
        one, _ = couple(clock)
        with pytest.raises(RemoteProtocolError, match="asks about run"):
            one.beats.hand_out("a", Request(run="other", known=b""), clock.now, clock.wall)

    def test_whoever_only_looks_says_nothing(self, clock: Clock) -> None:
        one, other = couple(clock)
        visitor = Beater(clock).finds(one)
        assert visitor.beats.call_for(one.name) is None
        assert visitor.asks(one) == {one.name, other.name}
        assert len(one.beats.store) == 1


class TestPages:
    def test_a_newcomer_is_told_of_all_page_by_page(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("peers.presence.beats.PAGE", 3)
        crowd = [Beater(clock).say() for _ in range(8)]
        one = Beater(clock).say().finds(*crowd)
        new = Beater(clock).say().finds(one)
        pages = []
        while found := new.asks(one, tuple(new.knows())):
            pages.append(len(found))
        assert pages == [3, 3, 2]
        assert set(new.knows()) == {one.name, *(peer.name for peer in crowd)}

    def test_those_are_handed_out_that_are_heard(self, clock: Clock) -> None:
        one, other = couple(clock)
        clock.now += LIFETIME / 2 + 0.1
        one.say()
        assert Beater(clock).finds(one).asks(one) == {one.name}
        assert set(one.knows()) == {other.name}, "it is not forgotten"


class TestLargeSwarms:
    def test_whom_we_do_not_beat_to_gets_ours_with_the_answer(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("peers.presence.beats.AUDIENCE_LIMIT", 1)
        voter, first, new = (Beater(clock).say() for _ in range(3))
        voter.finds(first, new)
        voter.beats.choose((first.name,), clock.now)
        new.finds(voter)
        for second in range(2, 20, 2):
            clock.now += 2.0
            voter.say(inner_step=second, index=second // 10, head=bytes([second // 10]) * 32)
            new.say()
            new.beats.choose((voter.name,), clock.now)
            new.tells(voter)
            assert voter.heard() >= {new.name}
            seen = new.knows()[voter.name]
            assert seen.index == second // 10 or second == 10, "one beat later"
        assert seen.inner_step == second


def test_words_of_another_run_have_another_tag() -> None:
    assert len(tag_of(RUN)) == SHORT
    assert tag_of(RUN) != tag_of(RUN + "b")


def test_a_word_names_its_run(clock: Clock) -> None:
    one, other = Beater(clock).say(), Beater(clock).say()
    assert one.beats.call_for(other.name) == Call(HEARTBEAT, tag_of(RUN) + one.signed, one.heartbeat().sequence)
