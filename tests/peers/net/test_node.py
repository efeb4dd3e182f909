"""When a node of the DHT asks it for heartbeats, and when it need not."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from peers.net import node
from peers.net.node import FRESH, HivemindNode
from peers.presence.heartbeat import Heartbeat
from peers.values.identity import Identity
from tests.peers.builders import LOG, beat

RUN = "tiny-" + "a" * 32
ME, FIRST, SECOND = (Identity.generate() for _ in range(3))


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 1000.0
        monkeypatch.setattr(node, "now", lambda: self.seconds)


class Dht:
    """Has heartbeats, and counts how often it is asked."""

    def __init__(self) -> None:
        self.signed: dict[str, bytes] = {}
        self.searches = 0

    async def get(self, key: bytes, latest: bool) -> Any:
        self.searches += 1
        return SimpleNamespace(value={peer: SimpleNamespace(value=signed) for peer, signed in self.signed.items()})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Node:
    def __init__(self) -> None:
        self.dht = Dht()
        self.node = HivemindNode(SimpleNamespace(peer_id=ME.peer_id), self.dht, ())  # type: ignore[arg-type]
        self.sequence = time.time_ns() // 1_000_000

    def signed(self, identity: Identity) -> bytes:
        self.sequence += 1
        return beat(identity.peer_id, LOG, sequence=self.sequence, run=RUN).sign(identity)

    def puts(self, identity: Identity) -> None:
        """In the DHT."""
        self.dht.signed[identity.peer_id] = self.signed(identity)

    def tells(self, identity: Identity) -> None:
        """On a link."""
        self.node.take_in(self.signed(identity))

    def heartbeats(self) -> list[Heartbeat]:
        return asyncio.run(self.node.heartbeats(RUN))

    def sees(self) -> set[str]:
        return {one.peer for one in self.heartbeats()}


def test_the_dht_is_asked_now_and_then_while_all_tell_us_themselves(clock: Clock) -> None:
    node = Node()
    node.puts(ME)
    node.puts(FIRST)
    assert node.sees() == {ME.peer_id, FIRST.peer_id}
    for _ in range(8):
        clock.seconds += FRESH / 4
        node.tells(FIRST)
        assert node.sees() == {ME.peer_id, FIRST.peer_id}
        assert max(one.sequence for one in node.heartbeats()) == node.sequence
    assert node.dht.searches == 1 + 2
    clock.seconds += 2 * FRESH  # asleep, say
    node.heartbeats()
    assert node.dht.searches == 1 + 3


def test_who_tells_us_nothing_is_looked_for_each_time(clock: Clock) -> None:
    node = Node()
    node.puts(FIRST)
    node.puts(SECOND)
    for searches in range(1, 6):
        node.tells(FIRST)
        assert node.sees() == {FIRST.peer_id, SECOND.peer_id}
        assert node.dht.searches == searches


def test_old_news_is_no_news(clock: Clock) -> None:
    """Somebody may tell us again and again what a peer said that is dead by now."""
    node = Node()
    signed = node.signed(FIRST)
    node.node.take_in(signed)
    node.heartbeats()
    for searches in range(2, 4):
        clock.seconds += FRESH
        node.node.take_in(signed)
        node.heartbeats()
        assert node.dht.searches == searches


def test_alone_we_always_ask(clock: Clock) -> None:
    node = Node()
    node.puts(ME)
    for searches in range(1, 4):
        assert node.sees() == {ME.peer_id}
        assert node.dht.searches == searches
