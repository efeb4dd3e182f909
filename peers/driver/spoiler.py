"""Who made averaging fail: blocks may pass every check at the door and still have no average."""

from __future__ import annotations

from collections.abc import Sequence

from peers.errors import DilocoPeerError
from peers.values.workload import BadBlocksError, Blocks, Workload


async def find_spoiler(workload: Workload, contributions: Sequence[tuple[Blocks, int]], first_block: int) -> int:
    """Place of the contribution with which averaging begins to fail, given that it fails for all of them.

    Sums only grow from honest contributions by what rounding ignores beside one that makes them overflow.
    """
    good, bad = 0, len(contributions)  # so many can be averaged, so many can't
    while bad - good > 1:
        middle = (good + bad) // 2
        tried = contributions[:middle]
        try:
            if any(tokens for _, tokens in tried):  # there is no average of nothing
                await workload.reduce(tried, first_block)
            good = middle
        except (BadBlocksError, DilocoPeerError):
            bad = middle
    return good
