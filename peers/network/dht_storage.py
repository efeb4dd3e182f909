"""The records that a node of hivemind's DHT keeps, in a bounded number of bytes: manifests, and heartbeats of peers.

A node refuses every record that does not prove itself: a manifest under the key that its own digest gives it, a
heartbeat signed by the peer that its subkey names, under the key of the run that it is about. Where the node has the
manifest of a run by invitation, the peer must be admitted, too. Nothing else can be stored, and no node can overwrite
another's records.
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

MANIFEST_LIFETIME_LIMIT = 24 * 3600.0  # seconds
RECORD_OVERHEAD = 1000  # bytes that Python takes to keep any record, however small
SLACK = 64
"""Records that are not kept any more, and may wait until they would have expired: beside twice as many as are kept."""
CLOCK_TOLERANCE = 60.0  # seconds that a peer's clock may be ahead of ours


def manifest_key(run_id: str) -> bytes:
    """DHT key of a run's manifest; its value is the packed SignedManifest."""
    return f"diloco-peer/manifest/{run_id}".encode()


def heartbeats_key(run_id: str) -> bytes:
    """DHT key of a run's heartbeats; subkeys are peer ids, values signed heartbeats."""
    return f"diloco-peer/heartbeats/{run_id}".encode()


def _key_digest(key: bytes) -> bytes:
    """Where hivemind's DHT keeps a key: SHA-1 of the bytes, a place on the ring, not a proof of anything."""
    return hashlib.sha1(key, usedforsecurity=False).digest()


def _record_is_valid(
    key: bytes, subkey: bytes, value: bytes, expiration: float, now: float, admissions: Admissions
) -> bool:
    """Whether a node may keep a record.

    key: digest of the DHT key, 20 bytes; subkey, value: as hivemind packs them (msgpack; a record without subkey has
    None); times in seconds since the epoch.
    """
    try:
        owner, data = decode(subkey), decode(value)
        if not isinstance(data, bytes):
            return False
        if owner is None:
            manifest = SignedManifest.unpack(data)
            is_there = key == _key_digest(manifest_key(manifest.run_id))
            if is_there:
                admissions.learn(manifest, is_ours=False)
            return is_there and expiration <= now + MANIFEST_LIFETIME_LIMIT
        heartbeat = Heartbeat.verify(data)
    except (WireError, DilocoPeerError):
        return False
    # The DHT prefers what expires later: past the signed expiration, an old heartbeat could displace a newer one.
    timely = expiration <= heartbeat.expires <= now + CLOCK_TOLERANCE + heartbeat.lifetime
    is_its_own = key == _key_digest(heartbeats_key(heartbeat.run)) and owner == heartbeat.peer
    return is_its_own and timely and admissions.admits(heartbeat, now)


class _RecordBudget:
    """Memory for records: what is kept until it expires, and no more than `limit` bytes of it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._total = 0
        self._kept: dict[Hashable, tuple[float, int]] = {}  # expiration, bytes
        self._order = count()
        self._expiring: list[tuple[float, int, Hashable]] = []

    def admit(
        self, record: Hashable, size: int, expiration: float, now: float, instead_of: Hashable | None = None
    ) -> bool:
        """Whether a record of `size` bytes may be kept; times in seconds since the epoch. Only what is newer may
        replace one of the same name. If it may, the record that it is kept `instead_of` is not any more."""
        while self._expiring and self._expiring[0][0] < now:
            expired, _, name = heapq.heappop(self._expiring)
            if name in self._kept and self._kept[name][0] == expired:
                self._total -= self._kept.pop(name)[1]
        before, freed = self._kept.get(record, (now, 0))
        _, given_up = self._kept.get(instead_of, (now, 0))
        size += RECORD_OVERHEAD
        if expiration <= before or self._total - freed - given_up + size > self._limit:
            return False
        self._kept.pop(instead_of, None)
        self._total += size - freed - given_up
        self._kept[record] = expiration, size
        heapq.heappush(self._expiring, (expiration, next(self._order), record))
        if len(self._expiring) > 2 * len(self._kept) + SLACK:
            self._expiring = [(expires, next(self._order), name) for name, (expires, _) in self._kept.items()]
            heapq.heapify(self._expiring)
        return True


DHTLocalStorage: Any = HIVEMIND.protocol.DHTLocalStorage
RECORDS = 256  # under one key: all are sent to each node that asks. Of a run's peers a sample is enough
OWN_BYTES = RECORDS * (SIZE_LIMIT + RECORD_OVERHEAD)  # for each key that this node has a part in
OTHERS_BYTES = 64 << 20  # for everything else together


class RecordValidator(HIVEMIND.validation.RecordValidatorBase):  # type: ignore[misc,name-defined]  # no types
    """A check that keeps records without a proof out of this node's part of the DHT."""

    def __init__(self, admissions: Admissions) -> None:
        self._admissions = admissions

    def validate(self, record: Any) -> bool:
        return _record_is_valid(
            record.key, record.subkey, record.value, record.expiration_time, time.time(), self._admissions
        )


