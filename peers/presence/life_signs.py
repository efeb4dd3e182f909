"""Signs of life: 22 bytes that show that a peer is still there, between two of its signed heartbeats.

A heartbeat carries a *seal*, the end of a chain of hashes whose beginning only its author knows. A sign of life shows
an earlier link of that chain, one further back for each `SLOT` that has passed. Anybody can hash a link and see that it
leads to the seal; nobody but the author can find the one before. So a sign costs a tenth of a heartbeat's bytes, and a
hundredth of the time that checking a signature takes. (The chain is that of Lamport, "Password authentication with
insecure communication", 1981.)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import blake2s
from typing import NamedTuple

from peers.presence.heartbeat import LINK_BYTES, Seal
from peers.values.identity import Identity
from peers.values.wire import digest_of

SLOT = 500  # milliseconds for which one link of a chain stands
SLOTS = 240  # links of a chain: it lasts for two minutes
TAG_BYTES = 8
SALT_BYTES = 16
SIGN = struct.Struct(f">{TAG_BYTES}sBB{LINK_BYTES}s")
SECRET_CONTEXT = b"diloco-peer chain of life signs\0"


class LifeSign(NamedTuple):
    """The owner of a chain was alive `slots` slots after it began, as `link` proves.

    `tag` names the chain. `number` says which heartbeat of that chain whoever passes this on has; nothing proves it.
    """

    tag: bytes
    slots: int
    number: int
    link: bytes


def pack_signs(signs: Iterable[LifeSign]) -> bytes:
    return b"".join(SIGN.pack(*sign) for sign in signs)


def unpack_signs(packed: bytes) -> list[LifeSign]:
    """Raises: ValueError when it is not a whole number of signs."""
    if len(packed) % SIGN.size:
        raise ValueError(f"{len(packed)} bytes are no whole number of signs of life")
    return [LifeSign(*fields) for fields in SIGN.iter_unpack(packed)]


def tag_of(peer: str, seal: Seal) -> bytes:
    """Return the name of a peer's chain among all chains."""
    return digest_of(f"{peer} {seal.since} ".encode() + seal.link)[:TAG_BYTES]


def salt_of(peer: str, since: int) -> bytes:
    """Return what makes the hash function each chain's own, so that nobody can work on many chains at once."""
    return digest_of(f"{peer} {since}".encode())[:SALT_BYTES]


def leads_to(link: bytes, steps: int, wanted: bytes, salt: bytes) -> bool:
    """Whether a link, hashed so many times, is the wanted one."""
    return 0 <= steps <= SLOTS and _hashed(link, steps, salt) == wanted


class Chain:
    """A chain of one peer's. Only its owner has it."""

    def __init__(self, identity: Identity, run: str, since: int) -> None:
        """The secret is a signature that is shown to nobody: no other source of chance is needed.

        since: when it begins, in milliseconds since the epoch.
        """
        salt = salt_of(identity.peer_id, since)
        secret = digest_of(identity.sign(SECRET_CONTEXT + f"{run} {since}".encode()))
        self.since = since
        self._links = [secret[:LINK_BYTES]]
        for _ in range(SLOTS):
            self._links.append(_hashed(self._links[-1], 1, salt))

    def seal(self, number: int) -> Seal:
        """Return what the heartbeat with this number shows of the chain."""
        return Seal(since=self.since, number=number, link=self._links[SLOTS])

    def link(self, slots: int) -> bytes:
        """Return the link to show when so many slots have passed, at most `SLOTS`."""
        return self._links[SLOTS - slots]


def _hashed(link: bytes, steps: int, salt: bytes) -> bytes:
    for _ in range(steps):
        link = blake2s(link, digest_size=LINK_BYTES, key=salt).digest()
    return link
