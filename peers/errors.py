"""The error classes of all packages. The message of an error that a user can see says its cause and a remedy.

The class says whose mistake it was, as in h11: `LocalProtocolError` is a bug of this program, `RemoteProtocolError` is
a peer's fault, and the other errors come from outside (a wrong file, an unreachable address, a full disk).
"""

from __future__ import annotations

import errno
import socket


class DilocoPeerError(Exception):
    """Base of all errors that the command line shows as one line: cause, then remedy.

    `exit_code` is the exit code of the process; docs/commands.md has the table of codes.
    """

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class ManifestError(DilocoPeerError):
    """A manifest, invite or run id that is malformed, tampered with or inconsistent."""

    exit_code = 3


class OwnAddressError(ManifestError):
    """An address to listen on or to announce that this node cannot have, so that a person must give another one."""

    exit_code = 2


class SwarmUnreachableError(DilocoPeerError):
    """A run that cannot be reached: no bootstrap node answers or knows it, or no peer has its state."""

    exit_code = 4


class LocalNetworkError(DilocoPeerError):
    """A failure on this machine's side of the network, such as a bad address, or a failure of libp2p's daemon."""

    exit_code = 5


class IdentityFileError(LocalNetworkError):
    """An identity file that cannot be read or saved, or has no key, so that a person must name another one."""

    exit_code = 2


class FullDiskError(IdentityFileError):
    """An identity file, or its folder, that cannot be saved because the disk or a quota is full."""

    exit_code = 6


class FolderError(LocalNetworkError):
    """A folder on this machine that cannot be written to, so that a person must name another one or free space."""

    exit_code = 6


class InUseError(LocalNetworkError):
    """A port, identity file or archive that another program on this machine uses; a person must choose another one."""

    exit_code = 15


LISTEN_ERRORS: dict[int | None, type[DilocoPeerError]] = {
    errno.EADDRINUSE: InUseError,
    socket.EAI_NONAME: OwnAddressError,  # a mistyped host
}
"""The errors of listening at an address that a person must change, by errno. All others are `LocalNetworkError`s."""


class AdmissionError(DilocoPeerError):
    """A refusal to admit a peer to a run by invitation: its ticket is missing, expired, revoked or another peer's."""

    exit_code = 13


class CopiedKeyError(DilocoPeerError):
    """Error: another machine takes part in the run with this machine's key."""

    exit_code = 14


class LocalProtocolError(DilocoPeerError):
    """A bug of this program that broke the protocol: an event that is illegal in the present state."""

    exit_code = 70


class RemoteProtocolError(DilocoPeerError):
    """A peer's violation of the protocol. The peer is dropped from the exchange or transfer; this program continues."""

    exit_code = 70

    def __init__(self, peer: str, message: str) -> None:
        super().__init__(f"peer {peer}: {message}")
        self.peer = peer


def quoted(text: str, limit: int) -> str:
    """Return a text in quotes for a message. A text longer than `limit` characters is cut, and ends in `…`."""
    return repr(text if len(text) <= limit else f"{text[:limit]}…")


def remedy_for(error: OSError, otherwise: str) -> str:
    """Return the remedy for a failed write: to free space if the disk or a quota is full, else `otherwise`."""
    return "Free some space there." if is_full(error) else otherwise


def is_full(error: OSError) -> bool:
    """Return True if a write failed because the disk or a quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
