"""Spot checks: after a round, a member computes another member's average of a chunk again, from the blocks to which all
members committed.

An average has the same bits on every machine. So if the repeated one differs, its reducer has averaged other blocks.
This member then knows it, and warns its own operator. It cannot prove it to others in one message, since all blocks of
a chunk are too long for one. (Two different averages of a chunk do prove a lie. If all members received the same wrong
one, they still have the same state.)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from peers.errors import DilocoPeerError
from peers.log.header import Position
from peers.messages.averages import Averaged
from peers.messages.commitment import ChunkProof, Contribution, leads_to
from peers.values.chunks import Chunking
from peers.values.wire import digest_of
from peers.values.workload import BadBlocksError, Blocked, Blocks, Reduction

ASKED = 16
"""Chunks that a member fetches after a round, on average: in larger rounds it checks only now and then."""
MOST = 64
"""Members of a round that is checked, at most: a check needs one chunk of each in memory."""

Ask: TypeAlias = Callable[[Mapping[str, int], int], Awaitable[Sequence[tuple[ChunkProof, Blocks] | None]]]
"""Returns these peers' contributions to a chunk, given the format of each: one answer for each, None for a peer that
gives none. The calling peer may be among them."""
Reduce: TypeAlias = Callable[[Reduction], Awaitable[Blocks]]
"""`Workload.reduce`."""


@dataclass(frozen=True)
class Sample:
    """An average that another member has signed, and the data with which to compute it again.

    `weights` are those of the members whose blocks are in it, in the order of the sum; `tokens` is the divisor of the
    sum. `committed` are these members' commitments, each to all of its `chunks`.
    """

    average: Averaged
    position: Position
    chunks: int
    weights: tuple[tuple[str, float], ...]
    tokens: float
    committed: Mapping[str, Contribution]


def choose(averages: Sequence[Averaged], members: int, draw: Callable[[], float]) -> Averaged | None:
    """Return a randomly chosen average to check after a round with this number of members. Return None if there is
    none, after a round with more than MOST members, and by chance after some rounds with more than ASKED members.

    `averages` are those of other members; `draw` returns a number in [0, 1).
    """
    if not averages or not 0 < members <= MOST or draw() * members >= ASKED:
        return None
    return averages[int(draw() * len(averages))]


async def is_refuted(sample: Sample, blocked: Blocked, ask: Ask, reduce: Reduce) -> bool:
    """Return True if the average, computed again, differs from the signed one. Return False if it
    cannot be computed again, because a member does not send its blocks or the blocks cannot be averaged."""
    chunk, chunking = sample.average.chunk, Chunking(blocked.block_count)
    first, last = chunking.blocks(chunk)
    start, stop = blocked.byte_range(first, last)
    peers = {peer: sample.committed[peer].format for peer, _ in sample.weights if peer in sample.committed}
    if len(peers) < len(sample.weights):
        return False
    shown = await ask(peers, chunk)
    contributions = [
        (answer[1], weight)
        for answer, (peer, weight) in zip(shown, sample.weights, strict=True)
        if answer is not None and _is_committed(sample, peer, *answer)
    ]
    if not contributions or len(contributions) < len(peers):
        return False
    room, place, formats = memoryview(bytearray(stop - start)), sample.position, tuple(peers.values())
    made_of = Reduction(contributions, first, room, sample.tokens, place.fragment, place.index, formats)
    try:
        repeated = await reduce(made_of)
    except (BadBlocksError, DilocoPeerError):
        return False
    return digest_of(repeated) != sample.average.digest


def _is_committed(sample: Sample, peer: str, proof: ChunkProof, blocks: Blocks) -> bool:
    root = sample.committed[peer].root
    return leads_to(root, sample.average.chunk, sample.chunks, digest_of(blocks), proof)
