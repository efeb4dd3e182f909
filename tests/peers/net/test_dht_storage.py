"""The DHT's memory on one node."""

from __future__ import annotations

import time

import pytest

from peers.net import dht_storage
from peers.net.dht_storage import BoundedStorage, bounded
from peers.net.light import load_hivemind
from peers.net.records import RECORD_OVERHEAD

HIVEMIND = load_hivemind()
RUN, STRANGE = (HIVEMIND.protocol.DHTID.generate(source) for source in (b"run", b"strange"))
LATER = time.time() + 1000


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> BoundedStorage:
    """Room for two records of others, and for two under each favoured key."""
    monkeypatch.setattr(dht_storage, "OTHERS_BYTES", 2 * RECORD_OVERHEAD + 100)
    monkeypatch.setattr(dht_storage, "OWN_BYTES", 2 * RECORD_OVERHEAD + 100)
    return BoundedStorage()


def test_strangers_fill_only_their_own_part(storage: BoundedStorage) -> None:
    """Regression: anybody could store heartbeats of any number of peers in any number of runs."""
    storage.favour(RUN)
    assert storage.store(STRANGE, b"heartbeat", LATER, subkey="a")
    assert storage.store_subkey(STRANGE, "b", b"heartbeat", LATER)
    assert not storage.store_subkey(STRANGE, "c", b"heartbeat", LATER)
    assert not storage.store(HIVEMIND.protocol.DHTID.generate(b"another"), b"manifest", LATER)
    assert storage.store_subkey(RUN, "a", b"heartbeat", LATER)
    assert storage.store_subkey(RUN, "b", b"heartbeat", LATER)
    assert not storage.store_subkey(RUN, "c", b"heartbeat", LATER)
    assert storage.store_subkey(RUN, "a", b"newer", LATER + 1)
    assert {subkey: item.value for subkey, item in storage.get(RUN).value.items()} == {"a": b"newer", "b": b"heartbeat"}


def test_what_a_node_had_before_is_taken_over(storage: BoundedStorage) -> None:
    before = HIVEMIND.protocol.DHTLocalStorage()
    before.store(RUN, b"heartbeat", LATER, subkey="a")
    before.store(STRANGE, b"manifest", LATER + 1)
    after = bounded(before)
    assert after.get(RUN).value.get("a").value == b"heartbeat"
    assert tuple(after.get(STRANGE)) == (b"manifest", LATER + 1)


def test_no_key_has_more_records_than_a_reader_should_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_storage, "RECORDS", 2)
    storage = BoundedStorage()
    storage.favour(RUN)
    for key in (RUN, STRANGE):
        assert storage.store_subkey(key, "a", b"heartbeat", LATER)
        assert storage.store_subkey(key, "b", b"heartbeat", LATER)
        assert not storage.store_subkey(key, "c", b"heartbeat", LATER)
        assert storage.store_subkey(key, "a", b"newer", LATER + 1)
        assert len(storage.get(key).value) == 2
