"""The average of one chunk: made from what has arrived, in the order of the roster, and stored in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from peers.errors import DilocoPeerError
from peers.protocol.effects import ReduceChunk
from peers.protocol.events import BadBlocks, ReducedArrived
from peers.transfer.buffers import PayloadBuffers
from peers.values.workload import BadBlocksError, Blocks, Reduction


class Reducing(Protocol):
    """What averaging needs of the training side."""

    async def reduce(self, reduction: Reduction) -> Blocks:
        """See `Workload.reduce`."""


async def average_chunk(
    codec: Reducing, buffers: PayloadBuffers, me: str, reduce: ReduceChunk
) -> ReducedArrived | BadBlocks | None:
    """Average the blocks of a chunk, and store the result. Return what to tell the protocol; None: the round is over.

    Blocks may pass every check at the door and still have no average: BadBlocks names the member that sent them.
    Raises: BadBlocksError or DilocoPeerError when they are this peer's own.
    """
    round_name, chunk = reduce.round_name, reduce.chunk
    if not buffers.round(round_name):
        return None
    contributions = buffers.contributions(round_name, chunk, me, reduce.weights)
    tokens = sum(weight for _, weight in reduce.members)
    first_block = buffers.chunking.blocks(chunk)[0]
    room = buffers.room(len(contributions[0][0]))
    place = round_name.position
    reduction = Reduction(contributions, first_block, memoryview(room), tokens, place.fragment, place.index)
    try:
        average = await codec.reduce(reduction)
    except (BadBlocksError, DilocoPeerError) as error:
        spoiler, _ = reduce.members[await find_spoiler(codec, contributions, first_block, buffers.fragment)]
        if spoiler == me:
            raise
        return BadBlocks(round_name, spoiler, chunk, str(error))
    if not buffers.round(round_name):
        return None
    digest = buffers.store(round_name, chunk, average)
    buffers.give_back([room, *(blocks for blocks, _ in contributions)])
    return ReducedArrived(round_name, me, chunk, reduce.absent, digest)


async def find_spoiler(
    codec: Reducing, contributions: Sequence[tuple[Blocks, float]], first_block: int, fragment: int = 0
) -> int:
    """Return the place of the contribution with which averaging begins to fail, given that it fails for all of them.

    Sums only grow from honest contributions by what rounding ignores beside one that makes them overflow.
    """
    good, bad = 0, len(contributions)  # so many can be averaged, so many can't
    while bad - good > 1:
        middle = (good + bad) // 2
        tried = contributions[:middle]
        try:
            if any(weight for _, weight in tried):  # there is no average of nothing
                await codec.reduce(Reduction(tried, first_block, fragment=fragment))
            good = middle
        except (BadBlocksError, DilocoPeerError):
            bad = middle
    return good
