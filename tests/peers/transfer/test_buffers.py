"""Blocks in memory: a round's chunks are put together to a payload, and payloads are kept within a budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.transfer.buffers import PayloadBuffers
from peers.transfer.storage import empty
from peers.values.chunks import KEPT_AT_LEAST, ChunkedPayload, KeptPayloads, digest_of_chunks
from peers.values.wire import digest_of
from tests.peers.rounds import AT, round_name
from tests.simulator.simulated_workload import SimulatedWorkload

NEXT = round_name(2)
BLOCKS = 7  # of eight bytes, each a chunk
OWN = bytes(range(56))


def buffers() -> PayloadBuffers:
    return PayloadBuffers(SimulatedWorkload("a", BLOCKS))


def open_round() -> PayloadBuffers:
    mine = buffers()
    mine.open(AT)
    mine.own = OWN
    return mine


def chunk(number: int) -> bytes:
    return b"average%d" % number


def test_a_round() -> None:
    mine = open_round()
    assert (mine.size.chunks, mine.size.bytes) == (7, 56)
    assert mine.chunk_bytes(1) == (8, 16)
    assert mine.chunks_bytes(1, 4) == (8, 32)
    assert mine.read(AT, 1, is_averaged=False) == OWN[8:16]
    for number in (3, 0, 6, 2, 1, 5, 4):
        mine.store(AT, number, chunk(number))
        assert mine.read(AT, number, is_averaged=True) == chunk(number)
    payload = b"".join(map(chunk, range(7)))
    digest = mine.assemble(AT)
    assert digest == digest_of_chunks([digest_of(chunk(number)) for number in range(7)])
    kept = mine.kept.get(digest)
    assert kept is not None
    assert (bytes(kept.data), kept.digest) == (payload, digest)
    assert kept.chunk_digests == tuple(digest_of(chunk(number)) for number in range(7))


def test_contributions_come_in_the_order_of_the_roster_whatever_order_they_came_in() -> None:
    mine = open_round()
    current = mine.round(AT)
    assert current is not None
    current.contributions.update({0: {"c": b"C" * 8, "b": b"B" * 8}, 1: {"b": b"1" * 8}})
    contributions = mine.contributions(AT, 0, "a", [("b", 2), ("a", 1), ("c", 3)])
    assert [(bytes(blocks), tokens) for blocks, tokens in contributions] == [
        (b"BBBBBBBB", 2),
        (OWN[:8], 1),
        (b"CCCCCCCC", 3),
    ]
    with pytest.raises(KeyError):
        mine.contributions(AT, 1, "a", [("a", 1), ("c", 3)])


def test_what_was_sent_of_a_chunk_goes_when_it_is_averaged() -> None:
    mine = open_round()
    current = mine.round(AT)
    assert current is not None
    current.contributions.update({0: {"b": b"B" * 8, "c": b"C" * 8}, 1: {"b": b"1" * 8}})
    mine.store(AT, 0, chunk(0))
    assert 0 in current.contributions, "an average of another member may not be the one that counts"
    mine.release(AT, 0, bytearray(8))
    mine.release(AT, 5, bytearray(8))
    assert current.contributions == {1: {"b": b"1" * 8}}


def test_a_payload_that_is_kept_stays_as_it_was_when_a_chunk_is_replaced() -> None:
    """It may be what a vote was for."""
    mine = open_round()
    for number in range(7):
        mine.store(AT, number, chunk(number))
    first = mine.assemble(AT)
    for number in (2, 3):
        mine.store(AT, number, b"another%d" % number)
    second = mine.assemble(AT)
    for digest, replaced in ((first, []), (second, [2, 3])):
        kept = mine.kept.get(digest)
        assert kept is not None
        assert ChunkedPayload.cut(kept.data, 8).digest == digest
        assert kept.data == b"".join(b"another%d" % one if one in replaced else chunk(one) for one in range(7))


def test_the_average_can_come_in_while_it_goes_out() -> None:
    """What is being sent is a view of the payload; storing more of it must not need a copy."""
    mine = open_round()
    mine.store(AT, 0, chunk(0))
    going_out = mine.read(AT, 0, is_averaged=True)
    mine.store(AT, 1, chunk(1))
    assert going_out == chunk(0)


def test_a_payload_with_holes_is_none() -> None:
    mine = open_round()
    for number in range(6):
        mine.store(AT, number, chunk(number))
    with pytest.raises(KeyError):
        mine.assemble(AT)


def test_a_round_that_is_over_has_no_blocks() -> None:
    mine = open_round()
    ends: tuple[Callable[[], None], ...] = (lambda: mine.open(NEXT), mine.close)
    for end in ends:
        end()
        assert mine.round(AT) is None
        reads: tuple[Callable[[], object], ...] = (
            lambda: mine.read(AT, 0, is_averaged=False),
            lambda: mine.read(AT, 0, is_averaged=True),
            lambda: mine.assemble(AT),
            lambda: mine.contributions(AT, 0, "a", [("a", 1)]),
            lambda: mine.store(AT, 0, bytes(8)),
        )
        for read in reads:
            with pytest.raises(KeyError, match="is over"):
                read()


def test_what_is_kept_outlives_its_round() -> None:
    mine = open_round()
    for number in range(7):
        mine.store(AT, number, chunk(number))
    digest = mine.assemble(AT)
    mine.open(NEXT)
    mine.close()
    assert mine.kept.get(digest) is not None


# Kept payloads --------------------------------------------------------------------------------------------------
def payload(number: int, size: int = 100) -> ChunkedPayload:
    data = bytearray(b"%d" % (number % 10) * size)
    return ChunkedPayload(memoryview(data), (digest_of(b"%d %d" % (number, size)),))


def keep(budget: int, *payloads: ChunkedPayload) -> KeptPayloads:
    kept = KeptPayloads(budget)
    for one in payloads:
        kept.keep(one)
    return kept


def is_kept(kept: KeptPayloads, *payloads: ChunkedPayload) -> list[bool]:
    return [kept.get(one.digest) is one for one in payloads]


@pytest.mark.parametrize("budget", [0, 1, 299, 300])
def test_however_small_the_budget_some_are_kept(budget: int) -> None:
    """Regression: the entry that was held could not be applied any more when it was committed."""
    payloads = [payload(number) for number in range(5)]
    assert is_kept(keep(budget, *payloads), *payloads) == [False, False, True, True, True]


@given(st.integers(0, 2000), st.lists(st.integers(1, 500), max_size=30))
def test_the_newest_are_kept_within_the_budget(budget: int, sizes: list[int]) -> None:
    payloads = [payload(number, size) for number, size in enumerate(sizes)]
    there = is_kept(keep(budget, *payloads), *payloads)
    assert there == sorted(there), "the oldest go first"
    if sum(there) > KEPT_AT_LEAST:
        assert sum(size for size, here in zip(sizes, there, strict=True) if here) <= budget
    assert sum(there) >= min(KEPT_AT_LEAST, len(sizes))


def test_no_more_is_dropped_than_must_be() -> None:
    payloads = [payload(number) for number in range(10)]
    assert sum(is_kept(keep(500, *payloads), *payloads)) == 5
    assert sum(is_kept(keep(599, *payloads), *payloads)) == 5
    assert all(is_kept(keep(1000, *payloads), *payloads))


def test_what_is_kept_again_is_new_again() -> None:
    first, second, *others = (payload(number) for number in range(4))
    kept = keep(0, first, second, others[0], first, others[1])
    assert is_kept(kept, first, second, *others) == [True, False, True, True]
    assert kept.get(digest_of(b"never seen")) is None


def test_payloads_that_lie_on_a_disk_are_dropped_first() -> None:
    payloads = [payload(number) for number in range(6)]
    kept = keep(250, *payloads[:4])
    assert is_kept(kept, *payloads[:4]) == [False, True, True, True], "beyond the budget, but nowhere else"
    kept.lies_on_disk(payloads[2].digest)
    assert is_kept(kept, *payloads[:4]) == [False, True, False, True]
    kept.lies_on_disk(payloads[3].digest)
    assert is_kept(kept, *payloads[:4]) == [False, True, False, True], "there is room for it"
    kept.keep(payloads[4])
    assert is_kept(kept, *payloads[:5]) == [False, True, False, False, True]
    kept.lies_on_disk(payloads[5].digest)  # is not here
    kept.keep(payloads[5])
    assert is_kept(kept, *payloads[4:]) == [True, True]


def test_a_payload_that_is_kept_again_counts_as_lying_nowhere_else() -> None:
    """It is about to be applied, whatever a disk has of it."""
    payloads = [payload(number) for number in range(3)]
    kept = keep(0, payloads[0])
    kept.lies_on_disk(payloads[0].digest)
    assert is_kept(kept, payloads[0]) == [False]
    for one in payloads:
        kept.keep(one)
    assert all(is_kept(kept, *payloads))


def test_between_rounds_little_memory_for_chunks_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.transfer.buffers.SPARE_BYTES", 2 * 8)
    mine = open_round()
    rooms = [mine.room(8) for _ in range(5)]
    mine.open(AT)
    current = mine.round(AT)
    assert current is not None
    current.contributions[0] = dict(zip("abcd", rooms[:4], strict=True))
    mine.release(AT, 0, rooms[4])
    mine.close()
    mine.open(NEXT)
    assert [any(room is one for one in rooms) for room in (mine.room(8) for _ in range(3))] == [True, True, False]


def test_what_was_prepared_for_a_round_serves_a_payload_that_is_fetched_before() -> None:
    mine = buffers()
    mine.prepare()
    prepared = mine.room_for_payload()
    prepared[:4] = b"here"
    mine.open(AT)
    for number in range(7):
        mine.store(AT, number, chunk(number))
    assert bytes(prepared[:4]) == b"here"


def test_a_round_in_which_garbage_came_together_does_not_displace_what_is_held() -> None:
    """Regression: the entry that was held could then not be applied any more when it was committed."""
    mine = buffers()
    mine.open(AT)
    for number in range(7):
        mine.store(AT, number, chunk(number))
    held = mine.assemble(AT)
    mine.open(NEXT)
    for number in range(7):
        mine.store(NEXT, number, b"garbage!")
    assert mine.assemble(NEXT) != held
    kept = mine.kept.get(held)
    assert kept is not None
    assert kept.data == b"".join(map(chunk, range(7)))


def test_what_we_trained_outlives_a_round_that_came_to_nothing() -> None:
    """The next one may begin at once, and needs it again."""
    mine = open_round()
    mine.close()
    mine.open(NEXT)
    assert mine.read(NEXT, 1, is_averaged=False) == OWN[8:16]


def test_an_empty_payload_can_be_had() -> None:
    assert bytes(empty(0)) == b""
    assert bytes(empty(10_000)) == bytes(10_000)


def test_what_others_ask_for_from_long_ago_pushes_nothing_out_that_is_needed_now() -> None:
    """Regression: it did, and who was about to apply an entry ended for lack of its payload."""
    reads = []
    long_ago = {one.digest: one for one in (payload_of(b"long ago %d" % number) for number in range(10))}

    def read(digest: bytes) -> ChunkedPayload | None:
        reads.append(digest)
        return long_ago.get(digest)

    mine = PayloadBuffers(SimulatedWorkload("a", BLOCKS), 0, read)
    held = payload_of(b"held")
    mine.kept.keep(held)
    for digest, payload in long_ago.items():
        assert mine.find(digest) is mine.find(digest) is payload
    assert reads == list(long_ago), "the last few are not read again"
    assert mine.kept.get(held.digest) is mine.find(held.digest) is held
    assert mine.find(digest_of(b"nobody's")) is None


def payload_of(data: bytes) -> ChunkedPayload:
    return ChunkedPayload(memoryview(data), (digest_of(data),))
