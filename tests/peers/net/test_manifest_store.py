"""The bootstrap node's memory for manifests."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from peers.errors import LocalNetworkError
from peers.health import Health
from peers.net import bootstrap
from peers.net.bootstrap import QUIET_LIMIT, ManifestStore
from peers.presence.heartbeat import Heartbeat
from peers.streams.channel import RefusalError
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest

ORGANISER = Identity.generate()
FIRST, SECOND, THIRD = (SignedManifest.create(ORGANISER, name, {}) for name in ("first", "second", "third"))


def kept(store: ManifestStore) -> set[str]:
    return {manifest.name for manifest in store}


def test_runs_that_nobody_uses_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: once somebody had announced a thousand runs, no other could be announced, ever."""
    monkeypatch.setattr(bootstrap, "MANIFEST_LIMIT", 2)
    store = ManifestStore(tmp_path)
    store.add(FIRST)
    store.add(SECOND)
    with pytest.raises(RefusalError, match="as many runs as it can"):
        store.add(THIRD)
    store.add(FIRST)
    long_ago = time.time() - QUIET_LIMIT - 1
    for manifest in (FIRST, SECOND):
        os.utime(tmp_path / f"{manifest.run_id}.manifest", (long_ago, long_ago))
    store.touch(FIRST.run_id)
    store.touch(THIRD.run_id)
    assert store.add(THIRD) == [SECOND.run_id]
    assert kept(store) == {"first", "third"}


def test_a_disk_that_takes_nothing_is_a_clear_error(tmp_path: Path) -> None:
    store = ManifestStore(tmp_path / "manifests")
    (tmp_path / "manifests").rmdir()
    with pytest.raises(LocalNetworkError, match="cannot keep manifests in "):
        store.add(FIRST)


def test_what_anchors_have_signed_is_kept_as_long_as_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "MANIFEST_LIMIT", 1)
    store = ManifestStore(tmp_path)
    assert store.anchors(FIRST.run_id) == b""
    store.add(FIRST)
    store.keep_anchors(FIRST.run_id, b"signed")
    store.keep_revocations(FIRST.run_id, b"revoked")
    assert (ManifestStore(tmp_path).anchors(FIRST.run_id), store.revocations(FIRST.run_id)) == (b"signed", b"revoked")
    long_ago = time.time() - QUIET_LIMIT - 1
    os.utime(tmp_path / f"{FIRST.run_id}.manifest", (long_ago, long_ago))
    store.add(SECOND)
    assert [path.name for path in tmp_path.iterdir()] == [f"{SECOND.run_id}.manifest"]


def test_each_manifest_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with a thousand runs did nothing else for a third of a second, every ten seconds."""
    store, checked = ManifestStore(tmp_path), list[str | None]()
    unpack = SignedManifest.unpack

    def counted(data: bytes, run_id: str | None = None) -> SignedManifest:
        checked.append(run_id)
        return unpack(data, run_id)

    monkeypatch.setattr(SignedManifest, "unpack", counted)
    store.add(FIRST)
    for _ in range(3):
        assert kept(store) == {"first"}
    store.add(SECOND)
    assert kept(store) == {"first", "second"}
    assert sorted(map(str, checked)) == sorted([FIRST.run_id, SECOND.run_id])
    (tmp_path / f"{FIRST.run_id}.manifest").unlink()
    assert kept(store) == {"second"}


def test_a_node_that_publishes_a_thousand_runs_is_well_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was called ill before it came to the end of them."""
    seconds, ill = 0.0, list[str]()
    health = Health(lambda: seconds)
    monkeypatch.setattr(bootstrap, "HEALTH", health)

    class Transport:
        async def store_manifest(self, manifest: SignedManifest, lifetime: float) -> None:
            nonlocal seconds
            seconds += 2.0
            ill.extend(health.reasons)

        async def heartbeats(self, run_id: str) -> list[Heartbeat]:
            return []

    store: Any = [FIRST] * 1000
    transport: Any = Transport()
    asyncio.run(bootstrap._publish(transport, store))
    assert ill == []
    seconds += 4 * bootstrap.REPUBLISH_INTERVAL
    assert health.reasons, "and what has stopped is told"
