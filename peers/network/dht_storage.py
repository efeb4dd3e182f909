"""The bounded storage of a node of hivemind's DHT, and the check of each record: manifests, and peers' heartbeats.

A node refuses every record that does not prove itself. A manifest must lie under the key of its own digest. A heartbeat
must be signed by the peer of its subkey, and lie under the key of its run. If the node has the manifest of a run by
invitation, the peer must also be admitted. So no node can overwrite another's records.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import time
from collections.abc import Collection, Hashable
from itertools import count
from typing import Any

from peers.errors import DilocoPeerError
from peers.network.daemon import HIVEMIND
from peers.network.known_runs import Admissions
from peers.presence.heartbeat import SIZE_LIMIT, Heartbeat
from peers.values.manifest import SignedManifest
from peers.values.wire import WireError, decode

MANIFEST_LIFETIME_LIMIT = 24 * 3600.0  # seconds for which a DHT node keeps a manifest, at most
RECORD_OVERHEAD = 1000  # bytes of memory that Python needs for any record, besides its value
SLACK = 64
"""Entries that a heap may have, beyond twice the number of records, before dropped records' entries are removed."""
CLOCK_TOLERANCE = 60.0  # seconds that a peer's clock may be ahead of ours


def manifest_key(run_id: str) -> bytes:
    """Return the DHT key of a run's manifest; the value under it is the packed SignedManifest."""
    return f"diloco-peer/manifest/{run_id}".encode()


def heartbeats_key(run_id: str) -> bytes:
    """Return the DHT key of a run's heartbeats; subkeys are peer ids, values are signed heartbeats."""
    return f"diloco-peer/heartbeats/{run_id}".encode()


def _key_digest(key: bytes) -> bytes:
    """Return a key's id in hivemind's DHT: its SHA-1 digest, which selects nodes for a record and proves nothing."""
    return hashlib.sha1(key, usedforsecurity=False).digest()


def _record_is_valid(
    key: bytes, subkey: bytes, value: bytes, expiration: float, now: float, admissions: Admissions
) -> bool:
    """Return True if a DHT node may store a record: a signed manifest or heartbeat under its own key, for a limited
    time.

    key: digest of the DHT key, 20 bytes; subkey, value: as hivemind packs them (msgpack; a record without subkey has
    None); times in seconds since the epoch.
    """
    try:
        owner, data = decode(subkey), decode(value)
        if not isinstance(data, bytes):
            return False
        if owner is None:
            manifest = SignedManifest.unpack(data)
            is_at_its_key = key == _key_digest(manifest_key(manifest.run_id))
            if is_at_its_key:
                admissions.learn(manifest, is_ours=False)
            return is_at_its_key and expiration <= now + MANIFEST_LIFETIME_LIMIT
        heartbeat = Heartbeat.verify(data)
    except (WireError, DilocoPeerError):
        return False
    # The DHT prefers records that expire later, so one kept after its signed expiry could displace a newer heartbeat.
    is_timely = expiration <= heartbeat.expires <= now + CLOCK_TOLERANCE + heartbeat.lifetime
    is_its_own = key == _key_digest(heartbeats_key(heartbeat.run)) and owner == heartbeat.peer
    return is_its_own and is_timely and admissions.admits(heartbeat, now)


class _RecordBudget:
    """A memory budget of `limit` bytes for records. A record's bytes become free when the record expires."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._total = 0
        self._kept: dict[Hashable, tuple[float, int]] = {}  # each record's expiration (epoch seconds) and size in bytes
        self._order = count()
        self._expiring: list[tuple[float, int, Hashable]] = []

    def admit(
        self, record: Hashable, size: int, expiration: float, now: float, instead_of: Hashable | None = None
    ) -> bool:
        """Reserve memory for a record of `size` bytes. Return False if too little is free, or the record is not newer
        than the stored one. Times are in seconds since the epoch.

        A record is replaced only by a newer one of the same name. The record that it is stored `instead_of` is dropped.
        """
        while self._expiring and self._expiring[0][0] < now:
            expired, _, name = heapq.heappop(self._expiring)
            if name in self._kept and self._kept[name][0] == expired:
                self._total -= self._kept.pop(name)[1]
        before, freed = self._kept.get(record, (now, 0))
        _, replaced = self._kept.get(instead_of, (now, 0))
        size += RECORD_OVERHEAD
        if expiration <= before or self._total - freed - replaced + size > self._limit:
            return False
        self._kept.pop(instead_of, None)
        self._total += size - freed - replaced
        self._kept[record] = expiration, size
        heapq.heappush(self._expiring, (expiration, next(self._order), record))
        if len(self._expiring) > 2 * len(self._kept) + SLACK:
            self._expiring = [(expires, next(self._order), name) for name, (expires, _) in self._kept.items()]
            heapq.heapify(self._expiring)
        return True


DHTLocalStorage: Any = HIVEMIND.protocol.DHTLocalStorage
RECORDS = 256  # records under one key, at most: one answer contains them all, and a sample of a run's peers is enough
OWN_BYTES = RECORDS * (SIZE_LIMIT + RECORD_OVERHEAD)  # bytes of records, at most, under each key that we use ourselves
OTHERS_BYTES = 64 << 20  # bytes of records, at most, under all keys together that we do not use ourselves


class RecordValidator(HIVEMIND.validation.RecordValidatorBase):  # type: ignore[misc,name-defined]  # no types
    """hivemind's hook that rejects records without a valid signature before this node stores them."""

    def __init__(self, admissions: Admissions) -> None:
        self._admissions = admissions

    def validate(self, record: Any) -> bool:
        return _record_is_valid(
            record.key, record.subkey, record.value, record.expiration_time, time.time(), self._admissions
        )


