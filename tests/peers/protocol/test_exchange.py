"""One round at one member (R3), as tables of events and the effects that they have; then whole circles of members.

The members are a, b, c and so on. Each averages one chunk, the first the chunk 0.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, count
from typing import cast

import pytest

from peers.log.header import NO_PAYLOAD
from peers.messages.averages import MARK_BYTES, Averaged, statement_of
from peers.messages.chunk_sets import CHUNK_SET_BYTES, chunk_set, chunks_in
from peers.messages.messages import Part, Want
from peers.messages.rounds import Round
from peers.protocol import exchange as exchanges
from peers.protocol.contributions import Contributions
from peers.protocol.effects import AssemblePayload, Effect, OpenRound, ReduceChunk, Send, SendChunk
from peers.protocol.events import (
    BadBlocks,
    ChunkSent,
    ChunksUnsent,
    ContributionArrived,
    PayloadAssembled,
    ReducedArrived,
)
from peers.protocol.exchange import DUE, GIVEN, GONE, STALLED, Exchange, ExchangeEvent
from peers.protocol.parts import Parts, RoundOutcome, round_outcome
from peers.protocol.planning import FAIR
from peers.values.chunks import payloads_moved
from peers.values.wire import digest_of
from tests.peers.rounds import AT, CONTRIBUTED, TOKENS, round_among, round_name, round_with, signed_by
from tests.simulator.simulated_keys import SimulatedKeys

PAYLOAD = digest_of(b"payload")
ROUND = round_among("abc")
SECONDS = 10.0
ALL = "abcdef"


def contributed(squares: dict[str, float]) -> Contributions:
    """Return contributions with these squared norms, where twice the median counts in full."""
    return Contributions(squares=squares, clip=2.0, weights=dict.fromkeys(squares, float(TOKENS)))


def exchange_of(me: str, round: Round = ROUND, contributions: Contributions | None = None) -> Exchange:
    return Exchange(me, round, contributions or Contributions(), SimulatedKeys(me), 0.0, SECONDS)


def opened(me: str, round: Round = ROUND) -> Exchange:
    exchange = exchange_of(me, round)
    exchange.open()
    return exchange


def want(to: str, averages: Iterable[int] = (), blocks: Iterable[int] = ()) -> Send:
    return Send(to, wanted(averages, blocks))


def wanted(averages: Iterable[int] = (), blocks: Iterable[int] = ()) -> Want:
    return Want(round=AT, averages=chunk_set(averages), blocks=chunk_set(blocks))


def reduce(chunk: int, names: str, absent: str = "") -> ReduceChunk:
    return ReduceChunk(AT, chunk, tuple((name, TOKENS) for name in names), tuple(absent))


def own(to: str, chunk: int) -> SendChunk:
    return SendChunk(AT, to, chunk, reduced=False)


def average(to: str, chunk: int, absent: str = "") -> SendChunk:
    return SendChunk(AT, to, chunk, reduced=True, absent=tuple(absent))


def blocks(sender: str, chunk: int) -> ContributionArrived:
    return ContributionArrived(AT, sender, chunk)


def made(me: str, chunk: int, absent: str = "") -> ReducedArrived:
    """Our own average is done."""
    return ReducedArrived(AT, me, chunk, tuple(absent))


def arrived(averaged: Averaged, sender: str | None = None) -> ReducedArrived:
    """An average of another member is here."""
    reducer = averaged.reducer
    return ReducedArrived(AT, sender or reducer, averaged.chunk, averaged.absent, averaged.digest, averaged.origin)


def signed(reducer: str, chunk: int, absent: str = "", digest: bytes = bytes(32), round: Round = ROUND) -> Averaged:
    return signed_by(round, reducer, chunk, digest, absent)


def marks(*averages: Averaged, round: Round = ROUND) -> bytes:
    return b"".join(statement_of(round, averaged).mark for averaged in averages)


# Nothing is lost ------------------------------------------------------------------------------------------------------
def test_three_members_the_whole_way() -> None:
    exchange = exchange_of("b")
    assert exchange.open() == [OpenRound(exchange.round), own("a", 0), own("c", 2)]
    assert exchange.part() is None
    table: list[tuple[ExchangeEvent, list[Effect]]] = [
        (blocks("c", 1), []),
        (ChunkSent(AT, "a", 0, reduced=False), []),
        (arrived(signed("c", 2)), []),
        (blocks("a", 1), [reduce(1, "abc")]),
        (blocks("a", 1), []),
        (made("b", 1), [average("a", 1), average("c", 1)]),
        (made("b", 1), []),
        (ChunkSent(AT, "a", 1, reduced=True), []),
        (arrived(signed("a", 0)), [AssemblePayload(AT)]),
        (arrived(signed("a", 0)), []),
        (ChunkSent(AT, "c", 2, reduced=False), []),
        (ChunkSent(AT, "c", 1, reduced=True), []),
        (PayloadAssembled(AT, PAYLOAD), []),
    ]
    for event, effects in table:
        assert exchange.handle(event) == effects, event
    assert exchange.is_whole
    assert exchange.payload == PAYLOAD
    assert exchange.part() == Part(round=AT, averages=(signed("b", 1, digest=NO_PAYLOAD),))
    assert exchange.absent() == {}
    assert exchange.tick(SECONDS, ALL) == []


def test_own_blocks_go_out_with_our_signature_and_averages_with_their_reducers() -> None:
    exchange = exchange_of("b", contributions=Contributions(signature=b"ours"))
    sent = [effect for effect in exchange.open() if isinstance(effect, SendChunk)]
    assert [(send.to, send.signature, send.origin) for send in sent] == [("a", b"ours", None), ("c", b"ours", None)]
    exchange.handle(blocks("a", 1))
    exchange.handle(blocks("c", 1))
    sent = [one for one in exchange.handle(made("b", 1)) if isinstance(one, SendChunk)]
    origin = signed("b", 1, digest=NO_PAYLOAD).origin
    assert [(send.to, send.signature, send.origin) for send in sent] == [("a", None, origin), ("c", None, origin)]


def test_contributions_that_are_clipped_are_averaged_so() -> None:
    exchange = exchange_of("b", contributions=contributed({"a": 400.0, "b": 4.0, "c": 4.0}))
    exchange.open()
    exchange.handle(blocks("a", 1))
    (effect,) = exchange.handle(blocks("c", 1))
    assert isinstance(effect, ReduceChunk)
    assert effect.weights == [("a", 0.2 * TOKENS), ("b", TOKENS), ("c", TOKENS)]


def test_r3_what_absent_members_are_said_to_have_committed_to_lifts_no_clip() -> None:
    """A leader that lies about members whose blocks never come would have its own count in full."""
    squares = {"a": 400.0, "b": 4.0, "c": 400.0, "d": 400.0}
    exchange = exchange_of("b", round_among("abcd"), contributed(squares))
    assert exchange.reduction_of(1, ()).clipped == {}
    assert exchange.reduction_of(1, ("c", "d")).clipped == {"a": 0.2}


@pytest.mark.parametrize("reduced", [False, True], ids=["own blocks", "the average"])
def test_chunks_that_did_not_arrive_are_sent_again_after_the_pause_and_not_before(reduced: bool) -> None:
    exchange = opened("b")
    sent = average("c", 1) if reduced else own("c", 2)
    for event in (blocks("a", 1), blocks("c", 1), made("b", 1)):
        exchange.handle(event)
    assert exchange.tick(1.0, ALL) == [], "it is under way"
    assert exchange.handle(ChunksUnsent(AT, "c", (sent.chunk,), reduced)) == []
    assert exchange.tick(1.5, ALL) == []
    assert exchange.tick(2.0, "ab") == [], "c is not heard"
    assert exchange.tick(3.0, ALL) == [sent]
    assert exchange.tick(4.0, ALL) == []


def test_only_what_is_due_is_wanted() -> None:
    exchange = opened("b")
    assert exchange.wants_blocks("a", 1)
    assert not exchange.wants_blocks("a", 0), "another's part"
    assert not exchange.wants_blocks("z", 1), "a stranger"
    assert not exchange.wants_blocks("a", 2**40)
    assert exchange.wants_average(0)
    assert not exchange.wants_average(2**40)
    exchange.handle(blocks("a", 1))
    exchange.handle(arrived(signed("a", 0)))
    assert not exchange.wants_blocks("a", 1), "it is here"
    assert not exchange.wants_average(0), "it is here"


def test_a_sender_learns_whether_to_send_a_chunk_again() -> None:
    exchange = exchange_of("b")
    assert not exchange.is_done_with("a", 1, reduced=False)
    assert not exchange.is_done_with("a", 0, reduced=True)
    assert not exchange.is_done_with("a", 2**40, reduced=True)
    exchange.open()
    for event in (blocks("a", 1), arrived(signed("a", 0))):
        exchange.handle(event)
    assert exchange.is_done_with("a", 1, reduced=False)
    assert not exchange.is_done_with("c", 1, reduced=False)
    assert exchange.is_done_with("a", 0, reduced=True)
    exchange.handle(blocks("c", 1))
    assert exchange.is_done_with("c", 1, reduced=False), "it is being averaged"
    exchange.handle(made("b", 1))
    assert exchange.is_done_with("c", 1, reduced=False), "it comes too late"


def test_a_lone_member_averages_its_own() -> None:
    exchange = exchange_of("a", round_among("a"))
    assert exchange.open() == [OpenRound(exchange.round), reduce(0, "a")]
    assert exchange.handle(made("a", 0)) == [AssemblePayload(AT)]


def test_a_round_in_which_nobody_averages_is_whole_at_once() -> None:
    exchange = exchange_of("a", round_among("ab", idle="ab"))
    assert exchange.open() == []
    assert exchange.payload == NO_PAYLOAD
    assert exchange.outcome() == RoundOutcome(NO_PAYLOAD, {}, b"")


def test_a_member_that_has_trained_nothing_sends_nothing_and_gets_the_average() -> None:
    round = round_among("abc", idle="c")
    idle = exchange_of("c", round)
    assert idle.open() == [OpenRound(round)]
    other = exchange_of("a", round)
    assert other.open() == [OpenRound(round), own("b", 1)]
    assert not other.wants_blocks("c", 0)
    assert other.handle(blocks("b", 0)) == [reduce(0, "ab")]
    assert other.handle(made("a", 0)) == [average("b", 0), average("c", 0)]
    for chunk, sender in enumerate("ab"):
        effects = idle.handle(arrived(signed(sender, chunk, round=round)))
    assert effects == [AssemblePayload(AT)]
    assert idle.part() is None


def test_a_member_with_a_slow_link_contributes_and_averages_nothing() -> None:
    round = round_with({"a": 2, "b": 0})
    assert exchange_of("b", round).open() == [OpenRound(round), own("a", 0), own("a", 1)]


# Blocks are missing ---------------------------------------------------------------------------------------------------
def test_a_chunk_is_averaged_without_what_is_missing_when_its_time_is_over() -> None:
    exchange = opened("b")
    exchange.handle(blocks("a", 1))
    assert exchange.tick(DUE * SECONDS - 0.1, ALL) == []
    assert exchange.tick(DUE * SECONDS, ALL) == [reduce(1, "ab", absent="c")]
    assert exchange.tick(DUE * SECONDS + 0.1, ALL) == []
    assert exchange.handle(made("b", 1, absent="c")) == [average(to, 1, absent="c") for to in "ac"]
    exchange.handle(arrived(signed("a", 0, absent="c")))
    exchange.handle(arrived(signed("c", 2)))
    assert exchange.absent() == {"c": 2}


def test_a_reducer_has_its_own_blocks_at_least() -> None:
    exchange = opened("b")
    assert exchange.tick(DUE * SECONDS, ALL) == [reduce(1, "b", absent="ac")]


def test_members_that_are_not_heard_are_not_waited_for() -> None:
    """Not at the very beginning: a reducer may not have heard yet of members that their leader knows."""
    exchange = opened("b")
    exchange.handle(blocks("a", 1))
    assert exchange.tick(GONE * SECONDS - 0.1, "a") == []
    assert exchange.tick(GONE * SECONDS, "a") == [reduce(1, "ab", absent="c")]


def test_blocks_of_a_member_that_died_count_if_they_are_here() -> None:
    exchange = opened("b")
    exchange.handle(blocks("c", 1))
    assert exchange.tick(GONE * SECONDS, "a") == [], "a is awaited"
    assert exchange.handle(blocks("a", 1)) == [reduce(1, "abc")]


def test_bad_blocks_are_absent() -> None:
    exchange = opened("b")
    exchange.handle(blocks("a", 1))
    assert exchange.handle(BadBlocks(AT, "c", 1, "code -128")) == [reduce(1, "ab", absent="c")]
    assert not exchange.wants_blocks("c", 1)
    assert exchange.is_done_with("c", 1, reduced=False)


def test_blocks_that_turn_out_to_have_no_average_are_left_out_and_the_rest_averaged() -> None:
    exchange = opened("b")
    exchange.handle(blocks("a", 1))
    assert exchange.handle(blocks("c", 1)) == [reduce(1, "abc")]
    assert exchange.handle(BadBlocks(AT, "c", 1, "overflow")) == [reduce(1, "ab", absent="c")]
    assert exchange.handle(made("b", 1, absent="c")) == [average(to, 1, absent="c") for to in "ac"]


def test_what_is_no_average_is_not_held_against_its_reducers_blocks() -> None:
    exchange = opened("b")
    exchange.handle(blocks("a", 1))
    assert exchange.handle(BadBlocks(AT, "c", 1, "code -128", reduced=True)) == []
    assert exchange.wants_blocks("c", 1), "its blocks are another matter"


# A reducer is missing -------------------------------------------------------------------------------------------------
def test_an_heir_asks_for_blocks_and_averages_anew() -> None:
    exchange = opened("b")
    exchange.handle(blocks("a", 1))
    exchange.handle(blocks("c", 1))
    exchange.handle(made("b", 1))
    assert exchange.part() is not None
    assert exchange.go_on([("c", "b")], SECONDS, 10.0) == [want("a", blocks=[2]), want("c", blocks=[2])]
    assert exchange.part() is None
    assert exchange.tick(11.0, "a") == [want("a", blocks=[2])], "it may not have arrived"
    assert exchange.wants_blocks("a", 2)
    assert exchange.handle(blocks("a", 2)) == []
    assert exchange.tick(10.0 + GONE * SECONDS, "a") == [reduce(2, "ab", absent="c")]
    assert exchange.handle(made("b", 2, absent="c")) == [average(to, 2, absent="c") for to in "ac"]
    part = exchange.part()
    assert part is not None
    assert [(one.chunk, one.reducer) for one in part.averages] == [(1, "b"), (2, "b")]


def test_an_heir_does_not_wait_once_more_for_a_member_that_gives_nothing() -> None:
    exchange = opened("b")
    exchange.handle(blocks("a", 1))
    exchange.tick(DUE * SECONDS, ALL)
    exchange.handle(made("b", 1, absent="c"))
    exchange.go_on([("c", "b")], SECONDS, 10.0)
    assert exchange.handle(blocks("a", 2)) == [reduce(2, "ab", absent="c")]


def test_a_member_gives_its_blocks_to_reducers_and_to_heirs_that_it_was_told_of() -> None:
    exchange = opened("a")
    assert exchange.hear("b", wanted(blocks=[2])) == []
    assert exchange.go_on([("c", "b")], SECONDS, 1.0) == []
    assert exchange.hear("b", wanted(blocks=[0, 2])) == [own("b", 2)]
    assert exchange.hear("b", wanted(blocks=[2])) == [], "it is under way"
    exchange.handle(ChunkSent(AT, "b", 2, reduced=False))
    assert exchange.hear("b", wanted(blocks=[2])) == [own("b", 2)], "asked again, as it got lost"


def test_r3_blocks_of_twice_its_part_are_given_to_a_reducer_that_asks() -> None:
    """What is still under way is not counted again: an heir asks each second."""
    exchange = opened("a")
    sent = own("b", 1)
    given: list[Effect] = []
    for _ in range(5):
        for _ in range(3):
            given += exchange.hear("b", wanted(blocks=[1, 2]))
        exchange.handle(ChunkSent(AT, "b", sent.chunk, False))
    assert given == [sent] * GIVEN, "unasked it came before"


def test_what_a_member_asks_for_is_read_as_far_as_there_are_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of a hundred deflated bytes has half a million chunks, and takes as long as a hundred messages."""
    read: list[int] = []

    def noted(mask: bytes) -> list[int]:
        read.append(len(mask))
        return chunks_in(mask)

    monkeypatch.setattr(exchanges, "chunks_in", noted)
    exchange = opened("a")
    exchange.hear("b", Want(round=AT, averages=bytes(CHUNK_SET_BYTES), blocks=bytes(CHUNK_SET_BYTES)))
    assert read == [1, 1]


