"""A machine's identity: the key file that makes it the same peer again, and the check that no other machine has it."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from peers.errors import CopiedKeyError, DilocoPeerError, IdentityFileError, InUseError
from peers.presence.heartbeat import Heartbeat
from peers.values.identity import Identity
from peers.values.system import cancel_and_wait, make_private_folder, now, start_task

if TYPE_CHECKING:
    from peers.network.transport import HivemindTransport
    from peers.protocol.peer import Peer

logger = logging.getLogger(__name__)


def _default_path() -> Path:
    """`~/.config/diloco-peer/identity.pem`, or where XDG_CONFIG_HOME says."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "diloco-peer" / "identity.pem"


def usable_path(path: Path | None) -> Path:
    """Return `path`, or the default one, whose folder is made if need be. Raises: IdentityFileError."""
    if path is not None:
        return path
    path = _default_path()
    try:
        make_private_folder(path.parent)
    except OSError as error:
        raise IdentityFileError(
            f"cannot make the folder {path.parent} for the identity file: {error.strerror}.",
            "Name another file with --identity.",
        ) from error
    return path


def load_identity(path: Path | None) -> Identity:
    """Return the identity in `path`, made if there is none, to sign with. Raises: IdentityFileError."""
    path = usable_path(path)
    identity = Identity.load_or_create(path)
    if path.stat().st_mode & 0o077:
        logger.warning("other users of this machine can read or change the key file %s: run `chmod 600 %s`", path, path)
    return identity


@contextmanager
def hold_identity(path: Path | None) -> Iterator[Identity]:
    """Yield the identity in `path`, made if there is none, to be a peer with; the file is locked meanwhile.

    Raises: InUseError when another process holds it; IdentityFileError when the file cannot be read or made.
    """
    path = usable_path(path)
    identity = load_identity(path)
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InUseError(
                f"the identity {path} is in use by another diloco-peer on this machine.",
                "Give this one its own: --identity other.pem (it is made if it does not exist).",
            ) from error
        yield identity


LOOK = 0.5  # seconds between two looks while we say nothing yet
LOOK_LATER = 2.0  # seconds between two looks afterwards


@asynccontextmanager
async def listening(transport: HivemindTransport, run_id: str) -> AsyncIterator[asyncio.Task[None]]:
    """Listen beside other work. Yields what to wait for before we say anything; it raises CopiedKeyError."""
    task = start_task(listen(transport, run_id))
    try:
        yield task
    finally:
        await cancel_and_wait(task)


async def listen(transport: HivemindTransport, run_id: str) -> None:
    """Listen until it is certain that no other machine has our key. Raises: CopiedKeyError when one has it."""
    copies, has_told = transport.discovery_of(run_id).copies, False
    await transport.heartbeats(run_id)
    while copies.may_live(now()):
        if not has_told:
            logger.info("this machine's key was heard of a moment ago; listening whether another machine has it")
            has_told = True
        await asyncio.sleep(LOOK)
        await transport.heartbeats(run_id)
        if (other := copies.living(now())) is not None:
            raise _copied(transport.peer_id, other)


async def doubled(transport: HivemindTransport, run_id: str, peer: Peer) -> DilocoPeerError:
    """Wait for as long as we may go on beside another machine that speaks with our key, should there be one; returns
    the error to end with.

    Of two that began at once, neither heard of the other before, so one must go, and the same one as both see it:
    the one that has no say in the log's next entry; if that tells nothing, the one with the smaller number.
    """
    while True:
        await asyncio.sleep(LOOK_LATER)
        other = transport.discovery_of(run_id).copies.living(now())
        if other is None:
            continue
        counts, others_counts = (peer.log.counts(peer.me, one.incarnation) for one in (peer, other))
        is_lower = (peer.incarnation, peer.start) < other.life
        if (others_counts and not counts) or (counts == others_counts and is_lower):
            return _copied(peer.me, other)


def _copied(me: str, other: Heartbeat) -> CopiedKeyError:
    """Return what to end with beside another machine that has our key."""
    where = f", reached at {other.addresses[0]}" if other.addresses else ""
    return CopiedKeyError(
        f"another machine{where} takes part in {other.run} with the key of this one ({me}).",
        "Give this machine a key of its own: join with --identity and a new file. Leave identity files out of images.",
    )
