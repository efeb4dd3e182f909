"""Nodes that tell each other what organisers and archives have signed, without a network between them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from peers.network.channel import PeerUnreachableError


class Network:
    """One node's way to what answers at others, by name."""

    def __init__(self, name: str, others: Mapping[str, Callable[[str, bytes], Awaitable[bytes]]]) -> None:
        self.peer_id = name
        self.others = others
        self.calls: list[str] = []
        self.meddle: Callable[[bytes], bytes] = lambda answer: answer

    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
        self.calls.append(peer_id)
        if peer_id not in self.others:
            raise PeerUnreachableError(peer_id, "no answer in time")
        return self.meddle(await self.others[peer_id](self.peer_id, payload))
