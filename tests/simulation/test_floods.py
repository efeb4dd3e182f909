"""Limits on what made-up peers can do to a run's place in the DHT (R20)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from peers.network import dht_storage
from peers.network.dht_storage import RECORDS, _BoundedStorage, heartbeats_key
from peers.network.hivemind_lite import load_hivemind
from peers.presence.meeting_place import ELDERS, STORE_SHARE

RUN = "tiny-" + "a" * 32
KEY: Any = load_hivemind().protocol.DHTID.generate(source=heartbeats_key(RUN))
REPLICAS = 5  # nodes that keep a record
LIFETIME = 20.0  # seconds, of a heartbeat
PERIOD = int(STORE_SHARE * LIFETIME)  # seconds from one heartbeat that a peer stores to the next


class Scene:
    """The nodes that keep a run's heartbeats, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.nodes = [_BoundedStorage(random.Random(number)) for number in range(REPLICAS)]
        self.crowd: Iterator[int] = count()
        clock = SimpleNamespace(time=lambda: self.seconds, monotonic=lambda: self.seconds)
        monkeypatch.setattr(dht_storage, "time", clock)
        monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", clock.time)
        for node in self.nodes:
            node.favour(KEY)

    def store(self, peer: str, lifetime: float = LIFETIME) -> None:
        for node in self.nodes:
            node.store_subkey(KEY, peer, bytes(700), self.seconds + lifetime)

    def flood(self, records: int) -> None:
        """Store those of so many made-up peers, which live for as long as a heartbeat may."""
        for _ in range(records):
            self.store(f"made up {next(self.crowd)}", 600.0)

    def found(self) -> set[str]:
        """What somebody is sent who looks for the run."""
        return {peer for node in self.nodes for peer, _ in node.get(KEY).value.items()}

    def live(self, seconds: int, peers: list[str], made_up: int) -> Iterator[set[str]]:
        """Let time pass, in which the peers store in turn, and `made_up` others a second. Yields what is found."""
        for _ in range(seconds):
            self.seconds += 1.0
            self.flood(made_up // 2)
            for number, peer in enumerate(peers):
                if (int(self.seconds) + number * PERIOD // len(peers)) % PERIOD == 0:
                    self.store(peer)
            self.flood(made_up - made_up // 2)
            yield self.found()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def longest_wait(seen: Iterable[bool]) -> int:
    """For how many looks one after another nobody was seen."""
    return max(map(len, "".join("x" if one else "." for one in seen).split("x")))


def test_a_flood_of_records_hides_no_peer_that_was_there_before(scene: Scene) -> None:
    """However large it is, and however long it lasts. Those who came first in a large run store all the time."""
    peers = [f"peer {number}" for number in range(ELDERS)]
    assert any(found >= set(peers) for found in scene.live(PERIOD, peers, made_up=0))
    assert all(found >= set(peers) for found in scene.live(5 * PERIOD, peers, made_up=RECORDS))


def test_a_peer_that_comes_during_a_flood_is_found_by_whoever_looks_for_some_seconds(scene: Scene) -> None:
    """Four newcomers, when each node is sent a hundred made-up peers a second."""
    newcomers = [f"peer {number}" for number in range(4)]
    scene.flood(RECORDS)
    looks = [bool(found & set(newcomers)) for found in scene.live(5 * PERIOD, newcomers, made_up=100)]
    assert longest_wait(looks[PERIOD:]) <= 3


def test_those_that_the_manifest_names_are_found_whoever_came_before(scene: Scene) -> None:
    """An organiser's peer, or an archive that the run names, from when it first stores."""
    for node in scene.nodes:
        node.protect(KEY, {"archive"})
    scene.flood(2 * RECORDS)
    looks = ["archive" in found for found in scene.live(3 * PERIOD, ["archive"], made_up=RECORDS)]
    assert all(looks[PERIOD:])


def test_a_peer_that_was_away_comes_last(scene: Scene) -> None:
    scene.store("peer")
    scene.flood(RECORDS)
    scene.seconds += LIFETIME + 1.0
    scene.store("peer")
    scene.flood(10 * RECORDS)
    assert "peer" not in scene.found()


def test_a_flood_of_records_is_small_to_read(scene: Scene) -> None:
    """What everybody is sent who looks for a run."""
    scene.flood(10 * RECORDS)
    for node in scene.nodes:
        assert len(node.get(KEY).value) * 700 <= 200_000
