"""Spot checks: after a round a member makes one of its averages again, from the blocks that all members committed to.

An average has the same bits wherever it is made. So if it comes out otherwise, its reducer has averaged something else.
This member knows that, and tells its owner; it can't prove it in one message, since all blocks of a chunk are too long
for one. (Two different averages of a chunk do prove a lie, and a wrong one that all members got alike leaves all of
them in one state.)
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
"""Chunks that a member asks for after a round, on average: in larger rounds it checks now and then only."""
MOST = 64
"""Members of a round that is checked: as many chunks are in memory at once."""

Ask: TypeAlias = Callable[[Mapping[str, int], int], Awaitable[Sequence[tuple[ChunkProof, Blocks] | None]]]
"""Returns what these peers show of their contributions to a chunk, given the format of each: one answer for each, None
of one that shows nothing. The asking peer may be among them."""
Reduce: TypeAlias = Callable[[Reduction], Awaitable[Blocks]]
"""`Workload.reduce`."""


@dataclass(frozen=True)
class Sample:
    """An average that another member has signed, and what it was to be made of.

    `weights` are those of the members whose blocks are in it, in the order in which they are summed; `tokens` is what
    the sum is divided by. `committed` names what each of them has committed to over all of its `chunks`.
    """

    average: Averaged
    position: Position
    chunks: int
    weights: tuple[tuple[str, float], ...]
    tokens: float
    committed: Mapping[str, Contribution]


def choose(averages: Sequence[Averaged], members: int, draw: Callable[[], float]) -> Averaged | None:
    """Return the average to check after a round with so many members; None: none this time.

    `averages` are those of other members; `draw` returns a number in [0, 1).
    """
    if not averages or not 0 < members <= MOST or draw() * members >= ASKED:
        return None
    return averages[int(draw() * len(averages))]


async def is_refuted(sample: Sample, blocked: Blocked, ask: Ask, reduce: Reduce) -> bool:
    """Return whether the average comes out otherwise. It is not refuted if a member does not show its blocks, which it
    may have replaced since, or if they can't be averaged, of which the reducer is to speak."""
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
        again = await reduce(made_of)
    except (BadBlocksError, DilocoPeerError):
        return False
    return digest_of(again) != sample.average.digest


def _is_committed(sample: Sample, peer: str, proof: ChunkProof, blocks: Blocks) -> bool:
    root = sample.committed[peer].root
    return leads_to(root, sample.average.chunk, sample.chunks, digest_of(blocks), proof)
