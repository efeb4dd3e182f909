"""A machine's identity: the key file that makes the machine the same peer after a restart, and the check that no other
machine uses the same key."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import psutil

from peers.errors import (
    CopiedKeyError,
    DilocoPeerError,
    FullDiskError,
    IdentityFileError,
    InUseError,
    is_full,
    remedy_for,
)
from peers.presence.heartbeat import Heartbeat
from peers.values.identity import Identity
from peers.values.system import cancel_and_wait, make_private_folder, now, start_task

if TYPE_CHECKING:
    from peers.network.transport import HivemindTransport
    from peers.protocol.peer import Peer

logger = logging.getLogger(__name__)


def default_path() -> Path:
    """Return the path of this machine's key file, unless its owner names another one."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "diloco-peer" / "identity.pem"


def usable_path(path: Path | None) -> Path:
    """Return `path` or, if it is None, the default path, and create the folder of the latter. Raises: IdentityFileError
    if that fails."""
    if path is not None:
        return path
    path = default_path()
    try:
        make_private_folder(path.parent)
    except OSError as error:
        raise (FullDiskError if is_full(error) else IdentityFileError)(
            f"cannot make the folder {path.parent} for the identity file: {error.strerror}.",
            remedy_for(error, "Name another file with --identity."),
        ) from error
    return path


def load_identity(path: Path | None) -> Identity:
    """Return the identity whose key is in the file `path` (None: the default file), and create a missing file with a
    new key. Peers use `hold_identity` instead, which also locks the file. Raises: IdentityFileError."""
    path = usable_path(path)
    identity = Identity.load_or_create(path)
    if path.stat().st_mode & 0o077:
        logger.warning("other users of this machine can read or change the key file %s: run `chmod 600 %s`", path, path)
    return identity


@contextmanager
def hold_identity(path: Path | None, is_node: bool = False) -> Iterator[Identity]:
    """Yield the identity whose key is in the file `path`, for a peer or a bootstrap node, and lock the
    file during the `with` block. If the file is missing, create it with a new key.

    Raises: InUseError when another process holds the lock; IdentityFileError when the file cannot be read or made.
    """
    path = usable_path(path)
    identity = load_identity(path)
    with path.open("rb") as file:
        lock(
            file,
            f"the identity {path} is in use",
            "A key of its own (--identity other.pem, made if it does not exist) makes this another "
            + ("node." if is_node else "peer, which a run by invitation admits only with its own ticket."),
        )
        yield identity


def lock(file: IO[bytes], in_use: str, otherwise: str) -> None:
    """Lock an open file until it is closed. Raises: InUseError if another process holds the lock; its message begins
    with `in_use`, and its remedy ends with `otherwise`."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InUseError(
            f"{in_use} by {_user_of(Path(file.name))} on this machine.",
            f"Wait until that ends, or end it. {otherwise}",
        ) from error


def _user_of(path: Path) -> str:
    """Return the command and the id of another process of this user that has the file `path` open."""
    for process in psutil.process_iter(["name", "cmdline", "open_files"]):
        if process.pid != os.getpid() and any(
            file.path == str(path.resolve()) for file in process.info["open_files"] or ()
        ):
            words = process.info["cmdline"] or []
            command = ["diloco-peer", *words[3:4]] if words[1:3] == ["-m", "opendiloco.cli"] else words[1:3]
            program, *words = command or [process.info["name"]]
            return f"`{' '.join((Path(program).name, *words))}` (process {process.pid})"
    return "another process"


LOOK = 0.5  # while this machine starts, seconds between two checks for another machine with its key
LOOK_LATER = 2.0  # after this machine's start, seconds between two checks for another machine with its key


@asynccontextmanager
async def listening(transport: HivemindTransport, run_id: str) -> AsyncIterator[asyncio.Task[None]]:
    """Check in the background that no other machine uses this key. Yield the check's task, which this machine must
    await before it publishes anything.

    The task raises CopiedKeyError.
    """
    task = start_task(listen(transport, run_id))
    try:
        yield task
    finally:
        await cancel_and_wait(task)


async def listen(transport: HivemindTransport, run_id: str) -> None:
    """Wait until it is certain that no other machine uses this key. Raises: CopiedKeyError if another machine uses the
    key."""
    copies, has_logged = transport.discovery_of(run_id).copies, False
    await transport.heartbeats(run_id)
    while copies.may_live(now()):
        if not has_logged:
            logger.info("this machine's key was in use a moment ago; checking whether another machine uses it")
            has_logged = True
        await asyncio.sleep(LOOK)
        await transport.heartbeats(run_id)
        if (other := copies.living(now())) is not None:
            raise _copied(transport.peer_id, other)


async def wait_for_copy(transport: HivemindTransport, run_id: str, peer: Peer) -> DilocoPeerError:
    """Wait until another machine with the same key is heard and this process, not the other, must end. Return the error
    with which this process ends.

    If two machines began at the same time, neither could hear the other before, so one must end, and both must choose
    the same one. The one without a vote on the log's next entry ends; if that does not decide, the one with the lower
    number.
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
    where = f", reached at {other.addresses[0]}" if other.addresses else ""
    return CopiedKeyError(
        f"another machine{where} takes part in {other.run} with the key of this one ({me}).",
        "Give this machine a key of its own: join with --identity and a new file. Leave identity files out of images.",
    )
