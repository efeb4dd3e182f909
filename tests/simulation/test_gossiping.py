"""Gossip in a whole swarm, on a simulated clock and network: who is taken for alive, when, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.news import News, Request
from peers.simulator import gossip_costs
from peers.simulator.gossiping import TIMING, Crowd, GossipingPeer, Weather
from peers.values.wire import pack

BAD_WEATHER = Weather(loss=0.03, cut=0.08, relayed=0.1)
MANY = 1000
"""For how large each takes the swarm, so that heartbeats are as rare and life signs as important as there."""
LATENCY = 4.0  # seconds that news takes to get around, at most


def crowd_of(count: int, seed: int = 1, weather: Weather = BAD_WEATHER, scale: int = MANY) -> Crowd:
    """A swarm in which all know all."""
    crowd = Crowd(seed, weather, scale)
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


@pytest.mark.parametrize("seed", [1, 2])
def test_the_living_live_the_dead_die_and_newcomers_are_met(seed: int) -> None:
    crowd = crowd_of(30, seed)
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


def test_two_halves_that_were_parted_become_one_as_soon_as_one_finds_another() -> None:
    crowd = crowd_of(24)
    one_side, other_side = crowd.living[:12], crowd.living[12:]
    crowd.side.update({peer.name: 1 for peer in other_side})
    crowd.run(TIMING.heartbeat_expiry + LATENCY)
    assert nobody_knows(one_side, other_side)
    assert everybody_knows(one_side, one_side)
    crowd.run(20.0)
    crowd.side.clear()
    said = other_side[5].gossip.own
    assert said is not None
    one_side[3].gossip.found(said.signed, crowd.now, crowd.wall)  # in the DHT
    crowd.run(3 * LATENCY)
    assert everybody_knows(crowd.living, crowd.living)


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
