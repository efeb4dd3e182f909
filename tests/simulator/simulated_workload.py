"""The training side of a simulated peer: contributions and states are digests of what they depend on."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from operator import mul
from typing import TypeVar

from peers.log.settings import RunSettings
from peers.protocol.effects import Train
from peers.transfer.averages import Average
from peers.transfer.buffers import PayloadBuffers, inspection, offer
from peers.values.chunks import Sum
from peers.values.leases import prefix, sample_count
from peers.values.manifest import Amendment
from peers.values.wire import digest_of, pack
from peers.values.workload import BadBlocksError, Blocks, Reduction, Trained

T = TypeVar("T")

BLOCK_BYTES = 8
GENESIS = digest_of(b"genesis")


def stepped(state: bytes, payload: bytes, amendment: Amendment | None = None) -> bytes:
    """Return what a payload makes of a state, with an amendment in force."""
    return digest_of(state + payload + (pack(amendment) if amendment else b""))


class SimulatedWorkload:
    """Nothing here waits for anything, asynchronous or not."""

    def __init__(self, me: str, block_count: int) -> None:
        self.me = me
        self.block_count = block_count
        self.format_count = 2
        self.state = GENESIS

    def byte_range(self, first_block: int, last_block: int, format: int = 0) -> tuple[int, int]:
        return first_block * BLOCK_BYTES // (1 + format), last_block * BLOCK_BYTES // (1 + format)

    def contribution(self, trained: Trained) -> bytes:
        seed = digest_of(repr((self.me, self.state, trained.samples)).encode())
        size = self.block_count * BLOCK_BYTES // (1 + trained.format)
        return (seed * (size // len(seed) + 1))[:size]

    def check(self, blocks: Blocks, first_block: int) -> None:
        """Raises: BadBlocksError for blocks that no simulated encoder makes: those that are all zero."""
        if not any(blocks):
            raise BadBlocksError("all of its blocks are zero")

    def squared_norm(self, blocks: Blocks, first_block: int, fragment: int = 0, format: int = 0) -> float:
        """Take bytes for values."""
        self.check(blocks, first_block)
        return float(sum(map(mul, blocks, blocks)))

    async def reduce(self, reduction: Reduction) -> bytes:
        plain = [(bytes(blocks), weight) for blocks, weight in reduction.contributions]
        first, *_ = formats = tuple(reduction.formats) or (0,)
        size = len(plain[0][0]) * (1 + first)
        return digest_of(repr((plain, reduction.tokens, formats if any(formats) else ())).encode())[:size]

    def apply(self, payload: bytes, amendment: Amendment | None = None) -> bytes:
        self.state = stepped(self.state, payload, amendment)
        return self.state


@dataclass(frozen=True)
class SimulatedTraining:
    """When a training began, and how many seconds and inner steps it takes."""

    began: float = 0.0
    seconds: float = 1.0
    steps: int = 0

    def inner_step(self, now: float) -> int:
        """Return how many of them are made. A liar may have a lease that is too small for any."""
        return min(self.steps, int(self.steps * (now - self.began) / self.seconds)) if self.steps else 0


def trained_in(train: Train, settings: RunSettings) -> tuple[int, Trained]:
    """Return how many inner steps a training takes, and what it comes to."""
    steps = min(train.steps, sample_count(train.samples) * settings.inner_steps // settings.samples_per_lease)
    samples = prefix(train.samples, steps * settings.samples_per_lease // settings.inner_steps)
    return steps, Trained(samples, settings.tokens_per_sample * sample_count(samples), 1.0)


def digest_of_states(states: Sequence[bytes]) -> bytes:
    """Of a state that is made of fragments: a tree, so that the step of one fragment leaves the others' digests."""
    return states[0] if len(states) == 1 else digest_of(b"".join(states))


class Fragment:
    """One fragment of a peer's state, and where its payloads lie."""

    def __init__(self, name: str, block_count: int, kept_bytes: int) -> None:
        self.workload = SimulatedWorkload(name, block_count)
        self.buffers = PayloadBuffers(self.workload, kept_bytes)
        self.average: Average = self.workload.reduce
        """What averages."""

    def commit_to(self, trained: Trained) -> Sum:
        """Make a contribution. Return its root."""
        return offer(
            self.workload.contribution(trained),
            self.buffers,
            inspection(self.workload.squared_norm, self.buffers),
            trained.format,
        )


def run_now(work: Coroutine[None, None, T]) -> T:
    """Run what is asynchronous for the real driver's sake, and here waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        returned: T = done.value
        return returned
    raise RuntimeError("it waits for something")
