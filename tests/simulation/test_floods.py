"""What somebody who makes up peers can do to a run's place in the DHT. As in test_weaknesses.py, what ought to be true
and is not fails until somebody mends it."""

from __future__ import annotations

import time
from typing import Any

from peers.net.dht_storage import BoundedStorage
from peers.net.light import load_hivemind
from peers.net.records import heartbeats_key
from tests.simulation.test_weaknesses import broken

RUN = "tiny-" + "a" * 32


def peer(number: int) -> str:
    return f"12D3KooW{number:044}"


def storage_of_a_run() -> tuple[BoundedStorage, Any]:
    """Return a node's storage, and the key under which the heartbeats of a run lie."""
    storage, key = BoundedStorage(), load_hivemind().protocol.DHTID.generate(source=heartbeats_key(RUN))
    storage.favour(key)
    return storage, key


def flooded(storage: BoundedStorage, key: Any, soon: float) -> int:
    """Store records of made-up peers, and return how many are taken."""
    count = 0
    while storage.store_subkey(key, f"made up {count}", bytes(700), soon + 600.0):
        count += 1
    return count


@broken("whoever comes first has the places under a run's key, and peers are made up for nothing")
def test_a_flood_of_records_hides_no_peer_of_the_run() -> None:
    (storage, run), now = storage_of_a_run(), time.time()
    flooded(storage, run, now)
    assert any(storage.store_subkey(run, peer(number), bytes(700), now + 20.0) for number in range(100))


def test_a_flood_of_records_is_small_to_read() -> None:
    """What everybody is sent who looks for a run."""
    (storage, run), now = storage_of_a_run(), time.time()
    assert flooded(storage, run, now) * 700 <= 200_000
