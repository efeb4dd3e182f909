"""A node finds the swarm at remembered addresses when the initial peers are gone: at its start, and later."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from peers.network.transport import HivemindTransport
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest

pytestmark = [pytest.mark.swarm, pytest.mark.thorough]

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
MANIFEST = SignedManifest.create(Identity.generate(), "tiny", {"name": "tiny"})


@asynccontextmanager
async def node(**options: Any) -> AsyncIterator[HivemindTransport]:
    made = await HivemindTransport.create(Identity.generate(), listen=LOOPBACK, local=True, **options)
    try:
        yield made
    finally:
        await made.close()


def nobody() -> str:
    """An address at which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"/ip4/127.0.0.1/tcp/{unused.getsockname()[1]}/p2p/{Identity.generate().peer_id}"


async def is_found_by(reader: HivemindTransport) -> None:
    """Wait until a node finds the manifest."""
    async with asyncio.timeout(240):
        while await reader.find_manifest(MANIFEST.run_id) is None:
            await asyncio.sleep(0.1)


def test_a_node_starts_through_a_remembered_one() -> None:
    async def scenario() -> None:
        async with node() as volunteer:
            await volunteer.store_manifest(MANIFEST, 60)
            async with node(initial_peers=[nobody()], remembered=lambda: volunteer.addresses) as back:
                await is_found_by(back)

    asyncio.run(scenario())


def test_a_node_that_is_alone_looks_where_it_remembers() -> None:
    async def scenario() -> None:
        known: list[str] = []
        async with node() as bootstrap:
            alone = await HivemindTransport.create(
                Identity.generate(), bootstrap.addresses, LOOPBACK, local=True, remembered=lambda: known
            )
        try:
            async with node() as volunteer:
                await volunteer.store_manifest(MANIFEST, 60)
                known.extend(volunteer.addresses)
                await is_found_by(alone)
        finally:
            await alone.close()

    asyncio.run(scenario())
