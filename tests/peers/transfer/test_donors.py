from __future__ import annotations

import random

import pytest

from peers.transfer import download
from peers.transfer.download import _best_first, shuffled, to_ask
from peers.values.wire import Reach
from tests.peers.fakes import FakeTransport, NoChance

NAMES = [f"peer{number}" for number in range(40)]
OPEN, PUNCHED, RELAYED, NONE = Reach.OPEN, Reach.PUNCHED, Reach.RELAYED, Reach.NONE


def reached(**reach: Reach) -> FakeTransport:
    transport = FakeTransport()
    transport.reach = reach
    return transport


def test_direct_donors_come_first_and_unreachable_ones_last() -> None:
    transport = reached(a=NONE, b=RELAYED, c=PUNCHED, d=OPEN, f=RELAYED)
    assert _best_first(transport, "abcdef") == ["c", "d", "e", "b", "f", "a"]


def test_those_that_are_reached_alike_are_in_an_order_of_chance() -> None:
    transport = reached(peer0=NONE, peer1=RELAYED, peer39=OPEN)
    orders = {tuple(shuffled(transport, NAMES)) for _ in range(10)}
    assert len(orders) == 10
    for order in orders:
        assert sorted(order) == sorted(NAMES)
        assert (order[0], *order[-2:]) == ("peer39", "peer1", "peer0")


def test_the_leading_one_is_always_asked_and_not_everybody_asks_the_same_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(download, "CHANCE", random.Random(0))
    asked = [to_ask(reached(), NAMES, 16) for _ in range(20)]
    assert all(names[0] == "peer0" and len(set(names)) == 16 for names in asked)
    assert set().union(*asked) == set(NAMES)


@pytest.mark.parametrize(
    ("reach", "asked"),
    [
        ({}, "abc"),
        ({"a": RELAYED, "b": RELAYED, "c": OPEN}, "acd"),
        ({"a": NONE, "c": NONE}, "bde"),
        ({"a": NONE, "b": NONE, "c": NONE, "d": RELAYED, "e": NONE}, "d"),
        (dict.fromkeys("abcde", NONE), "abc"),
    ],
)
def test_the_unreachable_are_asked_only_when_nobody_else_is_there(
    reach: dict[str, Reach], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "CHANCE", NoChance())
    assert to_ask(reached(**reach), "abcde", 3) == list(asked)


def test_of_nobody_nobody_is_asked() -> None:
    assert to_ask(reached(), [], 3) == []
