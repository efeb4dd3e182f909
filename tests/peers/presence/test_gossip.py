"""Gossip, exchange by exchange: what is told, what is asked for, and what a liar can do."""

from __future__ import annotations

import pytest

from peers.errors import RemoteProtocolError
from peers.presence import gossip as module
from peers.presence.gossip import BUSY, CLOSE, EXCHANGE_BURST, EXCHANGE_RATE, TOGETHER
from peers.presence.heartbeat import PeerState
from peers.presence.life_signs import SIGN
from peers.presence.news import HEARTBEATS_LIMIT, News, Request, Whole
from peers.presence.partners import CALLERS, PARTNERS, PAUSE_LAST, TERM
from peers.values.wire import pack
from tests.peers.presence.whispers import LARGE, RUN, Clock, Whisperer


@pytest.fixture
def clock() -> Clock:
    return Clock()


def peers(clock: Clock, count: int) -> list[Whisperer]:
    return [Whisperer(clock).say() for _ in range(count)]


def test_one_exchange_tells_both(clock: Clock) -> None:
    one, other = peers(clock, 2)
    one.finds(other)
    one.tells(other)
    assert one.knows().keys() == other.knows().keys() == {one.name, other.name}


def test_what_was_told_goes_on_to_others(clock: Clock) -> None:
    first, middle, last = peers(clock, 3)
    first.tells(middle)
    middle.finds(last)
    middle.tells(last)
    assert first.name not in last.knows(), "of a stranger only a sign of life is told"
    middle.tells(last)
    assert last.knows().keys() == {first.name, middle.name, last.name}


def test_among_many_only_signs_of_life_are_passed_on(clock: Clock) -> None:
    first, middle, last = peers(clock, 3)
    first.tells(middle)
    for _ in range(3):
        middle.tells(last)
    quiet, _ = middle.tells(last)
    clock.now += 4.0
    first.say(LARGE)
    first.tells(middle)
    there, _ = middle.tells(last)
    assert there - quiet <= SIGN.size + 4
    assert last.knows()[first.name].sequence == first.knows()[first.name].sequence


def test_nobody_is_told_what_it_has_told_us(clock: Clock) -> None:
    one, other = peers(clock, 2)
    third = Whisperer(clock).say()
    third.tells(one)
    for _ in range(3):
        one.tells(other)
    sizes = [one.tells(other), other.tells(one), one.tells(other)]
    assert max(map(max, sizes)) < 400, "one's own heartbeat, once; of the third nothing more"


def test_a_new_state_is_asked_for_and_gets_around(clock: Clock) -> None:
    first, middle, last = peers(clock, 3)
    first.tells(middle)
    for _ in range(3):
        middle.tells(last)
    clock.now += 2.0
    first.say(index=7).tells(middle)
    for _ in range(2):
        middle.tells(last)
    assert last.knows()[first.name].index == 7


def test_a_farewell_is_told_on(clock: Clock) -> None:
    first, middle, last = peers(clock, 3)
    first.tells(middle)
    for _ in range(3):
        middle.tells(last)
    first.say(LARGE, state=PeerState.LEAVING).tells(middle)
    for _ in range(2):
        middle.tells(last)
    assert last.knows()[first.name].state is PeerState.LEAVING
    assert first.name not in middle.gossip.others(clock.now + 5.0)


def test_a_newcomer_is_told_of_all_page_by_page(clock: Clock) -> None:
    old, new = peers(clock, 2)
    others = peers(clock, 150)
    old.finds(*others)
    exchanges = 0
    while len(new.knows()) < 152:
        new.tells(old)
        exchanges += 1
        assert new.name in old.knows()
        assert exchanges < 10
    assert exchanges >= 150 / HEARTBEATS_LIMIT


