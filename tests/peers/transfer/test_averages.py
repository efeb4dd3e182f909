"""Whoever makes averaging fail is found, wherever it stands in the roster."""

from __future__ import annotations

import asyncio

import pytest

from peers.errors import DilocoPeerError
from peers.protocol.effects import ReduceChunk
from peers.protocol.events import ReducedArrived
from peers.transfer.averages import _find_spoiler, average_chunk
from peers.transfer.buffers import PayloadBuffers
from peers.values.workload import BadBlocksError, Reduction
from tests.peers.builders import SIZE
from tests.peers.fakes import BLOCK, FakeWorkload
from tests.peers.protocol.test_exchange import AT

GOOD, BAD = (b"good", 10), (b"bad", 10)
IDLE = (b"good", 0)


class Fussy:
    """Cannot average what contains bad blocks, nor nothing."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls = 0

    async def reduce(self, reduction: Reduction) -> bytes:
        self.calls += 1
        assert any(tokens for _, tokens in reduction.contributions)
        if BAD in reduction.contributions:
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
    assert asyncio.run(_find_spoiler(workload.reduce, contributions, 0)) == place
    assert workload.calls <= 10


class Recording(Fussy):
    """Keeps what it was asked for."""

    async def reduce(self, reduction: Reduction) -> bytes:
        self.asked = [(bytes(blocks), weight) for blocks, weight in reduction.contributions], reduction.tokens
        self.at = reduction.first_block, reduction.fragment, reduction.index
        return bytes(len(reduction.contributions[0][0]))


def test_who_is_clipped_weighs_less_and_all_tokens_are_divided_by() -> None:
    buffers, codec = PayloadBuffers(FakeWorkload()), Recording(BadBlocksError(""))
    buffers.open(AT)
    buffers.own = b"a" * SIZE.bytes
    current = buffers.round(AT)
    assert current is not None
    current.contributions[2] = {"b": b"b" * BLOCK, "c": b"c" * BLOCK}
    reduce = ReduceChunk(AT, 2, (("a", 10), ("b", 20), ("c", 40)), (), {"b": 0.25})
    done = asyncio.run(average_chunk(codec.reduce, buffers, "a", reduce))
    assert done == ReducedArrived(AT, "a", 2, ())
    assert codec.asked == ([(b"a" * BLOCK, 10), (b"b" * BLOCK, 5.0), (b"c" * BLOCK, 40)], 70)
    assert codec.at == (2, AT.position.fragment, AT.position.index), "where chance comes from"
