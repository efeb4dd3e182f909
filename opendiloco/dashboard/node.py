"""A bootstrap node's dashboard: all runs that are announced to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable

from opendiloco.checkpoints.archive import Archive
from opendiloco.dashboard.server import dashboard
from opendiloco.dashboard.sources import NodeSources
from peers.net.transport import HivemindTransport
from peers.values.manifest import SignedManifest


class NodeDashboard:
    """Shows the runs of a node, with the logs of those that its archive keeps."""

    def __init__(self, listening: socket.socket, archive: Archive | None) -> None:
        self._listening = listening
        self._archive = archive

    async def keep(self, transport: HivemindTransport, manifests: Iterable[SignedManifest]) -> None:
        """Serve until cancelled."""
        sources = NodeSources(transport, self._archive.kept if self._archive else None)
        async with dashboard(self._listening, lambda: sources.current(manifests)):
            await asyncio.Event().wait()
