"""The weights of contributions, by their age (R16)."""

from __future__ import annotations

from dataclasses import replace

from peers.protocol.contributions import Contributions
from peers.protocol.exchange import Exchange
from peers.protocol.weights import aged, weights_of
from tests.peers.logs import SETTINGS, first_log, member, next_header
from tests.peers.rounds import round_among

ASYNCHRONOUS = replace(SETTINGS, contributions=0.5)


def test_old_work_counts_less() -> None:
    assert aged(400, 0) == 400
    assert aged(400, 1) == 282
    assert (aged(1, 3), aged(0, 3)) == (1, 0)
    assert aged(400, 3) == 200.0


def test_an_age_follows_from_the_log_and_nothing_that_a_peer_says() -> None:
    log = replace(first_log(), staleness=2)
    assert [log.age(peer) for peer in ("a", "b", "stranger")] == [0, 0, 0]
    log = log.append(next_header(log, [member("a", 60, 80)]))
    assert [log.age(peer) for peer in ("a", "b", "stranger")] == [0, 1, 0]
    members = [member("b", 80, 100)]
    assert weights_of(members, log, SETTINGS) == {"b": 100}
    assert weights_of(members, log, ASYNCHRONOUS) == {"b": 70}


def test_an_average_is_made_with_these_weights() -> None:
    exchange = Exchange("a", round_among("ab"), Contributions(weights={"b": 50.0}))
    assert exchange.reduction_of(0, ()).weights == [("a", 100), ("b", 50.0)]