def test_a_member_that_has_trained_nothing_is_no_heir_and_gives_no_blocks() -> None:
    round = round_among("abc", idle="c")
    exchange = opened("c", round)
    assert exchange.go_on([("b", "c")], SECONDS, 1.0) == []
    exchange.go_on([("b", "a")], SECONDS, 1.0)
    assert exchange.hear("a", wanted(blocks=[1])) == []


def test_an_heir_that_averaged_nothing_before_is_told_what_was_committed_to() -> None:
    round = round_with({"a": 1, "b": 0})
    exchange = opened("b", round)
    told = Contributions(commitments={"a": CONTRIBUTED}, signature=b"ours")
    exchange.go_on([("a", "b")], SECONDS, 6.0, told)
    assert exchange.contributions is told


def test_a_later_heir_averages_what_the_first_one_did_not() -> None:
    round = round_among("abcd")
    exchange = opened("b", round)
    assert exchange.go_on([("d", "c")], SECONDS, 1.0) == []
    asked = [want(to, blocks=[3]) for to in "acd"]
    assert exchange.go_on([("d", "c"), ("d", "b")], SECONDS, 2.0) == asked
    assert exchange.is_vouched_for(signed("c", 3, round=round)), "the first one may have been slow"
    assert exchange.is_vouched_for(signed("d", 3, round=round))


