"""What a run keeps in the DHT: its manifest, and the heartbeats of its peers, one subkey each.

A node refuses every record that does not prove itself: a manifest under the key that its own digest gives it, a
heartbeat signed by the peer that its subkey names, under the key of the run that it is about. Where the node has the
manifest of a run by invitation, the peer must be admitted, too. Nothing else can be stored, and nobody can overwrite
what is somebody else's.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Hashable
from itertools import count

from peers.errors import DilocoPeerError
from peers.network.admissions import Admissions
from peers.presence.heartbeat import Heartbeat
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


def key_digest(key: bytes) -> bytes:
    """Where hivemind's DHT keeps a key: SHA-1 of the bytes, a place on the ring, not a proof of anything."""
    return hashlib.sha1(key, usedforsecurity=False).digest()


def record_is_valid(
    key: bytes, subkey: bytes, value: bytes, expiration: float, now: float, admissions: Admissions | None = None
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
            is_there = key == key_digest(manifest_key(manifest.run_id))
            if is_there and admissions is not None:
                admissions.learn(manifest, is_ours=False)
            return is_there and expiration <= now + MANIFEST_LIFETIME_LIMIT
        heartbeat = Heartbeat.verify(data)
    except (WireError, DilocoPeerError):
        return False
    # The DHT prefers what expires later: past the signed expiration, an old heartbeat could displace a newer one.
    timely = expiration <= heartbeat.expires <= now + CLOCK_TOLERANCE + heartbeat.lifetime
    is_its_own = key == key_digest(heartbeats_key(heartbeat.run)) and owner == heartbeat.peer
    return is_its_own and timely and (admissions is None or admissions.admits(heartbeat, now))


class RecordBudget:
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
