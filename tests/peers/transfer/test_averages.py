"""How a chunk is averaged; and that a member whose blocks have no average is found, wherever it is in the roster."""

from __future__ import annotations

import asyncio

import pytest

from peers.errors import DilocoPeerError
from peers.messages.averages import MARK_BYTES
from peers.messages.rounds import Round
from peers.protocol.effects import ReduceChunk
from peers.protocol.events import BadBlocks, ContributionArrived, ReducedArrived
from peers.protocol.exchange import Exchange
from peers.transfer.averages import _find_spoiler, average_chunk
from peers.transfer.buffers import PayloadBuffers
from peers.values.workload import BadBlocksError, Reduction
from tests.peers.fakes import BLOCK, FakeWorkload
from tests.peers.rounds import AT, SIZE, round_among

GOOD, BAD = (b"good", 10), (b"bad", 10)
IDLE = (b"good", 0)
ROUND = round_among("abc")


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

    async def fail(self, reduction: Reduction) -> bytes:
        raise self.error


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
    assert asyncio.run(_find_spoiler(workload.reduce, Reduction(contributions, 0))) == place
    assert workload.calls <= 10


class Recording(Fussy):
    """Keeps what it was asked for."""

    async def reduce(self, reduction: Reduction) -> bytes:
        self.asked = [(bytes(blocks), weight) for blocks, weight in reduction.contributions], reduction.tokens
        self.at = reduction.first_block, reduction.fragment, reduction.index
        return bytes(len(reduction.contributions[0][0]))


def at_a(round: Round = ROUND) -> tuple[PayloadBuffers, Exchange]:
    """The member a averages the chunk 0, of which all blocks are here."""
    buffers, exchange = PayloadBuffers(FakeWorkload()), Exchange("a", round)
    buffers.open(round.name)
    buffers.own = b"a" * SIZE.bytes
    exchange.open()
    current = buffers.round(round.name)
    assert current is not None
    current.contributions[0] = {"b": bytearray(b"b" * BLOCK), "c": bytearray(b"c" * BLOCK)}
    for sender in "bc":
        exchange.handle(ContributionArrived(round.name, sender, 0))
    return buffers, exchange


def test_a_clipped_contribution_weighs_less_and_all_tokens_are_divided_by() -> None:
    buffers, exchange = at_a()
    codec = Recording(BadBlocksError(""))
    reduce = ReduceChunk(AT, 0, (("a", 10), ("b", 20), ("c", 40)), (), {"b": 0.25})
    done = asyncio.run(average_chunk(codec.reduce, buffers, exchange, reduce))
    assert done == ReducedArrived(AT, "a", 0, ())
    assert codec.asked == ([(b"a" * BLOCK, 10), (b"b" * BLOCK, 5.0), (b"c" * BLOCK, 40)], 70)
    assert codec.at == (0, AT.position.fragment, AT.position.index), "where chance comes from"
    current = buffers.round(AT)
    assert current is not None
    assert 0 not in current.contributions, "their memory is used again"


REDUCE = ReduceChunk(AT, 0, (("a", 10), ("b", 20), ("c", 40)), ())


def test_an_average_that_is_not_wanted_any_more_is_not_stored() -> None:
    """A proposal names averages meanwhile: ours would take the place of one of them."""
    buffers, exchange = at_a()

    class Slow(Recording):
        async def reduce(self, reduction: Reduction) -> bytes:
            exchange.proposed(bytes(3 * MARK_BYTES))
            return b"x" * BLOCK

    assert asyncio.run(average_chunk(Slow(BadBlocksError("")).reduce, buffers, exchange, REDUCE)) is None
    assert buffers.read(AT, 0, is_averaged=True) == bytes(BLOCK)
    assert asyncio.run(average_chunk(Recording(BadBlocksError("")).reduce, buffers, exchange, REDUCE)) is None
    exchange.go_on([], 10.0, 1.0)
    event = asyncio.run(average_chunk(Recording(BadBlocksError("")).reduce, buffers, exchange, REDUCE))
    assert event == ReducedArrived(AT, "a", 0, ()), "the blocks are still here"


def test_blocks_without_an_average_are_their_senders_fault() -> None:
    buffers, exchange = at_a()

    class Spoilt(Recording):
        async def reduce(self, reduction: Reduction) -> bytes:
            if any(bytes(blocks).startswith(b"c") for blocks, _ in reduction.contributions):
                raise BadBlocksError("overflow")
            return bytes(len(reduction.contributions[0][0]))

    codec = Spoilt(BadBlocksError(""))
    event = asyncio.run(average_chunk(codec.reduce, buffers, exchange, REDUCE))
    assert event == BadBlocks(AT, "c", 0, "overflow")
    (again,) = exchange.handle(event)
    assert isinstance(again, ReduceChunk)
    done = asyncio.run(average_chunk(codec.reduce, buffers, exchange, again))
    assert done == ReducedArrived(AT, "a", 0, ("c",))


def test_our_own_blocks_without_an_average_are_our_own_error() -> None:
    buffers, exchange = at_a()
    with pytest.raises(BadBlocksError):
        asyncio.run(average_chunk(Fussy(BadBlocksError("")).fail, buffers, exchange, REDUCE))


def test_a_round_that_is_over_is_not_averaged() -> None:
    buffers, exchange = at_a()
    buffers.close()
    assert asyncio.run(average_chunk(Recording(BadBlocksError("")).reduce, buffers, exchange, REDUCE)) is None
