"""A network for pulls, and a training side, both without anything behind them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

from peers.messages.commitment import ChunkProof
from peers.network.channel import PeerRefusedError, PeerUnreachableError, RefusalError, Serve
from peers.network.throttle import Caps, LinkTime
from peers.protocol.contributions import Contributions
from peers.protocol.exchange import Exchange
from peers.values.chunks import digest_of_state
from peers.values.manifest import Amendment
from peers.values.signed_heads import NOTHING_SIGNED, SignedHeads
from peers.values.wire import Reach
from peers.values.workload import (
    BadBlocksError,
    Blocked,
    Blocks,
    InnerLoop,
    OnCaptured,
    Progress,
    Reduction,
    SnapshotError,
    Trained,
    captures_nothing,
)
from tests.peers.rounds import SIZE

BLOCK = SIZE.bytes // SIZE.chunks
GARBAGE = b"garbage!" * (BLOCK // 8)
PROOF = ChunkProof(squares=1.0, path=b"")
"""Of whatever is trusted anyway."""

T = TypeVar("T")
Meddle: TypeAlias = Callable[[str, bytes, bytearray], Awaitable[bytearray]]
"""(name of the pull, its header, data) -> the data that arrives; PeerUnreachableError if none does."""


async def at_once(work: Callable[..., T], *arguments: Any) -> T:
    """Instead of a thread, of which nobody knows when it is done."""
    return work(*arguments)


class NoChance(random.Random):
    """Leaves everything in its order."""

    def sample(self, population: Sequence[T], k: int, *, counts: Iterable[int] | None = None) -> list[T]:
        return list(population)[:k]


class Clock:
    """Seconds, as a test sets them."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class FakeTransport:
    """One peer's way to its `donors`; keeps what is registered here, and the pulls that were made from here."""

    caps = Caps()

    def __init__(self, me: str = "b") -> None:
        self.me = me
        self.no_round = LinkTime()
        self.donors: dict[str, FakeTransport] = {}
        self.serve: dict[str, Serve] = {}
        self.giving_way: set[str] = set()
        self.pulls: list[tuple[str, str, bytes]] = []  # donor, name, header
        self.reach: dict[str, Reach] = {}
        self.meddle: Meddle | None = None  # with what we give
        self.signed = NOTHING_SIGNED

    async def on_pull(self, name: str, serve: Serve, gives_way: bool = False) -> None:
        self.serve[name] = serve
        if gives_way:
            self.giving_way.add(name)

    def check_admitted(self, run_id: str, peer_id: str) -> None:
        """Everybody may come in."""

    def signed_heads_of(self, run_id: str) -> SignedHeads:
        return self.signed

    def reach_of(self, peer_id: str) -> Reach | None:
        return self.reach.get(peer_id)

    async def pull(
        self, peer_id: str, name: str, header: bytes, max_bytes: int, timeout: float
    ) -> tuple[bytes, bytearray]:
        self.pulls.append((peer_id, name, header))
        await asyncio.sleep(0)  # everybody's turn
        donor = self.donors.get(peer_id)
        if donor is None or name not in donor.serve:
            raise PeerUnreachableError(peer_id, "no answer in time")
        try:
            async with asyncio.timeout(timeout), donor.serve[name](self.me, header) as (answer, served):
                data = bytearray(served)
                if donor.meddle:
                    data = await donor.meddle(name, header, data)
        except RefusalError as refusal:
            raise PeerRefusedError(peer_id, str(refusal)) from refusal
        except TimeoutError as error:
            raise PeerUnreachableError(peer_id, "no answer in time") from error
        if len(data) > max_bytes:
            raise PeerUnreachableError(peer_id, f"its answer of {len(data)} bytes exceeds the limit")
        return answer, data


class Trusting(Contributions):
    """All that comes has been committed to."""

    def has(self, sender: str, chunk: int, digest: bytes, proof: ChunkProof) -> bool:
        return proof == PROOF


def trust_all(exchange: Exchange) -> None:
    """Have a member of a round take what anybody says that it has committed to, or averaged."""
    known = exchange.contributions
    exchange.contributions = Trusting(
        known.chunks, known.commitments, known.squares, known.clip, known.signature, known.weights
    )
    exchange.is_vouched_for = lambda averaged: True  # type: ignore[method-assign]
    said = known.commitments
    exchange.commitment = lambda sender, signature: said[sender].signed(bytes(64))  # type: ignore[method-assign]


class FakeWorkload:
    """As many blocks as the payloads of the tests' rounds have chunks; nobody trains."""

    block_count = SIZE.chunks
    format_count = 1

    def __init__(self, state: bytes = b"mine") -> None:
        self.state = state

    @property
    def fragments(self) -> Sequence[Blocked]:
        return (self,)

    @property
    def state_size(self) -> int:
        return len(self.state)

    def byte_range(self, first_block: int, last_block: int, format: int = 0) -> tuple[int, int]:
        return BLOCK * first_block, BLOCK * last_block

    def check(self, blocks: Blocks, first_block: int) -> None:
        if blocks == GARBAGE:
            raise BadBlocksError("code -128")

    def squared_norm(self, blocks: Blocks, first_block: int, fragment: int = 0, format: int = 0) -> float:
        """All are as long as `PROOF` says."""
        self.check(blocks, first_block)
        return PROOF.squares

    async def state_digest(self) -> bytes:
        return digest_of_state([self.state])

    async def copy_state(self, out: memoryview) -> None:
        out[:] = self.state

    async def restore(self, state: Blocks, state_digest: bytes) -> None:
        if digest_of_state([state]) != state_digest:
            raise SnapshotError("not that state")
        self.state = bytes(state)

    async def run_inner_loop(
        self, work: InnerLoop, on_progress: Callable[[Progress], None], on_captured: OnCaptured = captures_nothing
    ) -> Trained:
        raise NotImplementedError

    async def contribution(self, fragment: int = 0, format: int = 0) -> bytes:
        raise NotImplementedError

    async def reduce(self, reduction: Reduction) -> bytes:
        raise NotImplementedError

    async def unchanged(self, index: int, fragment: int) -> None:
        raise NotImplementedError

    async def apply(
        self,
        payload: Blocks,
        index: int,
        fragment: int = 0,
        keeps_work: bool = False,
        counts: bool = True,
        *,
        amendment: Amendment | None = None,
    ) -> None:
        raise NotImplementedError
