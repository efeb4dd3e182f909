"""What makes signatures, and checks those of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Protocol, TypeAlias

from pydantic import Field

from peers.values.identity import SIGNATURE_BYTES, Identity, verify

Signature = Annotated[bytes, Field(strict=True, min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
Verify: TypeAlias = Callable[[str, bytes, bytes], bool]
"""Whether the peer of this name made this signature of these bytes, given in the order peer, bytes, signature."""


class Keys(Protocol):
    """One peer's key, and the names of all others, which are their public keys."""

    def sign(self, data: bytes) -> bytes:
        """Our signature, 64 bytes."""

    def verify(self, peer: str, data: bytes, signature: bytes) -> bool:
        """Whether the peer of this name made this signature of these bytes."""


class IdentityKeys:
    """Ed25519."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def sign(self, data: bytes) -> bytes:
        return self._identity.sign(data)

    def verify(self, peer: str, data: bytes, signature: bytes) -> bool:
        return verify(peer, data, signature)
