"""What reducers sign of the chunks that they averaged, and what it comes to at the leader."""

from __future__ import annotations

from typing import Any

import pytest

from peers.log.header import NO_PAYLOAD
from peers.protocol.messages import Part
from peers.protocol.parts import (
    MARK_BYTES,
    MARKED,
    Averaged,
    Averages,
    Outcome,
    Parts,
    Reducers,
    contradict,
    outcome_of,
    statement_of,
)
from peers.protocol.rounds import Round, RoundName
from peers.values.chunks import digest_of_chunks
from peers.values.wire import MESSAGE_LIMIT, digest_of, field_names
from tests.peers.rounds import AT, HERE, round_among, round_name, round_with, signed_by
from tests.simulator.simulated_keys import SimulatedKeys

OURS, THEIRS = digest_of(b"ours"), digest_of(b"theirs")
ROUND = round_among("abc")


def averages(me: str = "a", round: Round = ROUND) -> Averages:
    return Averages(me, round, SimulatedKeys(me))


def signed(reducer: str, chunk: int, digest: bytes = OURS, absent: str = "", round: Round = ROUND) -> Averaged:
    return signed_by(round, reducer, chunk, digest, absent)


def part(*averages: Averaged, name: RoundName = AT) -> Part:
    return Part(round=name, averages=averages)


# Signatures -----------------------------------------------------------------------------------------------------------
def test_a_signature_is_of_one_average_of_one_member_in_one_round() -> None:
    good = signed("b", 1, absent="c")
    assert averages().is_signed(good)
    changes: list[dict[str, Any]] = [
        {"chunk": 2},
        {"digest": THEIRS},
        {"absent": ()},
        {"origin": good.origin.model_copy(update={"reducer": "c"})},
    ]
    for change in changes:
        assert not averages().is_signed(good.model_copy(update=change)), change
    assert not averages(round=round_among("abc", name=round_name(7))).is_signed(good)


def other_rounds() -> dict[str, dict[str, object]]:
    """What a leader may tell another member of the same round."""
    first, *others = ROUND.shares
    heavier = first.model_copy(update={"member": first.member.model_copy(update={"tokens": 1})})
    restarted = first.model_copy(update={"member": first.member.model_copy(update={"incarnation": 7})})
    return {
        "nothing else": {},
        "contributions": {"committed": OURS},
        "tokens": {"shares": (heavier, *others)},
        "another start": {"shares": (restarted, *others)},
    }


@pytest.mark.parametrize("what", other_rounds())
def test_an_average_is_taken_only_from_members_that_know_the_same_of_the_round(what: str) -> None:
    """Regression: a leader that told each member of other contributions had honest ones find each other's averages
    wrong afterwards."""
    told = {name: getattr(ROUND, name) for name in field_names(Round)}
    reducer = averages("b", Round.model_validate(told | other_rounds()[what]))
    assert averages().is_signed(reducer.sign(1, OURS, ())) == (what == "nothing else")


def test_a_reducer_signs_one_average_of_a_chunk() -> None:
    mine = averages("b")
    assert mine.sign(1, OURS, ("c",)) == signed("b", 1, absent="c") == mine.ours[1]
    with pytest.raises(AssertionError):
        mine.sign(1, THEIRS, ())


def test_two_averages_of_one_chunk_contradict_each_other() -> None:
    first = signed("b", 1)
    assert contradict(first, signed("b", 1, THEIRS))
    assert contradict(first, signed("b", 1, absent="c")), "whose blocks are absent is signed, too"
    for other in (first, signed("c", 1, THEIRS), signed("b", 2, THEIRS)):
        assert not contradict(first, other)


def test_an_average_that_takes_the_place_of_another_one_of_its_reducer_is_remembered_with_it() -> None:
    mine, first, second, heirs = averages(), signed("b", 1), signed("b", 1, THEIRS), signed("c", 1)
    assert not mine.keep(first, 2.0)
    assert mine.keep(heirs, 1.0)
    assert mine.contradictions == []
    assert mine.squares_with(first, 2.0) == 2.0, "none of it is here any more"
    assert mine.keep(first, 2.0)
    assert mine.keep(second, 3.0)
    assert mine.contradictions == [(first, second)]
    assert mine.squares_with(signed("b", 2), 1.0) == 4.0
    assert mine.squares_with(signed("b", 1), 1.0) == 1.0


# Marks ----------------------------------------------------------------------------------------------------------------
def test_marks_tell_averages_from_others() -> None:
    mine = averages()
    for averaged in (signed("a", 0), signed("b", 1), signed("c", 2)):
        mine.keep(averaged)
    assert mine.lacking() == []
    outcome = mine.outcome()
    assert outcome is not None
    assert len(outcome.marks) == 3 * MARK_BYTES
    mine.marks = outcome.marks
    assert mine.lacking() == []
    for other in (signed("b", 1, THEIRS), signed("b", 1, absent="c"), signed("c", 1)):
        assert not mine.is_marked(other)
        mine.keep(other)
        assert mine.lacking() == [1]
    mine.keep(signed("b", 1))
    assert mine.lacking() == []


def test_the_marks_of_many_chunks_fit_into_a_message() -> None:
    """Regression: to say that of a payload of 34 G values raised an error."""
    chunks = MARKED + 3
    round = round_with({"a": chunks, "b": 0})
    one = signed("a", 0, round=round)
    outcome = outcome_of(round, dict.fromkeys(range(chunks), one))
    assert outcome is not None
    assert len(outcome.marks) == MARKED * MARK_BYTES <= MESSAGE_LIMIT // 2
    mine = averages(round=round)
    mine.marks = outcome.marks
    assert mine.is_marked(one)
    assert mine.is_marked(signed("a", MARKED, THEIRS, round=round)), "it has no mark"
    assert not mine.is_marked(signed("a", MARKED - 1, THEIRS, round=round))


