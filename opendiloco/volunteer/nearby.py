"""The local network: where a bootstrap node says that it is there, and a newcomer who knows no address looks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from peers.network.neighbours import announced
from peers.network.transport import HivemindTransport
from peers.values.manifest import SignedManifest


class Nearby:
    """What a bootstrap node says in the local network, beside all else: it helps the peers of any run."""

    async def keep(self, transport: HivemindTransport, manifests: Iterable[SignedManifest]) -> None:
        async with announced(transport.peer_id, "", transport.addresses):
            await asyncio.Event().wait()
