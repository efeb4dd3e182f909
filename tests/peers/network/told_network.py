"""Nodes that tell each other what organisers and archives have signed, without a network between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from peers.network.channel import PeerUnreachableError


class Answering(Protocol):
    async def answer(self, sender: str, payload: bytes) -> bytes: ...


class Network:
    """One node's way to others, by name."""

    def __init__(self, name: str, others: Mapping[str, Answering]) -> None:
        self.peer_id = name
        self.others = others
        self.calls: list[str] = []
        self.meddle: Callable[[bytes], bytes] = lambda answer: answer

    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
        self.calls.append(peer_id)
        if peer_id not in self.others:
            raise PeerUnreachableError(peer_id, "no answer in time")
        return self.meddle(await self.others[peer_id].answer(self.peer_id, payload))
