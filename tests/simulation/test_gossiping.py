"""Gossip in a whole swarm, on a simulated clock and network: who is taken for alive, when, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.news import News, Request
from peers.presence.voice import Pace
from peers.values.wire import pack
from tests.simulator import gossip_costs
from tests.simulator.gossiping import TIMEOUT, TIMING, Crowd, GossipingPeer, Weather

pytestmark = pytest.mark.thorough

BAD_WEATHER = Weather(loss=0.03, cut=0.08, relayed=0.1)
MANY = 1000
"""For how large each takes the swarm, so that heartbeats are as rare and life signs as important as there."""
LATENCY = 4.0  # seconds that news takes to get around, at most


def crowd_of(count: int, weather: Weather = BAD_WEATHER, scale: int = MANY) -> Crowd:
    """A swarm in which all know all."""
    crowd = Crowd(1, weather, scale)
    for _ in range(count):
        crowd.start(crowd.living[-4:]).say()
    crowd.run(15.0)
    assert everybody_knows(crowd.living, crowd.living)
    return crowd


def everybody_knows(those: Iterable[GossipingPeer], others: Iterable[GossipingPeer]) -> bool:
    others = list(others)
    return all(one.knows(other.name) for one in those for other in others if other is not one)


def nobody_knows(those: Iterable[GossipingPeer], others: Iterable[GossipingPeer]) -> bool:
    others = list(others)
    return not any(one.knows(other.name) for one in those for other in others if other is not one)


def test_the_living_live_the_dead_die_and_newcomers_are_met() -> None:
    crowd = crowd_of(30)
    dead = crowd.living[::9]
    for one in dead:
        one.is_alive = False
    began = crowd.now
    newcomers = [crowd.start(crowd.living[:3]) for _ in range(3)]
    while crowd.now < began + TIMING.heartbeat_expiry + LATENCY:
        settled = [one for one in crowd.living if one not in newcomers]
        assert everybody_knows(settled, settled)
        crowd.run(0.5)
    assert nobody_knows(crowd.living, dead), "as soon as the time limits of rounds take for granted"
    assert everybody_knows(crowd.living, crowd.living)
    again = crowd.start(crowd.living[:3], dead[0].identity)
    crowd.run(LATENCY + TIMING.heartbeat)
    assert everybody_knows(crowd.living, [again])


def test_few_know_each_other_at_once() -> None:
    """As promptly as if each had told all others itself, which it does."""
    crowd = crowd_of(8, weather=Weather(), scale=0)
    newcomer = crowd.start(crowd.living[:1])
    newcomer.say()
    crowd.run(1.5)
    assert everybody_knows(crowd.living, [newcomer])
    assert everybody_knows([newcomer], crowd.living)
    leaver = crowd.living[3]
    leaver.state = PeerState.LEAVING
    leaver.say()
    crowd.run(0.5)
    assert nobody_knows([one for one in crowd.living if one is not leaver], [leaver])


@pytest.mark.parametrize("parted", [1, 10])
def test_those_who_were_parted_for_minutes_find_each_other_again(parted: int) -> None:
    crowd = crowd_of(11 if parted == 1 else 20)
    one_side, other_side = crowd.living[parted:], crowd.living[:parted]
    crowd.side.update({peer.name: 1 for peer in other_side})
    crowd.run(TIMING.heartbeat_expiry + LATENCY + TIMEOUT)  # half of all partners are on the other side, and time out
    assert nobody_knows(one_side, other_side)
    assert nobody_knows(other_side, one_side)
    assert everybody_knows(one_side, one_side)
    crowd.run(120.0)
    crowd.side.clear()
    crowd.run(25.0)
    assert everybody_knows(crowd.living, crowd.living)


def test_a_peer_whose_partners_all_die_at_once_stays_known() -> None:
    crowd = crowd_of(30)
    one = crowd.living[7]
    dead = [crowd.peers[name] for name in one.gossip.partners.chosen]
    for each in dead:
        each.is_alive = False
    for _ in range(30):
        crowd.run(0.5)
        assert everybody_knows(crowd.living, [one])
        assert everybody_knows([one], crowd.living)
    assert nobody_knows(crowd.living, dead)


def test_those_behind_a_nat_are_known_to_all_and_know_all() -> None:
    """They can call others; nobody can call them."""
    crowd = Crowd(3, BAD_WEATHER, MANY)
    for number in range(30):
        peer = crowd.start(crowd.living[-4:])
        if number % 3 == 2:
            crowd.behind_nat.add(peer.name)
        peer.say()
    crowd.run(15.0)
    for _ in range(30):
        assert everybody_knows(crowd.living, crowd.living)
        crowd.run(0.5)
    newcomer = crowd.start(crowd.living[:3])
    crowd.behind_nat.add(newcomer.name)
    newcomer.say()
    crowd.run(2 * LATENCY)  # a third of those that it calls do not answer
    assert everybody_knows(crowd.living, [newcomer])
    assert everybody_knows([newcomer], crowd.living)


def only_of_itself(sender: str, message: bytes, is_request: bool) -> bytes:
    """What a peer says that speaks of nobody else."""
    packed = Request.unpack(sender, message).news if is_request else News.unpack(sender, message).packed
    news = News.of(sender, packed)
    own = tuple(whole for whole in news.wholes if Heartbeat.verify(whole.signed).peer == sender)
    kept = news._replace(signs=(), asked=(), wholes=own)
    if not is_request:
        return kept.pack()
    return pack(Request.unpack(sender, message).model_copy(update={"news": kept.packed}))


def test_those_who_keep_news_to_themselves_bury_nobody() -> None:
    crowd = crowd_of(30)
    silent = {one.name for one in crowd.living[::5]}

    def keep(sender: str, to: str, message: bytes, is_request: bool) -> bytes:
        return only_of_itself(sender, message, is_request) if sender in silent and message else message

    crowd.meddle = keep
    honest = [one for one in crowd.living if one.name not in silent]
    for _ in range(40):
        crowd.run(0.5)
        assert everybody_knows(honest, honest)


def test_those_who_repeat_what_they_have_heard_keep_nobody_alive() -> None:
    crowd = crowd_of(30)
    liars = {one.name for one in crowd.living[::4]}
    heard: list[bytes] = []

    def repeat(sender: str, to: str, message: bytes, is_request: bool) -> bytes:
        if is_request and len(heard) < 2000:
            heard.append(message)
        return crowd.random.choice(heard) if is_request and sender in liars else message

    crowd.meddle = repeat
    dead = [one for one in crowd.living if one.name not in liars][:3]
    crowd.run(5.0)
    for one in dead:
        one.is_alive = False
    crowd.run(TIMING.heartbeat_expiry + LATENCY)
    for _ in range(20):
        assert nobody_knows(crowd.living, dead)
        crowd.run(0.5)


def test_whoever_makes_up_peers_cannot_have_all_send_without_end() -> None:
    """A liar speaks for a hundred peers that it made up, as often and as much as it can."""
    crowd = crowd_of(12)
    for one in crowd.living:
        one.sent = 0
    liar, made_up = crowd.living[5], [GossipingPeer(crowd.new_identity(), crowd) for _ in range(100)]
    honest = [one for one in crowd.living if one is not liar]

    def speak() -> None:
        for one in made_up:
            signed, sign = one.voice.say(crowd.heartbeat_of(one), Pace(is_whole=True), crowd.now)
            one.gossip.say(signed, sign, crowd.now, crowd.wall)
            if signed is not None:
                liar.gossip.found(signed, crowd.now, crowd.wall)
        crowd.at(0.5, speak)

    speak()
    for _ in range(20):
        crowd.run(0.5)
        assert everybody_knows(honest, honest)
    assert max(one.sent for one in honest) / 10.0 < 60_000


def test_what_each_sends_is_bounded() -> None:
    crowd = crowd_of(30)
    for one in crowd.living:
        one.sent = one.received = 0
    crowd.run(20.0)
    assert all(max(one.sent, one.received) / 20.0 < 15_000 for one in crowd.living)
    assert not crowd.refused


def test_costs_are_counted_where_all_speak_and_where_few_do(monkeypatch: pytest.MonkeyPatch) -> None:
    smaller = {"START": 2.0, "SETTLE": 6.0, "MEASURE": 4.0, "ALL_SPEAK": 6, "SMALLER": 8, "SOME": 4, "FEW": 3}
    for name, value in smaller.items():
        monkeypatch.setattr(gossip_costs, name, value)
    small, large = gossip_costs.costs_of(6), gossip_costs.costs_of(20)
    assert 0.0 < small.sent <= small.most
    assert large.sent > 0.0
    assert large.slowest < LATENCY
