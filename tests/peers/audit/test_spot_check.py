"""A member makes one of a round's averages again, of what the others show."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from peers.audit.spot_check import ASKED, MOST, Sample, choose, is_refuted
from peers.errors import DilocoPeerError
from peers.messages.commitment import ChunkProof, Contribution
from peers.values.chunks import Sum, SumTree
from peers.values.wire import digest_of
from peers.values.workload import BadBlocksError, Blocks, Reduction
from tests.peers.audit.statements import ABC, average

BLOCK, CHUNKS, CHUNK = 8, 6, 4


class Payloads:
    """Payloads of six chunks of one block."""

    block_count = CHUNKS
    format_count = 1

    def byte_range(self, first_block: int, last_block: int, format: int = 0) -> tuple[int, int]:
        return BLOCK * first_block, BLOCK * last_block

    def check(self, blocks: Blocks, first_block: int) -> None:
        """All bytes will do."""


@dataclass
class Circle:
    """The members of a round, each with a payload of one byte; c has averaged chunk 4."""

    bytes_of: dict[str, int] = field(default_factory=lambda: {"a": 10, "b": 20, "c": 30})
    asked: list[tuple[dict[str, int], int]] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    reductions: list[Reduction] = field(default_factory=list)
    failure: Exception | None = None

    def tree(self, peer: str) -> SumTree:
        return SumTree([Sum(digest_of(self.blocks(peer)), 1.0)] * CHUNKS)

    def blocks(self, peer: str) -> bytes:
        return bytes([self.bytes_of[peer]]) * BLOCK

    def sample(self, byte: int, absent: str = "") -> Sample:
        """Return the average that consists of this byte."""
        peers = [peer for peer in self.bytes_of if peer not in absent]
        roots = {peer: self.tree(peer).root for peer in peers}
        committed = {
            peer: Contribution(digest=root.digest, squares=root.squares, format=int(peer == "c"))
            for peer, root in roots.items()
        }
        signed = average(bytes([byte]) * BLOCK, tuple(absent), chunk=CHUNK)
        weights = tuple((peer, 100.0) for peer in peers)
        return Sample(signed, ABC.position, CHUNKS, weights, 100.0 * len(peers), committed)

    async def ask(self, peers: Mapping[str, int], chunk: int) -> Sequence[tuple[ChunkProof, Blocks] | None]:
        self.asked.append((dict(peers), chunk))
        proofs = {peer: ChunkProof(squares=1.0, path=self.tree(peer).path(chunk)) for peer in peers}
        return [None if peer in self.silent else (proofs[peer], self.blocks(peer)) for peer in peers]

    async def reduce(self, reduction: Reduction) -> Blocks:
        """Return the mean of the first bytes, so many times."""
        self.reductions.append(reduction)
        if self.failure is not None:
            raise self.failure
        total = sum(blocks[0] * weight for blocks, weight in reduction.contributions)
        return bytes([int(total / (reduction.tokens or 1))]) * BLOCK

    def refutes(self, sample: Sample) -> bool:
        return asyncio.run(is_refuted(sample, Payloads(), self.ask, self.reduce))


@pytest.mark.parametrize(("byte", "is_wrong"), [(20, False), (21, True)])
def test_an_average_is_what_it_is_made_of_or_refuted(byte: int, is_wrong: bool) -> None:
    circle = Circle()
    assert circle.refutes(circle.sample(byte)) is is_wrong
    assert circle.asked == [({"a": 0, "b": 0, "c": 1}, CHUNK)]
    (reduction,) = circle.reductions
    assert (reduction.first_block, reduction.tokens, reduction.index) == (CHUNK, 300.0, ABC.position.index)
    assert reduction.formats == (0, 0, 1)
    assert reduction.out is not None
    assert len(reduction.out) == BLOCK


def test_members_that_are_absent_from_an_average_are_not_asked() -> None:
    circle = Circle()
    assert not circle.refutes(circle.sample(15, absent="c"))
    assert list(circle.asked[0][0]) == ["a", "b"]


def test_weights_are_those_of_the_round_and_the_divisor_is_not_clipped() -> None:
    circle = Circle()
    sample = replace(circle.sample(15), weights=(("a", 100.0), ("b", 100.0), ("c", 50.0)))
    assert not circle.refutes(sample)


def train_again(circle: Circle) -> None:
    circle.bytes_of["b"] = 99


def leave(circle: Circle) -> None:
    circle.silent.add("b")


def give_bad_blocks(circle: Circle) -> None:
    circle.failure = BadBlocksError("overflow")


def end_the_workers(circle: Circle) -> None:
    circle.failure = DilocoPeerError("the workers have ended", "")


@pytest.mark.parametrize("happens", [train_again, leave, give_bad_blocks, end_the_workers])
def test_where_an_average_can_not_be_made_again_nothing_is_refuted(happens: Callable[[Circle], object]) -> None:
    circle = Circle()
    sample = circle.sample(21)
    assert circle.refutes(sample)
    happens(circle)
    assert not circle.refutes(sample)


def test_blocks_of_a_member_without_a_commitment_count_for_nothing() -> None:
    circle = Circle()
    assert not circle.refutes(replace(circle.sample(21), committed={}))
    assert not circle.refutes(replace(circle.sample(21), weights=()))


AVERAGES = [average(bytes([number]), chunk=number) for number in range(4)]


@pytest.mark.parametrize(
    ("members", "drawn", "chosen"),
    [
        (3, (0.99, 0.0), 0),
        (3, (0.99, 0.99), 3),
        (2 * ASKED, (0.49, 0.5), 2),
        (2 * ASKED, (0.5, 0.5), None),
        (MOST, (0.0, 0.0), 0),
        (MOST + 1, (0.0, 0.0), None),
        (0, (0.0, 0.0), None),
    ],
)
def test_large_rounds_are_checked_now_and_then(members: int, drawn: tuple[float, float], chosen: int | None) -> None:
    """Else a thousand members would ask a thousand others for a chunk each."""
    draws = iter(drawn)
    assert choose(AVERAGES, members, lambda: next(draws)) == (None if chosen is None else AVERAGES[chosen])


def test_without_averages_of_others_there_is_nothing_to_check() -> None:
    assert choose([], 3, lambda: 0.0) is None