def test_our_own_average_takes_the_place_of_the_one_that_a_leader_did_not_hear_of() -> None:
    exchange = opened("b")
    exchange.handle(arrived(signed("c", 2, digest=PAYLOAD)))
    exchange.go_on([("c", "b")], SECONDS, 6.0)
    exchange.tick(6.0 + DUE * SECONDS, ALL)
    exchange.handle(made("b", 2, absent="ac"))
    here = exchange.averages.of(2)
    assert here is not None
    assert here.reducer == "b"


# A proposal -----------------------------------------------------------------------------------------------------------
def whole(me: str = "b", last: Averaged | None = None) -> Exchange:
    """All of the payload is here, of c the `last`."""
    exchange = opened(me)
    for event in (
        blocks("a", 1),
        blocks("c", 1),
        made("b", 1),
        arrived(signed("a", 0)),
        arrived(last or signed("c", 2)),
    ):
        exchange.handle(event)
    exchange.handle(PayloadAssembled(AT, PAYLOAD))
    assert exchange.is_whole
    return exchange


PROPOSED = [signed("a", 0), signed("b", 1, digest=NO_PAYLOAD), signed("c", 2)]
OTHERWISE = [*PROPOSED[:2], signed("a", 2, absent="c")]


def test_a_proposal_of_what_is_here_changes_nothing() -> None:
    exchange = whole()
    outcome = exchange.outcome()
    assert outcome is not None
    assert outcome.marks == marks(*PROPOSED)
    assert exchange.proposed(outcome.marks) == []
    assert exchange.payload == PAYLOAD


