"""Signatures that nobody forges, because nobody tries. Real ones would take most of a simulation's time."""

from __future__ import annotations

from blake3 import blake3

from peers.values.identity import SIGNATURE_BYTES


class SimulatedKeys:
    """Whoever knows a name could sign for it; each simulated peer, liars too, signs for itself alone."""

    def __init__(self, name: str) -> None:
        self._name = name

    def sign(self, data: bytes) -> bytes:
        return _signature(self._name, data)

    def verify(self, peer: str, data: bytes, signature: bytes) -> bool:
        return signature == _signature(peer, data)


def _signature(name: str, data: bytes) -> bytes:
    """Return bytes that deflate no better than a real signature's: what messages weigh depends on it."""
    return blake3(name.encode() + b"\0" + data).digest(length=SIGNATURE_BYTES)
