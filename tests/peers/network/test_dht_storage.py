"""The DHT's memory on one node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from peers.network import dht_storage
from peers.network.daemon import Daemon
from peers.network.dht_node import DhtNode
from peers.network.dht_storage import RECORD_OVERHEAD, SLACK, _BoundedStorage, bounded, heartbeats_key
from peers.network.hivemind_lite import load_hivemind
from peers.network.known_runs import KnownRuns
from peers.network.transport import HivemindTransport
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest

HIVEMIND = load_hivemind()
RUN, STRANGE = (HIVEMIND.protocol.DHTID.generate(source) for source in (b"run", b"strange"))
LATER = 4e9


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> _BoundedStorage:
    """Room for two records of others, and for two under each favoured key."""
    monkeypatch.setattr(dht_storage, "OTHERS_BYTES", 2 * RECORD_OVERHEAD + 100)
    monkeypatch.setattr(dht_storage, "OWN_BYTES", 2 * RECORD_OVERHEAD + 100)
    return _BoundedStorage()


def test_strangers_fill_only_their_own_part(storage: _BoundedStorage) -> None:
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


def test_a_run_that_is_forgotten_has_no_room_of_its_own_any_more(storage: _BoundedStorage) -> None:
    storage.favour(RUN)
    storage.disfavour(RUN)
    assert storage.store_subkey(STRANGE, "a", b"heartbeat", LATER)
    assert storage.store_subkey(STRANGE, "b", b"heartbeat", LATER)
    assert not storage.store_subkey(RUN, "a", b"heartbeat", LATER)


def test_what_a_node_had_before_is_taken_over(storage: _BoundedStorage) -> None:
    before = HIVEMIND.protocol.DHTLocalStorage()
    before.store(RUN, b"heartbeat", LATER, subkey="a")
    before.store(STRANGE, b"manifest", LATER + 1)
    after = bounded(before)
    assert after.get(RUN).value.get("a").value == b"heartbeat"
    assert tuple(after.get(STRANGE)) == (b"manifest", LATER + 1)


def test_no_key_has_more_records_than_a_reader_should_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one replaces the one that came last."""
    monkeypatch.setattr(dht_storage, "RECORDS", 2)
    storage = _BoundedStorage()
    storage.favour(RUN)
    for key in (RUN, STRANGE):
        for number, peer in enumerate("abcd"):
            assert storage.store_subkey(key, peer, b"heartbeat", LATER + number)
        assert storage.store_subkey(key, "a", b"newer", LATER + 1)
        assert {subkey for subkey, _ in storage.get(key).value.items()} == {"a", "d"}


def test_records_that_were_replaced_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a trace of each was kept until it would have expired: 300 MB in a flood of a thousand a second."""
    monkeypatch.setattr(dht_storage, "RECORDS", 4)
    storage = _BoundedStorage()
    storage.favour(RUN)
    for number in range(2000):
        assert storage.store_subkey(RUN, f"peer {number}", b"heartbeat", LATER + number)
    under = storage.get(RUN).value
    assert len(under) == 4
    assert len(under.expiration_heap) <= 2 * 4 + SLACK + 1
    assert len(storage._favoured[RUN]._expiring) <= 2 * 4 + SLACK + 1


def test_a_record_that_is_not_taken_replaces_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers' room is full, and what comes is larger than what it would replace."""
    monkeypatch.setattr(dht_storage, "RECORDS", 2)
    monkeypatch.setattr(dht_storage, "OTHERS_BYTES", 2 * RECORD_OVERHEAD + 10)
    storage = _BoundedStorage()
    for peer in "ab":
        assert storage.store_subkey(STRANGE, peer, b"small", LATER)
    assert not storage.store_subkey(STRANGE, "c", b"larger", LATER)
    assert storage.store_subkey(STRANGE, "d", b"equal", LATER)
    assert {subkey for subkey, _ in storage.get(STRANGE).value.items()} == {"a", "d"}


def test_peers_of_a_run_are_named_until_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_storage, "RECORDS", 4)
    storage = _BoundedStorage()
    storage.protect(RUN, {"named"})
    for peer in "abc":
        storage.store_subkey(RUN, peer, b"heartbeat", LATER)
    for peer in ("named", "d", "e", "f"):
        storage.store_subkey(RUN, peer, b"heartbeat", LATER)
    assert "named" in storage.get(RUN).value
    storage.protect(RUN, ())
    for number in range(100):
        storage.store_subkey(RUN, f"peer {number}", b"heartbeat", LATER)
    assert "named" not in storage.get(RUN).value


def test_a_node_that_learns_a_manifest_names_those_that_it_names() -> None:
    organiser, archive = Identity.generate(), Identity.generate().peer_id
    manifest = SignedManifest.create(organiser, "tiny", {"archives": [archive]})
    storage = _BoundedStorage()
    place = HIVEMIND.protocol.DHTID.generate(source=heartbeats_key(manifest.run_id))
    node = DhtNode(SimpleNamespace(protocol=SimpleNamespace(storage=storage)))
    transport = HivemindTransport(organiser, cast(Daemon, SimpleNamespace()), node, KnownRuns())
    transport.learn(manifest)
    assert storage._protected == {place: {organiser.peer_id, archive}}
    transport.forget(manifest.run_id)
    assert storage._protected == {}