def test_another_average_than_ours_is_fetched_and_the_payload_made_again() -> None:
    exchange = whole()
    assert exchange.proposed(marks(*OTHERWISE)) == [want("c", averages=[2])]
    assert not exchange.is_whole
    assert exchange.wants_average(2)
    assert not exchange.is_wanted(signed("c", 2))
    assert exchange.is_wanted(OTHERWISE[2])
    assert exchange.is_vouched_for(OTHERWISE[2]), "we have not heard of the heir"
    assert exchange.handle(arrived(OTHERWISE[2], "c")) == [AssemblePayload(AT)]
    exchange.handle(PayloadAssembled(AT, NO_PAYLOAD))
    assert exchange.payload == NO_PAYLOAD
    assert exchange.absent() == {"c": 1}
    assert exchange.proposed(marks(*PROPOSED)) == [want("c", averages=[2])], "a later ballot has the first one"


def test_averages_that_come_by_themselves_are_not_asked_for() -> None:
    """With a thin uplink a reducer sends for as long as an exchange takes: all others would send the same."""
    exchange = opened("b", round_among("abcd", each=2))
    averages = [signed("a", 0, round=exchange.round), signed("a", 1, round=exchange.round)]
    rest = [signed(peer, chunk, round=exchange.round) for chunk, peer in enumerate("bbccdd", 2)]
    for averaged in rest:
        exchange.averages.keep(averaged)
    assert exchange.proposed(marks(*averages, *rest, round=exchange.round)) == []
    assert asked(exchange.tick(STALLED - 0.1, ALL)) == {}
    exchange.handle(arrived(averages[0]))
    assert asked(exchange.tick(STALLED + 1, ALL)) == {}
    assert asked(exchange.tick(2 * STALLED, ALL)) == {"d": [1]}
    assert asked(exchange.tick(2 * STALLED + 1, ALL)) == {}
    assert asked(exchange.tick(3 * STALLED, ALL)) == {"c": [1]}
    assert asked(exchange.tick(3 * STALLED + 1, "abd")) == {"a": [1]}, "another one at once if it is not heard"


