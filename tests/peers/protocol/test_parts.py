"""The signed averages of a round: who may make them, what a Part must be, and what a round comes to (R3, R4, R9)."""

from __future__ import annotations

from typing import Any

import pytest

from peers.log.header import NO_PAYLOAD, Position
from peers.messages.averages import MARK_BYTES, statement_of
from peers.messages.messages import Part
from peers.messages.rounds import Round
from peers.protocol.parts import Averages, Parts, Reducers, round_outcome
from peers.values.chunks import digest_of_chunks
from peers.values.wire import digest_of
from tests.peers.rounds import round_among, round_name, round_with, signed_by
from tests.simulator.simulated_keys import SimulatedKeys

ROUND = round_among("abc", each=2)
"""a averages the chunks 0 and 1, b 2 and 3, c 4 and 5."""
KEYS = SimulatedKeys("z")
OTHER = digest_of(b"another average")


def part(reducer: str, *chunks: int, round: Round = ROUND, **more: Any) -> Part:
    return Part(round=round.name, averages=tuple(signed_by(round, reducer, chunk, **more) for chunk in chunks))


def whole(parts: Parts, but: str = "") -> Parts:
    for place, reducer in enumerate("abc"):
        if reducer not in but:
            assert parts.take(reducer, part(reducer, 2 * place, 2 * place + 1))
    return parts


# Who may average -----------------------------------------------------------------------------------------------------
def test_r3_parts_are_consecutive_and_the_first_one_rotates_with_the_head() -> None:
    assert dict(Reducers(ROUND).parts) == {"a": range(2), "b": range(2, 4), "c": range(4, 6)}
    head = (1).to_bytes(8) + bytes(24)
    later = round_name(position=ROUND.name.position.model_copy(update={"head": head}))
    assert Reducers(round_among("abc", each=2, name=later)).of(0)[0] == "b"
    assert not Reducers(round_with({"a": 0, "b": 6}, name=later)).parts.get("a")


def test_r4_an_heir_may_average_what_its_reducer_does_not_and_only_a_contributor_is_one() -> None:
    reducers = Reducers(round_among("abcd", idle="d", each=2))
    assert reducers.add([("a", "b"), ("a", "d"), ("d", "b"), ("b", "b")]) == {"b": [range(2)]}
    assert reducers.add([("a", "b"), ("a", "c")]) == {"c": [range(2)]}, "the same again is no news"
    assert (reducers.of(0), reducers.of(2), reducers.of(99)) == (("c", "b", "a"), ("b",), ())


# What a Part must be -------------------------------------------------------------------------------------------------
WRONG: dict[str, tuple[str, Part]] = {
    "of another round": ("a", part("a", 0, round=round_among("abc", each=2, name=round_name(2)))),
    "of another's chunk": ("a", part("a", 2)),
    "of no chunk": ("a", part("a", 6)),
    "told by another": ("b", part("a", 0)),
    "not signed": ("a", Part(round=ROUND.name, averages=(signed_by(ROUND, "a", 0).model_copy(update={"chunk": 1}),))),
    "without its maker": ("a", part("a", 0, absent="a")),
    "without a stranger": ("a", part("a", 0, absent="z")),
    "absent in another order": ("a", part("a", 0, absent="cb")),
}


@pytest.mark.parametrize("what", WRONG)
def test_r3_nothing_but_a_reducers_own_signed_averages_counts(what: str) -> None:
    parts = whole(Parts(ROUND, KEYS), but="a")
    assert not parts.take(*WRONG[what])
    assert parts.missing() == ("a",)


