"""What a machine knows of a run's signed heads when it begins, and where it keeps what it hears of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from opendiloco.run import Run
from opendiloco.storage.run_folder import RunFolder
from peers.network.daemon import peer_id_of
from peers.network.transport import HivemindTransport
from peers.values.signed_heads import SignedHeadsError, unpack_heads
from peers.values.system import write_whole

logger = logging.getLogger(__name__)

ASK_LIMIT = 5.0  # seconds that a start may wait for nodes that do not answer


async def ask_for_signed_heads(
    transport: HivemindTransport, run: Run, addresses: Sequence[str], folder: RunFolder | None = None
) -> None:
    """Learn what a run's archives have signed: from last time, as the folder has it, and from the nodes at the
    `addresses`. What is heard later is kept in the folder, too."""
    if folder is not None:
        _keep_heads(transport, run.run_id, folder)
    with suppress(TimeoutError):
        async with asyncio.timeout(ASK_LIMIT):
            await transport.runs.heads.ask(transport.call, run.run_id, map(peer_id_of, addresses))


def _keep_heads(transport: HivemindTransport, run_id: str, folder: RunFolder) -> None:
    path = folder.signed_heads
    try:
        transport.runs.heads.take(run_id, unpack_heads(path.read_bytes()))
    except FileNotFoundError:
        pass
    except (OSError, SignedHeadsError) as error:
        logger.warning("%s is passed over: %s", path, error)

    def keep(run: str, packed: bytes) -> None:
        if run == run_id:
            with suppress(OSError):  # others have it, too
                write_whole(path, [packed])

    transport.runs.heads.on_news = keep
