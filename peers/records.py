"""What a run keeps in the DHT: its manifest, and the heartbeats of its peers, one subkey each.

A node refuses every record that does not prove itself: a manifest under the key that its own digest gives it, a
heartbeat signed by the peer that its subkey names, under the key of the run that it is about. Nothing else can be
stored, and nobody can overwrite what is somebody else's.
"""

from __future__ import annotations

import hashlib

from peers.errors import DilocoPeerError
from peers.heartbeat import Heartbeat
from peers.manifest import SignedManifest
from peers.wire import WireError, decode

MANIFEST_LIFETIME_LIMIT = 24 * 3600.0  # seconds
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


def record_is_valid(key: bytes, subkey: bytes, value: bytes, expiration: float, now: float) -> bool:
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
            return key == key_digest(manifest_key(manifest.run_id)) and expiration <= now + MANIFEST_LIFETIME_LIMIT
        heartbeat = Heartbeat.verify(data)
    except (WireError, DilocoPeerError):
        return False
    # The DHT prefers what expires later: past the signed expiration, an old heartbeat could displace a newer one.
    timely = expiration <= heartbeat.expires <= now + CLOCK_TOLERANCE + heartbeat.lifetime
    return key == key_digest(heartbeats_key(heartbeat.run)) and owner == heartbeat.peer and timely
