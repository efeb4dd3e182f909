"""The training side of a simulated peer: contributions and states are digests of what they depend on."""

from __future__ import annotations

from collections.abc import Sequence

from peers.values.wire import digest_of
from peers.values.workload import BadBlocksError, Blocks, Trained

BLOCK_BYTES = 8


class SimulatedWorkload:
    """Nothing here waits for anything, asynchronous or not."""

    def __init__(self, me: str, block_count: int) -> None:
        self.me = me
        self.block_count = block_count
        self.state = digest_of(b"genesis")

    def byte_range(self, first_block: int, last_block: int) -> tuple[int, int]:
        return first_block * BLOCK_BYTES, last_block * BLOCK_BYTES

    def contribution(self, trained: Trained) -> bytes:
        seed = digest_of(repr((self.me, self.state, trained.samples)).encode())
        size = self.block_count * BLOCK_BYTES
        return (seed * (size // len(seed) + 1))[:size]

    def check(self, blocks: Blocks, first_block: int) -> None:
        """Raises: BadBlocksError for blocks that no simulated encoder makes: those that are all zero."""
        if not any(blocks):
            raise BadBlocksError("all of its blocks are zero")

    def squared_norm(self, blocks: Blocks, first_block: int) -> float:
        """Take bytes for values."""
        self.check(blocks, first_block)
        return float(sum(value * value for value in blocks))

    async def reduce(
        self,
        contributions: Sequence[tuple[Blocks, float]],
        first_block: int,
        out: memoryview | None = None,
        tokens: int | None = None,
    ) -> bytes:
        plain = [(bytes(blocks), weight) for blocks, weight in contributions]
        return digest_of(repr((plain, tokens)).encode())[: len(plain[0][0])]

    def apply(self, payload: bytes) -> bytes:
        self.state = digest_of(self.state + payload)
        return self.state


def digest_of_states(states: Sequence[bytes]) -> bytes:
    """Of a state that is made of fragments: a tree, so that the step of one fragment leaves the others' digests."""
    return states[0] if len(states) == 1 else digest_of(b"".join(states))