def asked(effects: list[Effect]) -> dict[str, list[int]]:
    sends = [effect for effect in effects if isinstance(effect, Send)]
    return {send.to: chunks_in(send.message.averages) for send in sends if isinstance(send.message, Want)}


def test_a_trickle_does_not_hold_a_member_up_for_longer_than_an_exchange_waits() -> None:
    exchange = opened("b", round_with({"a": 60, "b": 0, "c": 1}))
    exchange.proposed(bytes(61 * MARK_BYTES))
    now = 0.0
    while now < DUE * SECONDS:
        assert asked(exchange.tick(now, ALL)).get("c") is None
        exchange._search.came("a", now)
        now += 1.0
    assert len(asked(exchange.tick(now, ALL))["c"]) == 60


def test_a_reducer_that_is_gone_is_not_asked() -> None:
    exchange = whole()
    exchange.tick(0.5, "a")
    assert exchange.proposed(marks(*OTHERWISE)) == [want("a", averages=[2])]


@pytest.mark.parametrize("bad", [b"", b"short", bytes(4 * MARK_BYTES)])
def test_marks_of_other_chunks_than_the_rounds_are_none(bad: bytes) -> None:
    exchange = whole()
    assert exchange.proposed(bad) == []
    assert exchange.payload == PAYLOAD


def test_nothing_is_averaged_while_a_proposal_names_averages() -> None:
    """Another average of ours would take the place of what is proposed."""
    exchange = opened("b")
    exchange.handle(blocks("a", 1))
    assert exchange.handle(blocks("c", 1)) == [reduce(1, "abc")]
    assert exchange.wants_own(1)
    exchange.proposed(marks(*OTHERWISE))
    assert not exchange.wants_own(1), "what is being averaged is dropped"
    assert exchange.tick(2.0, ALL) == []
    assert exchange.go_on([], SECONDS, 8.0) == [reduce(1, "abc")], "another ballot begins"


