"""The error tree. Every error a user can meet says what happened and what to do about it.

Whose mistake it was decides the class, as in h11: `LocalProtocolError` is a bug of ours, `RemoteProtocolError` is
a peer's, and everything else is the world's (a wrong file, an unreachable address, a full disk).
"""

from __future__ import annotations


class DilocoPeerError(Exception):
    """Base of all errors that the command line shows as one line: cause, then remedy.

    `exit_code` is what the process ends with; docs/commands.md lists the codes in one table.
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


class SwarmUnreachableError(DilocoPeerError):
    """No bootstrap node answered, or nobody knows the run."""

    exit_code = 4


class LocalNetworkError(DilocoPeerError):
    """This machine's side of the network: a port in use, an identity file, libp2p's daemon."""

    exit_code = 5


class InUseError(LocalNetworkError):
    """A port or an identity file that another program on this machine uses: only a person can choose another."""

    exit_code = 15


class AdmissionError(DilocoPeerError):
    """A run by invitation does not admit this machine: its ticket is missing, expired, revoked or for somebody else."""

    exit_code = 13


class CopiedKeyError(DilocoPeerError):
    """Another machine takes part in the run with the same key."""

    exit_code = 14


class LocalProtocolError(DilocoPeerError):
    """Our own code broke the protocol: an event that is illegal in the present state."""

    exit_code = 70


class RemoteProtocolError(DilocoPeerError):
    """A peer broke the protocol. The peer is dropped from what it was part of; we go on."""

    exit_code = 70

    def __init__(self, peer: str, message: str) -> None:
        super().__init__(f"peer {peer}: {message}")
        self.peer = peer


def quoted(text: str, limit: int) -> str:
    """Return a text in quotes, for a message. One that is longer than `limit` characters is cut, and ends in `…`."""
    return repr(text if len(text) <= limit else f"{text[:limit]}…")
