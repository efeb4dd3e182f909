"""Whoever makes averaging fail is found, wherever it stands in the roster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from peers.errors import DilocoPeerError
from peers.transfer.chunk_average import find_spoiler
from peers.values.workload import BadBlocksError, Blocks

GOOD, BAD = (b"good", 10), (b"bad", 10)
IDLE = (b"good", 0)


class Fussy:
    """Cannot average what contains bad blocks, nor nothing."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls = 0

    async def reduce(
        self, contributions: Sequence[tuple[Blocks, int]], first_block: int, out: memoryview | None = None
    ) -> bytes:
        self.calls += 1
        assert any(tokens for _, tokens in contributions)
        if BAD in contributions:
            raise self.error
        return b"average"


@pytest.mark.parametrize("error", [BadBlocksError("overflow"), DilocoPeerError("overflow")])
@pytest.mark.parametrize(
    ("contributions", "place"),
    [
        ([BAD], 0),
        ([BAD, GOOD], 0),
        ([GOOD, BAD], 1),
        ([IDLE, IDLE, GOOD, BAD, GOOD], 3),
        ([GOOD] * 500 + [BAD] * 2 + [GOOD] * 498, 500),
    ],
    ids=["alone", "first", "last", "after those who trained nothing", "among many"],
)
def test_the_first_that_spoils_the_average(
    contributions: list[tuple[bytes, int]], place: int, error: Exception
) -> None:
    workload = Fussy(error)
    assert asyncio.run(find_spoiler(workload, contributions, 0)) == place
    assert workload.calls <= 10