# Who averages what ----------------------------------------------------------------------------------------------------
def test_parts_are_consecutive_and_rotate_with_the_head() -> None:
    firsts = set[str]()
    for turn in range(3):
        position = HERE.model_copy(update={"head": turn.to_bytes(8) + bytes(24)})
        reducers = Reducers(round_with({"a": 1, "b": 2, "c": 0, "d": 3}, name=round_name(position=position)))
        assert sorted(chunk for each in reducers.parts.values() for chunk in each) == list(range(6))
        assert {peer: len(each) for peer, each in reducers.parts.items()} == {"a": 1, "b": 2, "d": 3}
        assert [reducers.owner(chunk) for chunk in range(6)] == [
            peer for peer, each in reducers.parts.items() for _ in each
        ]
        firsts.add(reducers.owner(0))
    assert firsts == {"a", "b", "d"}


def test_heirs_are_contributors_besides_the_reducer() -> None:
    reducers = Reducers(round_among("abcd", idle="d"))
    assert reducers.of(1) == ("b",)
    assert reducers.add([("b", "b"), ("b", "d"), ("b", "z"), ("z", "a"), ("d", "a")]) == {}
    assert reducers.add([("b", "a")]) == {"a": [range(1, 2)]}
    assert reducers.add([("b", "a"), ("b", "c")]) == {"c": [range(1, 2)]}
    assert reducers.of(1) == ("c", "a", "b")
    assert reducers.of(99) == ()


# At the leader --------------------------------------------------------------------------------------------------------
def test_a_round_comes_to_what_its_parts_say() -> None:
    parts = Parts(ROUND, SimulatedKeys("a"))
    assert (parts.missing(), parts.outcome()) == (("a", "b", "c"), None)
    told = [signed("a", 0, absent="b"), signed("b", 1), signed("c", 2, THEIRS, absent="ab")]
    for averaged in told:
        assert parts.take(averaged.reducer, part(averaged))
    assert parts.missing() == ()
    marks = b"".join(statement_of(ROUND, averaged).mark for averaged in told)
    assert parts.outcome() == Outcome(digest_of_chunks([OURS, OURS, THEIRS]), {"a": 1, "b": 2}, marks)


def test_a_round_in_which_nobody_averages_comes_to_no_payload() -> None:
    parts = Parts(round_among("ab", idle="ab"), SimulatedKeys("a"))
    assert parts.missing() == ()
    assert parts.outcome() == Outcome(NO_PAYLOAD, {}, b"")


BAD: dict[str, tuple[str, Part]] = {
    "handed on": ("a", part(signed("b", 1))),
    "another's chunk": ("b", part(signed("b", 2))),
    "no chunk": ("b", part(signed("b", 3))),
    "no reducer": ("z", part(signed("z", 1))),
    "not signed": ("b", part(signed("b", 1).model_copy(update={"digest": THEIRS}))),
    "without its own": ("b", part(signed("b", 1, absent="b"))),
    "without a stranger": ("b", part(signed("b", 1, absent="z"))),
    "in another order": ("b", part(signed("b", 1, absent="ca"))),
    "of another round": ("b", part(signed("b", 1), name=round_name(7))),
}


@pytest.mark.parametrize("what", BAD)
def test_nothing_else_is_a_part(what: str) -> None:
    parts = Parts(ROUND, SimulatedKeys("a"))
    assert not parts.take(*BAD[what])
    assert parts.missing() == ("a", "b", "c")


def test_a_bad_average_does_not_spoil_the_rest_of_a_part() -> None:
    parts = Parts(ROUND, SimulatedKeys("a"))
    assert not parts.take("b", part(signed("b", 2), signed("b", 1)))
    assert parts.missing() == ("a", "c")


def test_an_heirs_part_counts_when_its_leader_has_named_it_and_the_first_average_wins() -> None:
    parts = Parts(ROUND, SimulatedKeys("a"))
    parts.take("a", part(signed("a", 0)))
    parts.take("c", part(signed("c", 2)))
    assert not parts.take("c", part(signed("c", 1), signed("c", 2)))
    assert parts.missing() == ("b",)
    assert parts.take("c", part(signed("c", 1), signed("c", 2)), [("b", "c")])
    assert parts.missing() == ()
    outcome = parts.outcome()
    assert parts.take("b", part(signed("b", 1, THEIRS))), "it comes too late"
    assert parts.outcome() == outcome
    assert parts.contradictions == []


def test_two_parts_that_contradict_each_other_are_kept() -> None:
    parts, first, second = Parts(ROUND, SimulatedKeys("a")), signed("b", 1), signed("b", 1, THEIRS)
    parts.take("b", part(first))
    parts.take("b", part(second))
    parts.take("b", part(second))
    assert parts.contradictions == [(first, second)]


def test_a_leader_can_do_without_a_member_that_signs_what_is_no_average() -> None:
    parts = Parts(ROUND, SimulatedKeys("a"))
    for averaged in (signed("a", 0), signed("b", 1), signed("c", 2)):
        parts.take(averaged.reducer, part(averaged))
    parts.refuse("b")
    assert parts.missing() == ("b",)
    assert not parts.take("b", part(signed("b", 1)))
    assert parts.take("c", part(signed("c", 1), signed("c", 2)), [("b", "c")])
    assert parts.missing() == ()