def test_more_signs_than_fit_into_a_message_come_one_after_another(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SIGNS_LIMIT", 10)
    old, new = peers(clock, 2)
    old.finds(*peers(clock, 45))
    for _ in range(20):
        new.tells(old)
    assert len(new.knows()) == 47


# Whom it tells -------------------------------------------------------------------------------------------------
def test_few_tell_all_of_themselves_at_once(clock: Clock) -> None:
    one, *others = peers(clock, CLOSE + 1)
    one.finds(*others)
    assert set(one.gossip.due(clock.now)) == {other.name for other in others}
    for _ in range(3):  # whoever hears of others asks for their heartbeats
        for other in others:
            one.tells(other)
    assert one.gossip.due(clock.now) == []
    clock.now += 0.1
    one.say()
    assert set(one.gossip.due(clock.now)) == {other.name for other in others}


def test_among_many_it_keeps_to_a_few_which_change(clock: Clock) -> None:
    one, *others = peers(clock, 60)
    one.finds(*others)
    partners, changes = set[str](), 0
    by_name = {other.name: other for other in others}
    for _ in range(200):
        due = one.gossip.due(clock.now)
        assert len(due) <= PARTNERS
        changes += len(set(one.gossip.partners.chosen) - partners)
        partners = set(one.gossip.partners.chosen)
        for name in due:
            one.tells(by_name[name])
        clock.now += 0.5
        if clock.now % 2 == 0:
            for each in (one, *others):
                each.say()
            one.finds(*others)
    draws = one.gossip.partners._draws  # now and then of the one that has just gone: that is no change
    assert PARTNERS + 100 / TERM - 2 <= draws <= PARTNERS + 100 / TERM + 2
    assert PARTNERS < changes <= draws


def test_among_many_whoever_takes_part_is_not_told_of_all_again(clock: Clock) -> None:
    one, *others = peers(clock, 60)
    one.finds(*others)
    one.gossip.due(clock.now)
    first, second, third = others[:3]
    for other in others[:3]:
        other.finds(*others)
    assert one.tells(first)[0] > 58 * SIGN.size
    assert max(one.tells(second)) < 800, "we knock, and are let in"
    clock.now += 2.0
    first.say(index=4).tells(second)
    first.tells(second)
    assert one.tells(second)[1] < 800, "it tells what it has heard since"
    one.tells(second)
    assert one.knows()[first.name].index == 4
    third.finds(one)
    third.gossip.partners._callers = {other.name: clock.now for other in others[:CALLERS]}
    third.gossip.due(clock.now)
    assert one.tells(third)[1] == len(BUSY), "it is a partner of others"
    assert one.name in third.knows(), "yet it has heard us"


def test_a_newcomer_is_told_everything_by_the_first_that_is_not_busy(clock: Clock) -> None:
    new, *others = peers(clock, 60)
    new.finds(*others)
    new.gossip.due(clock.now)
    for other in others[:5]:
        new.gossip.request(other.name, clock.now)
        new.gossip.failed(other.name, clock.now)
    assert new.tells(others[6])[0] > 58 * SIGN.size


def test_whoever_does_not_answer_is_left_alone_for_longer_each_time(clock: Clock) -> None:
    one, silent = peers(clock, 2)
    one.finds(silent)
    pauses = []
    for _ in range(8):
        assert one.gossip.due(clock.now) == [silent.name]
        one.gossip.request(silent.name, clock.now)
        assert one.gossip.due(clock.now) == [], "one exchange at a time"
        one.gossip.failed(silent.name, clock.now)
        began = clock.now
        while not one.gossip.due(clock.now):
            clock.now += 0.5
            silent.say()
            one.finds(silent)
            one.say()
        pauses.append(clock.now - began)
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (1.0, PAUSE_LAST)


def test_whoever_speaks_to_us_is_not_left_alone(clock: Clock) -> None:
    one, silent = peers(clock, 2)
    one.finds(silent)
    one.gossip.request(silent.name, clock.now)
    one.gossip.failed(silent.name, clock.now)
    silent.tells(one)
    assert one.gossip.due(clock.now) == [silent.name]


def test_peers_that_are_hard_to_reach_are_partners_of_last_resort(clock: Clock) -> None:
    one, *others = peers(clock, 40)
    one.finds(*others)
    one.gossip.partners.avoided = {other.name for other in others[3:]}
    assert set(one.gossip.due(clock.now)) == {other.name for other in others[:3]}


# Liars ---------------------------------------------------------------------------------------------------------
def test_nobody_speaks_for_another(clock: Clock) -> None:
    victim, liar, one = peers(clock, 3)
    liar.finds(victim)
    forged = liar.gossip.heard.get(victim.name)
    assert forged is not None
    forged.sign = forged.sign._replace(slots=40)
    one.finds(victim)
    with pytest.raises(RemoteProtocolError, match="not its owner's"):
        liar.tells(one)
    assert one.knows()[victim.name].sequence == victim.knows()[victim.name].sequence


def test_a_partner_that_lies_is_left_alone(clock: Clock) -> None:
    one, liar = peers(clock, 2)
    one.finds(liar)
    one.gossip.request(liar.name, clock.now)
    with pytest.raises(RemoteProtocolError):
        one.gossip.answer_of(liar.name, b"garbage", clock.now, clock.wall)
    assert one.gossip.due(clock.now) == []


def test_heartbeats_that_nobody_has_are_asked_for_once(clock: Clock) -> None:
    """A liar may name chains without end; each costs it more than us."""
    one, liar = peers(clock, 2)
    liar.tells(one)
    sign = one.gossip.heard.get(liar.name).sign  # type: ignore[union-attr]
    made_up = tuple(sign._replace(tag=number.to_bytes(8, "big")) for number in range(4000))
    for _ in range(5):
        request = pack(Request(run=RUN, after=0, news=News(1, signs=made_up).packed))
        answer = one.answer(liar.name, request)
        assert len(answer) < len(request) / 20
    assert len(one.gossip._asked) <= module.ASKED_LIMIT


def test_answers_are_rationed(clock: Clock) -> None:
    one, *_ = crowd = peers(clock, 200)
    one.finds(*crowd)
    request = pack(Request(run=RUN, after=0, news=News(0).packed))
    given = sum(len(one.answer(f"stranger{number}", request)) for number in range(2000))
    assert given <= EXCHANGE_BURST + 2000 * 100
    before = len(crowd[1].signed)
    assert crowd[1].tells(one)[1] > before, "those of the run have rations of their own"


def test_all_together_are_given_no_more_than_a_few(clock: Clock) -> None:
    """Whoever makes up peers to ask in their names gets no more for the hundredth of them."""
    one, *crowd = peers(clock, 100)
    one.finds(*crowd)
    began, given = clock.now, 0
    for number in range(500):
        caller = crowd[number % len(crowd)]
        own = caller.gossip.request(one.name, clock.now)
        given += len(own) + len(one.answer(caller.name, own))
        caller.gossip.failed(one.name, clock.now)
        clock.now += 0.02
    assert given <= TOGETHER * (EXCHANGE_BURST + (clock.now - began) * EXCHANGE_RATE)


def test_whoever_talks_without_end_is_not_listened_to(clock: Clock) -> None:
    """To check what it says takes time."""
    one, liar = peers(clock, 2)
    liar.tells(one)
    checked = 0
    for number in range(400):
        clock.now += 0.001
        made_up = tuple(Whole(signed=liar.say(index=number + each).signed, slots=0, link=b"") for each in range(4))
        answer = one.answer(liar.name, pack(Request(run=RUN, after=0, news=News(1, wholes=made_up * 12).packed)))
        checked += answer != BUSY
    assert checked < 100


def test_strangers_bring_nobody_in(clock: Clock) -> None:
    """Whoever has not said who it is in this run is told things, and asked nothing."""
    one, other = peers(clock, 2)
    sign = other.gossip.heard.get(other.name).sign  # type: ignore[union-attr]
    answer = one.answer("stranger", pack(Request(run=RUN, after=0, news=News(1, signs=(sign,)).packed)))
    assert News.unpack("one", answer).asked == ()


def test_another_run_is_refused(clock: Clock) -> None:
    one, _ = peers(clock, 2)
    with pytest.raises(RemoteProtocolError, match="not tiny"):
        one.answer("a", pack(Request(run="other", after=0, news=News(0).packed)))


# After a restart -----------------------------------------------------------------------------------------------
def test_whoever_answers_after_a_restart_tells_everything_again(clock: Clock) -> None:
    one, other, third = peers(clock, 3)
    other.finds(third)
    for _ in range(3):
        one.tells(other)
    clock.now += 10.0
    again = Whisperer(clock, other.identity).say()
    third.say(index=4)
    again.finds(third)
    for _ in range(2):
        one.tells(again)
    assert one.knows()[other.name].sequence == again.knows()[other.name].sequence
    assert one.knows()[third.name].index == 4


def test_a_clock_that_is_set_breaks_nothing(clock: Clock) -> None:
    """Regression: what a peer had said itself was too old to be kept, and its next sign of life led to nothing."""
    one, other = peers(clock, 2)
    one.gossip.heard.forget(clock.wall + 300.0)
    clock.now += 2.0
    one.say(LARGE)
    assert one.gossip.own is None
    one.say().tells(other)
    assert one.name in other.knows()