class _BoundedStorage(DHTLocalStorage):  # type: ignore[misc]  # hivemind has no types
    """Refuses new records when they would take more memory than there is for them.

    What lies under a favoured key has room of its own, which strangers with made-up runs can't fill. Where one key
    has all the records that it may, a new one replaces another, so that the first to come cannot keep all others out:
    one of the half that was there for the shorter time, drawn by chance. The other half stays, as do those of the peers
    that the run's manifest names, for as long as they are renewed in time: a flood came later.
    """

    def __init__(self, chance: random.Random | None = None) -> None:
        super().__init__()
        self._chance = chance or random.Random()
        self._favoured: dict[Any, _RecordBudget] = {}
        self._others = _RecordBudget(OTHERS_BYTES)
        self._named: dict[Any, frozenset[Any]] = {}

    def favour(self, key: Any) -> None:
        self._favoured.setdefault(key, _RecordBudget(OWN_BYTES))

    def disfavour(self, key: Any) -> None:
        """Give a key no more room than all others: what lies there stays until it expires."""
        self._favoured.pop(key, None)

    def name(self, key: Any, subkeys: Collection[Any]) -> None:
        """Never replace the records of these subkeys under a key. Those named before are no longer kept."""
        if subkeys:
            self._named[key] = frozenset(subkeys)
        else:
            self._named.pop(key, None)

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        if subkey is not None:
            return self.store_subkey(key, subkey, value, expiration_time)
        budget = self._favoured.get(key, self._others)
        is_admitted = budget.admit((key, None), len(value), expiration_time, time.time())
        return is_admitted and super().store(key, value, expiration_time)

    def store_subkey(self, key: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        held, budget = self.get(key), self._favoured.get(key, self._others)
        is_dictionary = held is not None and isinstance(held.value, HIVEMIND.protocol.DictionaryDHTValue)
        under: Any = held.value if is_dictionary else {}
        leaving = self._leaving(key, under) if subkey not in under and len(under) >= RECORDS else None
        instead_of = None if leaving is None else (key, leaving)
        if not budget.admit((key, subkey), len(value), expiration_time, time.time(), instead_of):
            return False
        if leaving is not None:
            del under[leaving]
            # hivemind would keep a heap entry of each record until it had expired.
            if len(under.expiration_heap) > 2 * len(under.key_to_heap) + SLACK:
                under.expiration_heap[:] = under.key_to_heap.values()
                heapq.heapify(under.expiration_heap)
        is_stored: bool = super().store_subkey(key, subkey, value, expiration_time)
        return is_stored

    def _leaving(self, key: Any, under: Any) -> Any:
        """Return whose record a new one replaces. hivemind keeps them in the order in which they came."""
        newer = [subkey for subkey, _ in under.items()][RECORDS // 2 :]
        return self._chance.choice([one for one in newer if one not in self._named.get(key, ())])


def bounded(storage: Any) -> _BoundedStorage:
    """A bounded storage with the same records, as far as there is room."""
    copy = _BoundedStorage()
    for key, (value, expiration) in list(storage.items()):
        if isinstance(value, HIVEMIND.protocol.DictionaryDHTValue):
            for subkey, (inner, inner_expiration) in list(value.items()):
                copy.store_subkey(key, subkey, inner, inner_expiration)
        else:
            copy.store(key, value, expiration)
    return copy