def test_averages_are_given_to_any_member_that_asks() -> None:
    exchange = whole("b")
    exchange.handle(ChunkSent(AT, "a", 1, reduced=True))
    assert exchange.hear("a", wanted(averages=[1, 2, 7])) == [average("a", 1), average("a", 2)]
    assert exchange.hear("a", wanted(averages=[1, 2])) == [], "they are under way"
    assert exchange.hear("z", wanted(averages=[1, 2])) == [], "a stranger"
    other = Want(round=round_name(7), averages=chunk_set([1]), blocks=b"")
    assert exchange.hear("c", other) == []


def test_an_average_that_a_member_asks_for_too_early_is_sent_once_it_arrives() -> None:
    """Regression: a member that cannot reach a reducer asked another one while the average was still on its way there.
    That request was ignored, and the next one came three seconds later, in each round."""
    exchange = opened("b")
    for effect in (exchange.hear("a", wanted(averages=[2])), exchange.hear("a", wanted(averages=[2]))):
        assert effect == []
    assert exchange.handle(arrived(signed("c", 2))) == [average("a", 2)]
    assert exchange.handle(ChunkSent(AT, "a", 2, reduced=True)) == []
    assert exchange.hear("a", wanted(averages=[2])) == [average("a", 2)], "asked again, as it got lost"


def test_r3_an_average_that_was_asked_for_too_early_counts_as_given() -> None:
    exchange, given = opened("b"), 0
    for sender in "ac":
        exchange.hear(sender, wanted(averages=[0, 2]))
    for event in (arrived(signed("a", 0)), arrived(signed("c", 2))):
        for effect in exchange.handle(event):
            if isinstance(effect, SendChunk) and effect.to == "a":
                given += 1
                exchange.handle(ChunkSent(AT, "a", effect.chunk, reduced=True))
    assert given == 2
    for _ in range(10):
        for effect in exchange.hear("a", wanted(averages=[0, 2])):
            assert isinstance(effect, SendChunk)
            given += 1
            exchange.handle(ChunkSent(AT, effect.to, effect.chunk, reduced=True))
    assert given == GIVEN * 3


def test_another_average_than_the_proposed_one_is_not_given() -> None:
    exchange = whole()
    exchange.proposed(marks(*OTHERWISE))
    assert exchange.hear("a", wanted(averages=[0, 2])) == [average("a", 0)]


def test_no_member_has_us_send_the_payload_again_and_again() -> None:
    exchange, given = whole(), 0
    for _ in range(10):
        sent = exchange.hear("a", wanted(averages=[0, 1, 2]))
        given += len(sent)
        for send in sent:
            assert isinstance(send, SendChunk)
            exchange.handle(ChunkSent(AT, send.to, send.chunk, reduced=True))
    assert given <= GIVEN * 3


# What vouches for an average ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("heirs", "averaged", "is_good"),
    [
        ("", signed("b", 1), True),
        ("", signed("a", 1), False),
        ("", signed("c", 1), False),
        ("", signed("b", 99), False),
        ("c", signed("b", 1), True),
        ("c", signed("c", 1), True),
        ("c", signed("c", 2), True),
        ("", signed("b", 1, absent="ac"), True),
        ("", signed("b", 1, absent="b"), False),
        ("", signed("b", 1, absent="ca"), False),
        ("", signed("b", 1, absent="aa"), False),
        ("", signed("b", 1, absent="z"), False),
        ("", signed("b", 1, round=round_among("abcd")), False),
    ],
)
def test_reducers_and_heirs_vouch_for_averages(heirs: str, averaged: Averaged, is_good: bool) -> None:
    exchange = opened("a")
    exchange.go_on([("b", heir) for heir in heirs], SECONDS, 1.0)
    assert exchange.is_vouched_for(averaged) == is_good
    forged = averaged.model_copy(update={"digest": PAYLOAD})
    assert not exchange.is_vouched_for(forged)


def test_all_averages_of_a_reducer_are_no_longer_than_what_they_can_be_made_of() -> None:
    exchange = exchange_of("a", round_with({"a": 1, "b": 2}), contributed({"a": 1.0, "b": 0.5}))
    first, second = (signed("b", chunk, round=exchange.round) for chunk in (1, 2))
    assert not exchange.is_too_long(first, 4.0)
    exchange.averages.keep(first, 2.5)
    assert exchange.is_too_long(second, 2.5)
    assert not exchange.is_too_long(first, 4.0), "in its own place"