class _BoundedStorage(DHTLocalStorage):  # type: ignore[misc]  # hivemind has no types
    """hivemind's DHT storage with limited memory, which replaces or refuses records beyond the limits.

    Records under a favoured key have room of their own, which strangers with made-up runs cannot fill. If a key has all
    the records that it may, a new one replaces another, so that the first ones cannot lock all others out. The replaced
    one is drawn from the newer half. The older half stays, since a flood comes later, and so do records of the peers
    that the run's manifest names, as long as they are renewed in time.
    """

    def __init__(self, chance: random.Random | None = None) -> None:
        super().__init__()
        self._chance = chance or random.Random()
        self._favoured: dict[Any, _RecordBudget] = {}
        self._others = _RecordBudget(OTHERS_BYTES)
        self._protected: dict[Any, frozenset[Any]] = {}

    def favour(self, key: Any) -> None:
        self._favoured.setdefault(key, _RecordBudget(OWN_BYTES))

    def disfavour(self, key: Any) -> None:
        """Stop reserving memory for a key. Its new records share memory with other keys' records; its present records
        stay until they expire."""
        self._favoured.pop(key, None)

    def protect(self, key: Any, subkeys: Collection[Any]) -> None:
        """Protect the records of these subkeys of a key from replacement, instead of the subkeys protected before."""
        if subkeys:
            self._protected[key] = frozenset(subkeys)
        else:
            self._protected.pop(key, None)

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        if subkey is not None:
            return self.store_subkey(key, subkey, value, expiration_time)
        budget = self._favoured.get(key, self._others)
        is_admitted = budget.admit((key, None), len(value), expiration_time, time.time())
        return is_admitted and super().store(key, value, expiration_time)

    def store_subkey(self, key: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        held, budget = self.get(key), self._favoured.get(key, self._others)
        is_dictionary = held is not None and isinstance(held.value, HIVEMIND.protocol.DictionaryDHTValue)
        records: Any = held.value if is_dictionary else {}
        dropped = self._choose_dropped(key, records) if subkey not in records and len(records) >= RECORDS else None
        instead_of = None if dropped is None else (key, dropped)
        if not budget.admit((key, subkey), len(value), expiration_time, time.time(), instead_of):
            return False
        if dropped is not None:
            del records[dropped]
            # hivemind keeps a heap entry of each dropped record until its expiration, so a long heap is rebuilt.
            if len(records.expiration_heap) > 2 * len(records.key_to_heap) + SLACK:
                records.expiration_heap[:] = records.key_to_heap.values()
                heapq.heapify(records.expiration_heap)
        is_stored: bool = super().store_subkey(key, subkey, value, expiration_time)
        return is_stored

    def _choose_dropped(self, key: Any, records: Any) -> Any:
        """Return the subkey of a record to drop for a new one: a random subkey from the newer half of `records`, which
        are in order of arrival, except the subkeys protected by `protect`."""
        newer = [subkey for subkey, _ in records.items()][RECORDS // 2 :]
        return self._chance.choice([one for one in newer if one not in self._protected.get(key, ())])


def bounded(storage: Any) -> _BoundedStorage:
    """Return a bounded storage with the records of `storage`, as far as there is room."""
    bounded_copy = _BoundedStorage()
    for key, (value, expiration) in list(storage.items()):
        if isinstance(value, HIVEMIND.protocol.DictionaryDHTValue):
            for subkey, (inner, inner_expiration) in list(value.items()):
                bounded_copy.store_subkey(key, subkey, inner, inner_expiration)
        else:
            bounded_copy.store(key, value, expiration)
    return bounded_copy
