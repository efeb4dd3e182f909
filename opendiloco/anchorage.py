"""What a machine knows of a run's anchors when it begins, and where it keeps what it hears of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from opendiloco.checkpoints.run_folder import RunFolder
from opendiloco.run import Run
from peers.net.daemon import peer_id_of
from peers.net.transport import HivemindTransport
from peers.values.anchors import AnchorError, Anchors
from peers.values.whole_files import write_whole

logger = logging.getLogger(__name__)

ASK_LIMIT = 5.0  # seconds that a start may wait for nodes that do not answer; peers know it, too


async def ask_for_anchors(
    transport: HivemindTransport, run: Run, addresses: Sequence[str], folder: RunFolder | None = None
) -> None:
    """Learn what a run's anchors have signed: from last time, as the folder has it, and from the nodes at the
    `addresses`. What is heard later is kept in the folder, too."""
    transport.anchorage.learn(run.manifest)
    if folder is not None:
        _keep_anchors(transport, run.run_id, folder)
    if run.manifest.anchors:
        with suppress(TimeoutError):
            async with asyncio.timeout(ASK_LIMIT):
                await transport.anchorage.exchange_with(transport, run.run_id, map(peer_id_of, addresses))


def _keep_anchors(transport: HivemindTransport, run_id: str, folder: RunFolder) -> None:
    path = folder.anchors
    try:
        transport.anchorage.take(run_id, path.read_bytes())
    except FileNotFoundError:
        pass
    except (OSError, AnchorError) as error:
        logger.warning("%s is passed over: %s", path, error)

    def keep(run: str, packed: bytes) -> None:
        if run == run_id:
            with suppress(OSError):  # others have it, too
                write_whole(path, [packed])

    transport.anchorage.on_news = keep


def anchor_lines(anchors: Anchors) -> list[str]:
    """Return a line for each anchor that has signed something."""
    lines = []
    for key in anchors.keys:
        newest = anchors.newest_of(key)
        said = [f"has signed outer step {newest.index} ({newest.head.hex()[:8]})"] if newest is not None else []
        if key in anchors.liars:
            said.append(f"HAS SIGNED TWO LOGS and is not believed from outer step {anchors.liars[key]} on")
        if said:
            lines.append(f"anchor …{key[-8:]} {', and '.join(said)}")
    return lines