def test_r3_a_false_signature_is_the_last_that_is_checked_of_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of thousands would hold the leader up, again and again."""
    checked = list[str]()

    def verify(keys: SimulatedKeys, peer: str, data: bytes, signature: bytes) -> bool:
        checked.append(peer)
        return old(keys, peer, data, signature)

    old = SimulatedKeys.verify
    monkeypatch.setattr(SimulatedKeys, "verify", verify)
    parts = Parts(ROUND, KEYS)
    assert not parts.take("b", part("b", *[2] * 50, *[0] * 50)), "no chunk of its own twice, and no other at all"
    assert len(checked) == 1
    false = tuple(signed_by(ROUND, "a", 0).model_copy(update={"chunk": chunk}) for chunk in (1, 0))
    for _ in range(3):
        assert not parts.take("a", Part(round=ROUND.name, averages=false))
    assert len(checked) == 2
    assert not parts.take("a", part("a", 0, 1)), "an heir gives them"


def test_an_average_of_other_terms_is_not_signed() -> None:
    """Two rounds of one name that a lying leader tells to two members have no averages in common."""
    other = ROUND.model_copy(update={"committed": digest_of(b"others")})
    assert not Parts(ROUND, KEYS).take("a", part("a", 0, round=other))


def test_r4_the_first_average_of_a_chunk_counts_and_an_heirs_takes_the_place_of_one_that_is_dropped() -> None:
    parts = whole(Parts(ROUND, KEYS))
    first = parts.outcome()
    assert parts.take("b", part("b", 0, digest=OTHER), heirs=[("a", "b")])
    assert parts.outcome() == first
    parts.drop("a")
    assert (parts.missing(), parts.signers([0, 2])) == (("a",), ("b",))
    assert not parts.take("a", part("a", 0, 1))
    assert parts.take("b", part("b", 0, 1, digest=OTHER))
    assert parts.outcome() not in (None, first)


# What it comes to ----------------------------------------------------------------------------------------------------
def test_r4_a_whole_round_comes_to_a_payload_with_a_mark_for_each_average() -> None:
    averages = {chunk: signed_by(ROUND, Reducers(ROUND).of(chunk)[0], chunk, absent="") for chunk in range(6)}
    averages[2] = signed_by(ROUND, "b", 2, absent="ac")
    averages[3] = signed_by(ROUND, "b", 3, absent="c")
    outcome = round_outcome(ROUND, averages)
    assert outcome is not None
    assert outcome.payload == digest_of_chunks([bytes(32)] * 6)
    assert outcome.absent == {"a": 1, "c": 2}
    assert outcome.marks[2 * MARK_BYTES : 3 * MARK_BYTES] == statement_of(ROUND, averages[2]).mark
    assert round_outcome(ROUND, {chunk: averages[chunk] for chunk in range(5)}) is None
    none = round_outcome(round_with({"a": 0, "b": 0}, idle="ab"), {})
    assert none is not None
    assert none.payload == NO_PAYLOAD


def test_r4_a_mark_tells_an_average_from_any_other_of_its_chunk() -> None:
    averages = Averages("b", ROUND, KEYS)
    right = signed_by(ROUND, "a", 0)
    averages.marks = statement_of(ROUND, right).mark * 6
    assert averages.is_marked(right)
    for other in (signed_by(ROUND, "a", 0, OTHER), signed_by(ROUND, "a", 0, absent="c"), signed_by(ROUND, "c", 0)):
        averages.keep(other)
        assert not averages.is_marked(other)
        assert 0 in averages.lacking(), "what is here is another one than the proposal names"
    averages.keep(right)
    assert 0 not in averages.lacking()


@pytest.mark.parametrize(("absent", "tokens"), [({}, [100, 100]), ({"b": 1}, [100, 66]), ({"b": 3}, [100])])
def test_r14_a_member_counts_for_the_chunks_that_its_blocks_are_in(absent: dict[str, int], tokens: list[int]) -> None:
    round = round_with({"a": 2, "b": 1})
    assert [member.tokens for member in round.counted(absent)] == tokens


def test_r13_a_founder_of_whose_blocks_none_is_in_stays_one_without_tokens() -> None:
    first = Position(index=0, head=bytes(32))
    round = round_with({"a": 2, "b": 1}, name=round_name(position=first))
    counted = round.counted({"b": 3})
    assert [(member.peer, member.tokens, member.samples) for member in counted][1:] == [("b", 0, ())]
