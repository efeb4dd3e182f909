"""Whether this machine is the only one with its key: an image or a disk that was copied has the identity file, too."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from peers.errors import CopiedKeyError, DilocoPeerError
from peers.log.state import LogState
from peers.presence.copies import Copies
from peers.presence.heartbeat import Heartbeat
from peers.values.system import now

logger = logging.getLogger(__name__)

LOOK = 0.5  # seconds between two looks while we say nothing yet
LOOK_LATER = 2.0  # seconds between two looks afterwards


class Heard(Protocol):
    @property
    def copies(self) -> Copies: ...


class ListeningTransport(Protocol):
    peer_id: str

    async def heartbeats(self, run_id: str) -> list[Heartbeat]: ...
    def discovery_of(self, run_id: str) -> Heard: ...


@asynccontextmanager
async def listening(transport: ListeningTransport, run_id: str) -> AsyncIterator[asyncio.Task[None]]:
    """Begin to listen, beside what else there is to do before we say anything of ourselves.

    Yields what is to be waited for before that; it raises CopiedKeyError.
    """
    task = asyncio.create_task(listen(transport, run_id))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def listen(transport: ListeningTransport, run_id: str) -> None:
    """Listen until it is certain that nobody speaks with our key: at once, if nobody did a moment ago.

    Raises: CopiedKeyError when somebody does.
    """
    copies, has_told = transport.discovery_of(run_id).copies, False
    await transport.heartbeats(run_id)
    while copies.may_live(now()):
        if not has_told:
            logger.info("this machine's key was heard of a moment ago; listening whether another machine has it")
            has_told = True
        await asyncio.sleep(LOOK)
        await transport.heartbeats(run_id)
        check(transport, run_id)


def check(transport: ListeningTransport, run_id: str) -> None:
    """Raises: CopiedKeyError when another machine certainly speaks with our key."""
    if (other := transport.discovery_of(run_id).copies.living(now())) is not None:
        raise copied(transport.peer_id, other)


async def doubled(
    transport: ListeningTransport, run_id: str, incarnation: Callable[[], int], log: Callable[[], LogState]
) -> DilocoPeerError:
    """Wait for as long as we may go on beside another machine that speaks with our key, should there be one; returns
    the error to end with.

    Of two that began at once, neither heard of the other before, so one must go, and the same one as both see it:
    whoever has no say in the log's next entry; if neither has, the one with the smaller `incarnation`, which is ours.
    """
    me = transport.peer_id
    while True:
        await asyncio.sleep(LOOK_LATER)
        other = transport.discovery_of(run_id).copies.living(now())
        if other is None:
            continue
        ours = incarnation()
        counts, others_counts = log().counts(me, ours), log().counts(me, other.incarnation)
        if others_counts or (not counts and ours < other.incarnation):
            return copied(me, other)


def copied(me: str, other: Heartbeat) -> CopiedKeyError:
    """Return what to end with beside another machine that has our key."""
    where = f", reached at {other.addresses[0]}" if other.addresses else ""
    return CopiedKeyError(
        f"another machine{where} takes part in {other.run} with the key of this one ({me}).",
        "Give this machine a key of its own: join with --identity and a new file. Leave identity files out of images.",
    )
