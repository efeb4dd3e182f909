"""The key file that makes a machine the same peer again at the next start, held by one process at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peers.errors import LocalNetworkError
from peers.values.identity import Identity
from peers.values.system import make_private_folder


def default_identity_path() -> Path:
    """`~/.config/diloco-peer/identity.pem`, or where XDG_CONFIG_HOME says."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "diloco-peer" / "identity.pem"


def usable_path(path: Path | None) -> Path:
    """`path`, or the default one, whose folder is made if need be. Raises: LocalNetworkError when it cannot be."""
    if path is not None:
        return path
    path = default_identity_path()
    try:
        make_private_folder(path.parent)
    except OSError as error:
        raise LocalNetworkError(
            f"cannot make the folder {path.parent} for the identity file: {error.strerror}.",
            "Name another file with --identity.",
        ) from error
    return path


def load_identity(path: Path | None) -> Identity:
    """The identity in `path`, made if there is none, to sign with. Raises: LocalNetworkError."""
    return Identity.load_or_create(usable_path(path))


@contextmanager
def hold_identity(path: Path | None) -> Iterator[Identity]:
    """The identity in `path`, made if there is none, to be a peer with.

    Two peers with one identity would answer for each other, so the file is locked meanwhile.

    Raises: LocalNetworkError when another process holds it, or the file cannot be read or made.
    """
    path = usable_path(path)
    identity = load_identity(path)
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LocalNetworkError(
                f"the identity {path} is in use by another diloco-peer on this machine.",
                "Give this one its own: --identity other.pem (it is made if it does not exist).",
            ) from error
        yield identity
