"""One attempt at one member, as a table of events and the effects that they have."""

from __future__ import annotations

from peers.events import (
    ContributionArrived,
    DigestPayload,
    Effect,
    OpenRound,
    PayloadDigested,
    PushContribution,
    Pushed,
    PushFailed,
    PushReduced,
    Quantized,
    ReducedArrived,
    ReducePart,
)
from peers.exchange import Exchange, ExchangeEvent
from peers.messages import Begin, Held
from tests.peers.builders import PAYLOAD, attempt, first_log, member

LOG = first_log()
ROSTER = (member("a", 60, 80), member("b", 80, 100), member("c", 100, 120))
HEADER = LOG.next_header(ROSTER, PAYLOAD)
AT = attempt(LOG)
BEGIN = Begin(attempt=AT, roster=ROSTER, adopted=None, holders=())


def handing_on(me: str, holders: str) -> Exchange:
    held = Held(attempt=AT, header=HEADER)
    begin = Begin(attempt=attempt(LOG, 2), roster=ROSTER, adopted=held, holders=tuple(holders))
    return Exchange(me, begin, 0.0)


def test_three_members_the_whole_way() -> None:
    exchange = Exchange("b", BEGIN, 0.0)
    assert exchange.open() == [OpenRound(AT, ROSTER, ("a", "b", "c"), None)]
    assert exchange.missing() == ("a", "c")
    table: list[tuple[ExchangeEvent, list[Effect]]] = [
        (ContributionArrived(AT, "c"), []),
        (Quantized(AT), [PushContribution(AT, 0, "a"), PushContribution(AT, 2, "c")]),
        (Pushed(AT, "a", reduced=False), []),
        (ReducedArrived(AT, 2), []),
        (ContributionArrived(AT, "a"), [ReducePart(AT, 1)]),
        (ContributionArrived(AT, "a"), []),
        (ReducedArrived(AT, 1), [PushReduced(AT, 1, "a"), PushReduced(AT, 1, "c")]),
        (Pushed(AT, "a", reduced=True), []),
        (ReducedArrived(AT, 0), [DigestPayload(AT)]),
        (ReducedArrived(AT, 0), []),
        (Pushed(AT, "c", reduced=False), []),
        (Pushed(AT, "c", reduced=True), []),
        (PayloadDigested(AT, PAYLOAD), []),
    ]
    for event, effects in table:
        assert exchange.handle(event) == effects, event
    assert exchange.payload == PAYLOAD
    assert exchange.missing() == ()
    assert exchange.push_what_is_due() == []


def test_failed_pushes_are_repeated_when_asked_and_not_before() -> None:
    exchange = Exchange("b", BEGIN, 0.0)
    exchange.handle(Quantized(AT))
    assert exchange.push_what_is_due() == []
    assert exchange.handle(PushFailed(AT, "c", reduced=False, refused=True)) == []
    assert exchange.push_what_is_due() == [PushContribution(AT, 2, "c")]
    assert exchange.push_what_is_due() == []


def test_a_failed_push_of_the_average_is_repeated() -> None:
    exchange = Exchange("b", BEGIN, 0.0)
    for event in (Quantized(AT), ContributionArrived(AT, "a"), ContributionArrived(AT, "c"), ReducedArrived(AT, 1)):
        exchange.handle(event)
    exchange.handle(PushFailed(AT, "a", reduced=True, refused=False))
    assert exchange.push_what_is_due() == [PushReduced(AT, 1, "a")]


def test_missing_names_who_holds_us_up() -> None:
    exchange = Exchange("b", BEGIN, 0.0)
    exchange.handle(Quantized(AT))
    exchange.handle(ContributionArrived(AT, "a"))
    exchange.handle(ReducedArrived(AT, 0))
    assert exchange.missing() == ("c",)


def test_only_what_is_due_is_wanted() -> None:
    exchange = Exchange("b", BEGIN, 0.0)
    assert exchange.wants_contribution("a", 1)
    assert not exchange.wants_contribution("a", 0), "another's part"
    assert not exchange.wants_contribution("z", 1), "a stranger"
    assert exchange.wants_reduced("a", 0)
    assert not exchange.wants_reduced("a", 2), "c reduces that part"
    assert not exchange.wants_reduced("a", 2**40)
    exchange.handle(ContributionArrived(AT, "a"))
    exchange.handle(ReducedArrived(AT, 0))
    assert not exchange.wants_contribution("a", 1), "it is here"
    assert not exchange.wants_reduced("a", 0), "it is here"


def test_alone_it_reduces_its_own() -> None:
    exchange = Exchange("a", BEGIN.model_copy(update={"roster": ROSTER[:1]}), 0.0)
    assert exchange.handle(Quantized(AT)) == [ReducePart(AT, 0)]
    assert exchange.handle(ReducedArrived(AT, 0)) == [DigestPayload(AT)]


def test_the_first_holder_hands_on_to_those_who_lack_it() -> None:
    exchange = handing_on("b", holders="bc")
    assert exchange.open() == [OpenRound(exchange.attempt, ROSTER, ("b",), PAYLOAD)]
    assert exchange.missing() == ()
    effects = exchange.handle(ReducedArrived(exchange.attempt, 0))
    assert effects == [PushReduced(exchange.attempt, 0, "a"), DigestPayload(exchange.attempt)]


def test_the_other_holders_have_it_already() -> None:
    exchange = handing_on("c", holders="bc")
    assert exchange.handle(ReducedArrived(exchange.attempt, 0)) == [DigestPayload(exchange.attempt)]


def test_who_lacks_it_waits_for_the_first_holder() -> None:
    exchange = handing_on("a", holders="bc")
    assert exchange.missing() == ("b",)
    assert exchange.wants_reduced("b", 0)
    assert not exchange.wants_reduced("c", 0)
    assert not exchange.wants_contribution("b", 0)
