"""Keeping a run findable without its bootstrap nodes: each peer remembers others, and repeats the manifest."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from peers.network.bootstrap import MANIFEST_LIFETIME, REPUBLISH_INTERVAL
from peers.network.daemon import NETWORK_ERRORS
from peers.network.remembered import RememberedPeers
from peers.presence.heartbeat import Heartbeat
from peers.values.manifest import SignedManifest

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 10.0  # seconds


class ManifestKeeper(Protocol):
    async def store_manifest(self, manifest: SignedManifest, ttl: float) -> None: ...


async def keep_findable(
    network: ManifestKeeper,
    manifest: SignedManifest,
    others: Callable[[], Iterable[Heartbeat]],
    remembered: RememberedPeers | None = None,
) -> None:
    """Put the manifest into the DHT again and again, and remember where `others` are, until cancelled."""
    repeated_at = -float("inf")
    while True:
        if time.monotonic() - repeated_at >= REPUBLISH_INTERVAL:
            repeated_at = time.monotonic()
            await _repeat(network, manifest)
        if remembered is not None:
            now = time.time()
            remembered.observe(others(), now)
            await asyncio.to_thread(remembered.save_when_due, now)
        await asyncio.sleep(LOOK_INTERVAL)


async def _repeat(network: ManifestKeeper, manifest: SignedManifest) -> None:
    try:
        await network.store_manifest(manifest, MANIFEST_LIFETIME)
    except NETWORK_ERRORS as error:  # what to do about it is another's concern
        logger.debug("the manifest is not in the DHT: %r", error)