# Whole circles --------------------------------------------------------------------------------------------------------
@dataclass
class Circle:
    """All members of a round and its leader, among whom chunks and messages go astray, in any order.

    The average of a chunk is a fresh number each time, so that averaging it twice is seen.
    """

    names: str
    draw: random.Random
    loss: float
    now: float = 0.0
    exchanges: dict[str, Exchange] = field(default_factory=dict)
    payloads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    here: dict[str, set[tuple[int, str]]] = field(default_factory=dict)
    signed: dict[tuple[str, int], bytes] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    under_way: list[Callable[[], None]] = field(default_factory=list)
    numbers: count[int] = field(default_factory=count)
    heirs: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.round = round_among(self.names, each=2)
        self.parts = Parts(self.round, SimulatedKeys("a"))
        for name in self.names:
            self.payloads[name], self.here[name] = {}, set()
            self.exchanges[name] = exchange_of(name, self.round)
            self.carry_out(name, self.exchanges[name].open())

    @property
    def left(self) -> list[str]:
        return [name for name in self.names if name not in self.dead]

    def carry_out(self, name: str, effects: list[Effect]) -> None:
        for effect in effects:
            self.do(name, effect)

    def do(self, name: str, effect: Effect) -> None:
        match effect:
            case OpenRound():
                pass
            case Send(to, message):
                assert isinstance(message, Want)
                self.later(name, lambda: self.tell(name, to, message))
            case SendChunk():
                self.later(name, lambda: self.hand_over(name, effect))
            case ReduceChunk(chunk=chunk, members=members):
                assert name in [peer for peer, _ in members]
                assert all(peer == name or (chunk, peer) in self.here[name] for peer, _ in members)
                self.later(name, lambda: self.average(name, effect))
            case AssemblePayload():
                self.handle(name, PayloadAssembled(AT, self.digest_at(name)))

    def digest_at(self, name: str) -> bytes:
        averages = {chunk: self.exchanges[name].averages.of(chunk) for chunk in range(self.round.chunks)}
        assert {chunk: one.digest for chunk, one in averages.items() if one} == self.payloads[name]
        outcome = round_outcome(self.round, {chunk: one for chunk, one in averages.items() if one})
        assert outcome is not None
        return outcome.payload

    def later(self, name: str, action: Callable[[], None]) -> None:
        self.under_way.append(lambda: None if name in self.dead else action())

    def handle(self, name: str, event: ExchangeEvent) -> None:
        if name not in self.dead:
            self.carry_out(name, self.exchanges[name].handle(event))

    def gets_lost(self, to: str) -> bool:
        return to in self.dead or self.draw.random() < self.loss

    def tell(self, sender: str, to: str, message: Want) -> None:
        if not self.gets_lost(to):
            self.carry_out(to, self.exchanges[to].hear(sender, message))

    def average(self, name: str, reduce: ReduceChunk) -> None:
        """As the driver does it: nothing is stored that is not wanted any more."""
        if self.exchanges[name].wants_own(reduce.chunk):
            digest = digest_of(str(next(self.numbers)).encode())
            assert self.signed.setdefault((name, reduce.chunk), digest) == digest, "signed twice"
            self.payloads[name][reduce.chunk] = digest
            self.handle(name, ReducedArrived(AT, name, reduce.chunk, reduce.absent, digest))

    def hand_over(self, sender: str, send: SendChunk) -> None:
        to, chunk, exchange = send.to, send.chunk, self.exchanges[send.to]
        is_taken = not self.gets_lost(to) and (
            self.take(sender, send) or exchange.is_done_with(sender, chunk, send.reduced)
        )
        event = ChunkSent(AT, to, chunk, send.reduced) if is_taken else ChunksUnsent(AT, to, (chunk,), send.reduced)
        self.handle(sender, event)

    def take(self, sender: str, send: SendChunk) -> bool:
        """As admission does it."""
        to, chunk, exchange = send.to, send.chunk, self.exchanges[send.to]
        if not send.reduced:
            if exchange.wants_blocks(sender, chunk):
                self.here[to].add((chunk, sender))
                self.handle(to, ContributionArrived(AT, sender, chunk))
                return True
            return False
        assert send.origin is not None
        digest = self.payloads[sender][chunk]
        averaged = Averaged(chunk=chunk, digest=digest, absent=send.absent, origin=send.origin)
        if exchange.wants_average(chunk) and exchange.is_wanted(averaged) and exchange.is_vouched_for(averaged):
            self.payloads[to][chunk] = digest
            self.handle(to, ReducedArrived(AT, sender, chunk, send.absent, digest, send.origin))
            return True
        return False

    def die(self, name: str) -> None:
        self.dead.add(name)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.under_way:
                self.under_way.pop(self.draw.randrange(len(self.under_way)))()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for name in self.left:
            self.carry_out(name, self.exchanges[name].tick(self.now, self.left))
            part = self.exchanges[name].part()
            if part is not None and self.draw.random() >= self.loss:
                assert self.parts.take(name, part, self.heirs)

    def gather(self) -> RoundOutcome:
        """Exchange until all parts are with the leader, with heirs for those that give none."""
        for step in range(1, 400):
            self.run(len(self.under_way) // 2 + 5)
            self.pass_time(0.5)
            if step % 20 == 0:
                self.name_heirs()
            if outcome := self.parts.outcome():
                return outcome
        raise AssertionError(self.parts.missing())

    def name_heirs(self) -> None:
        for reducer in self.parts.missing():
            self.heirs.append((reducer, self.draw.choice(self.left)))
        for name in self.left:
            if self.draw.random() >= self.loss:
                self.carry_out(name, self.exchanges[name].go_on(self.heirs, SECONDS, self.now))

    def propose(self, outcome: RoundOutcome) -> None:
        """Have all members left get what is proposed."""
        for _ in range(400):
            for name in self.left:
                if self.draw.random() >= self.loss:
                    self.carry_out(name, self.exchanges[name].proposed(outcome.marks))
            self.run(len(self.under_way) + 5)
            self.pass_time(1.0)
            if all(self.exchanges[name].payload == outcome.payload for name in self.left):
                return
        raise AssertionError({name: self.exchanges[name].averages.lacking() for name in self.left})


@pytest.mark.parametrize("seed", range(100))
def test_all_members_left_get_what_the_leader_proposes(seed: int) -> None:
    draw = random.Random(seed)
    circle = Circle("abcdef"[: draw.randint(2, 6)], draw, loss=draw.choice([0.0, 0.2]))
    for name in draw.sample(circle.names, draw.randint(0, len(circle.names) - 1)):
        circle.run(draw.randint(0, 120))
        circle.die(name)
    outcome = circle.gather()
    holders = [name for name in circle.left if not circle.exchanges[name].averages.lacking()]
    for name in draw.sample(circle.left, draw.randint(0, len(circle.left) - 1)):
        if [one for one in holders if one in circle.left] != [name]:
            circle.die(name)
    if all(averages_are_had(circle, outcome)):
        circle.propose(outcome)
        assert {tuple(circle.exchanges[name].absent().items()) for name in circle.left} == {
            tuple(outcome.absent.items())
        }


def averages_are_had(circle: Circle, outcome: RoundOutcome) -> list[bool]:
    """Whether each proposed average is still at a member that lives; without one the round is to be begun again."""
    marked = [outcome.marks[place : place + MARK_BYTES] for place in range(0, len(outcome.marks), MARK_BYTES)]
    here = [[circle.exchanges[name].averages.of(chunk) for name in circle.left] for chunk in range(circle.round.chunks)]
    return [
        any(one is not None and statement_of(circle.round, one).mark == mark for one in held)
        for mark, held in zip(marked, here, strict=True)
    ]


class Links(Circle):
    """Members of which some pairs have no link, and whose chunks are counted."""

    def __init__(self, names: Sequence[str], broken: set[frozenset[str]]) -> None:
        self.broken = broken
        self.moved = Counter[tuple[str, str]]()
        super().__init__(cast(str, names), random.Random(1), 0.0)

    def do(self, name: str, effect: Effect) -> None:
        if isinstance(effect, SendChunk) and not self.reaches(name, effect.to):
            return self.later(
                name, lambda: self.handle(name, ChunksUnsent(AT, effect.to, (effect.chunk,), effect.reduced))
            )
        if isinstance(effect, SendChunk):
            self.moved["to", effect.to] += 1
            self.moved["from", name] += 1
        if not isinstance(effect, Send) or self.reaches(name, effect.to):
            super().do(name, effect)

    def reaches(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self.broken

    def settle(self) -> None:
        while self.under_way:
            self.run(len(self.under_way))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for name in self.left:
            live = [other for other in self.left if self.reaches(name, other)]
            self.carry_out(name, self.exchanges[name].tick(self.now, live))
            part = self.exchanges[name].part()
            if part is not None:
                assert self.parts.take(name, part)


@pytest.mark.parametrize("seed", range(2))
def test_broken_pairs_cost_those_two_and_no_link_carries_more_than_two_fair_shares(seed: int) -> None:
    draw, names = random.Random(seed), [f"peer{number:02}" for number in range(24)]
    broken = {frozenset(pair) for pair in combinations(names, 2) if draw.random() < 0.08}
    circle = Links(names, broken)
    while (outcome := circle.parts.outcome()) is None:
        circle.settle()
        circle.pass_time(0.5)
    circle.propose(outcome)
    pairs = Counter(name for pair in broken for name in pair)
    assert outcome.absent == {name: 2 * pairs[name] for name in names if pairs[name]}
    fair = 2 * payloads_moved(len(names), 1 / len(names)) * len(names)
    assert max(circle.moved.values()) <= FAIR * fair
    assert circle.now < DUE * SECONDS + 5, "nobody waits for a link that is not there"
