"""Which records a DHT node keeps."""

from __future__ import annotations

from functools import partial

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.network.dht_storage import (
    CLOCK_TOLERANCE,
    MANIFEST_LIFETIME_LIMIT,
    RECORD_OVERHEAD,
    _key_digest,
    _record_is_valid,
    _RecordBudget,
    heartbeats_key,
    manifest_key,
)
from peers.network.hivemind_lite import load_hivemind
from peers.network.known_runs import Admissions
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest
from tests.peers.presence.test_heartbeat import IDENTITY, RUN, heartbeat

MANIFEST = SignedManifest.create(IDENTITY, "tiny", {"name": "tiny"})
MANIFEST_PLACE = _key_digest(manifest_key(MANIFEST.run_id))
HEARTBEATS_PLACE = _key_digest(heartbeats_key(RUN))
NO_SUBKEY: bytes = msgpack.packb(None)
MINE: bytes = msgpack.packb(IDENTITY.peer_id)
SIGNED: bytes = msgpack.packb(heartbeat().sign(IDENTITY))
NOW = heartbeat().sequence / 1000
EXPIRES = heartbeat().expires
is_valid = partial(_record_is_valid, admissions=Admissions())


def test_keys_lie_where_hivemind_puts_them() -> None:
    dht_id = load_hivemind().protocol.DHTID
    for key in (manifest_key(RUN), heartbeats_key(RUN)):
        assert dht_id.generate(source=key).to_bytes() == _key_digest(key)


def test_manifest_under_its_own_key() -> None:
    value = msgpack.packb(MANIFEST.pack())
    assert is_valid(MANIFEST_PLACE, NO_SUBKEY, value, NOW + 100, NOW)
    assert not is_valid(MANIFEST_PLACE, NO_SUBKEY, value, NOW + 2 * MANIFEST_LIFETIME_LIMIT, NOW)
    assert not is_valid(MANIFEST_PLACE, MINE, value, NOW + 100, NOW)
    assert not is_valid(HEARTBEATS_PLACE, NO_SUBKEY, value, NOW + 100, NOW)
    assert not is_valid(_key_digest(manifest_key(RUN)), NO_SUBKEY, value, NOW + 100, NOW)


def test_heartbeat_under_its_run_and_peer() -> None:
    assert is_valid(HEARTBEATS_PLACE, MINE, SIGNED, EXPIRES, NOW)
    other = msgpack.packb(Identity.generate().peer_id)
    assert not is_valid(HEARTBEATS_PLACE, other, SIGNED, EXPIRES, NOW)
    assert not is_valid(HEARTBEATS_PLACE, NO_SUBKEY, SIGNED, EXPIRES, NOW)
    assert not is_valid(MANIFEST_PLACE, MINE, SIGNED, EXPIRES, NOW)
    assert not is_valid(_key_digest(heartbeats_key("other")), MINE, SIGNED, EXPIRES, NOW)


def test_nobody_can_keep_a_heartbeat_longer_than_its_peer_meant() -> None:
    assert not is_valid(HEARTBEATS_PLACE, MINE, SIGNED, EXPIRES + 0.01, NOW)


def test_heartbeats_from_the_future_are_refused() -> None:
    assert is_valid(HEARTBEATS_PLACE, MINE, SIGNED, EXPIRES, NOW - CLOCK_TOLERANCE)
    assert not is_valid(HEARTBEATS_PLACE, MINE, SIGNED, EXPIRES, NOW - CLOCK_TOLERANCE - 1)


def test_expired_records_are_valid_still() -> None:
    """One outdated entry must not make a node drop a whole answer; the DHT forgets it by itself."""
    assert is_valid(HEARTBEATS_PLACE, MINE, SIGNED, EXPIRES, NOW + 10_000)


@pytest.mark.parametrize("subkey", [NO_SUBKEY, MINE], ids=["no subkey", "mine"])
@given(value=st.binary(max_size=300), place=st.sampled_from([MANIFEST_PLACE, HEARTBEATS_PLACE, bytes(20)]))
def test_arbitrary_values_are_refused(subkey: bytes, value: bytes, place: bytes) -> None:
    assert not is_valid(place, subkey, value, NOW, NOW)
    assert not is_valid(place, subkey, msgpack.packb(value), NOW, NOW)


@given(st.binary(max_size=100))
def test_arbitrary_subkeys_are_refused(subkey: bytes) -> None:
    assert not is_valid(HEARTBEATS_PLACE, subkey, SIGNED, EXPIRES, NOW)


class TestBudget:
    SIZE = 500
    COST = SIZE + RECORD_OVERHEAD

    def test_only_so_much_is_kept_until_it_expires(self) -> None:
        """Regression: heartbeats of made-up runs filled the memory of every node."""
        budget = _RecordBudget(2 * self.COST)
        assert budget.admit("a", self.SIZE, 10.0, 0.0)
        assert budget.admit("b", self.SIZE, 20.0, 0.0)
        assert not budget.admit("c", self.SIZE, 20.0, 10.0)
        assert budget.admit("c", self.SIZE, 20.0, 10.1), "a has expired"

    def test_what_is_kept_can_be_renewed(self) -> None:
        budget = _RecordBudget(self.COST)
        for second in range(5):
            assert budget.admit("a", self.SIZE, second + 10.0, second)
            assert not budget.admit("a", self.SIZE, second + 10.0, second), "nothing new"
        assert not budget.admit("a", self.SIZE + 1, 20.0, 5.0)
        assert not budget.admit("b", self.SIZE, 20.0, 5.0)
        assert budget.admit("b", self.SIZE, 20.0, 15.0)

    def test_the_expired_and_the_empty_take_no_room(self) -> None:
        budget = _RecordBudget(self.COST)
        assert not budget.admit("a", self.SIZE, 5.0, 5.0)
        assert budget.admit("b", 0, 6.0, 5.0)
        assert not budget.admit("c", 0, 6.0, 5.0), "no record is free"
