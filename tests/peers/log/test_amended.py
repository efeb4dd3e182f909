"""An amendment is in force from the cycle after the entry that takes it in, as follows from the log alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.log.chain import Chain, Entry, header_of, outcome_of
from peers.log.header import Header
from peers.log.state import LogError, LogState
from peers.values.identity import Identity
from peers.values.manifest import AMENDMENTS_LIMIT, Amendment, LoggedAmendment
from peers.values.wire import WireError, pack, unpack
from tests.peers.logs import LOG, PAYLOAD, RUN, member, next_header

ORGANISER, STRANGER = Identity.of_seed(bytes(32)), Identity.of_seed(bytes(31) + b"1")
EMPTY = replace(LOG, organiser=ORGANISER.peer_id)


def amendment(number: int = 1, learning_rate: float = 0.4, by: Identity = ORGANISER) -> Amendment:
    return Amendment.sign(RUN, number, b"%g" % learning_rate, by)


def entry(log: LogState, taken_in: Amendment | None = None) -> Header:
    """a and b make the next entry of the log's fragment."""
    roster = [log.expected(name) for name in "ab"] if log.last else [member("a", 0, 20), member("b", 20, 40)]
    if not log.closes:
        roster = [one.model_copy(update={"samples": ()}) for one in roster]
    return next_header(log, roster, PAYLOAD, amendment=taken_in)


def cycle(log: LogState, taken_in: Amendment | None = None) -> LogState:
    for fragment in range(log.fragments):
        at = log.of(fragment)
        log = at.append(entry(at, taken_in if at.closes else None)).of(0)
    return log


def changed(header: Header, named: Amendment | None) -> Header:
    fields = {field: getattr(header, field) for field in Header.model_fields}
    amendments = None if named is None else (LoggedAmendment(amendment=named, cursor=header.cursor),)
    return Header(**(fields | {"amendments": amendments}))


@pytest.mark.parametrize("fragments", [1, 3])
def test_it_is_in_force_from_the_next_cycle_on_until_another_one_is(fragments: int) -> None:
    log = cycle(replace(EMPTY, fragments=fragments))
    assert log.amendment is None
    log = cycle(log, amendment())
    assert log.amendment == amendment()
    log = cycle(cycle(log))
    assert log.amendment == amendment(), "headers carry it on"
    log = cycle(log, amendment(5, 0.1))
    assert log.amendment == amendment(5, 0.1), "numbers may be left out"


def test_headers_have_all_of_them_and_the_first_sample_that_nobody_had_when_each_came() -> None:
    first = cycle(cycle(EMPTY), amendment(2))
    assert first.last is not None
    log = cycle(cycle(first), amendment(5))
    assert log.last is not None
    second = log.last.cursor
    assert first.last.cursor < second
    assert [(one.amendment, one.cursor) for one in cycle(log).amendments] == [
        (amendment(2), first.last.cursor),
        (amendment(5), second),
    ]


def test_a_header_has_room_for_all_amendments_of_a_run() -> None:
    log = EMPTY
    for number in range(1, AMENDMENTS_LIMIT + 1):
        log = cycle(log, amendment(number))
    assert len(log.amendments) == AMENDMENTS_LIMIT
    with pytest.raises(ValueError, match="number"):
        amendment(AMENDMENTS_LIMIT + 1)


@pytest.mark.parametrize("change", [{"cursor": 0}, {"amendment": amendment(1, 0.5)}])
def test_no_header_changes_what_earlier_ones_say(change: dict[str, object]) -> None:
    header = entry(cycle(cycle(EMPTY, amendment(1)), amendment(2)))
    first, second = header.amendments or ()
    fields = {field: getattr(header, field) for field in Header.model_fields}
    forged = Header(**(fields | {"amendments": (first.model_copy(update=change), second)}))
    with pytest.raises(LogError, match="amendments"):
        cycle(cycle(EMPTY, amendment(1)), amendment(2)).append(forged)


def test_the_first_entry_may_have_one() -> None:
    assert cycle(EMPTY, amendment()).amendment == amendment()


@pytest.mark.parametrize("given", [amendment(), amendment(1, 0.5), amendment(2), amendment(2, 0.5)])
def test_nothing_is_replayed_and_of_two_with_one_number_the_first_counts(given: Amendment) -> None:
    log = cycle(EMPTY, amendment(2))
    with pytest.raises(LogError, match=f"amendment {given.number} does not follow 2, which is in force"):
        entry(log, given)


@pytest.mark.parametrize(
    "forged", [amendment(by=STRANGER), Amendment.sign("another", 1, b"0.4", ORGANISER)], ids=["forged", "another's"]
)
def test_nobody_else_amends_a_run(forged: Amendment) -> None:
    with pytest.raises(LogError, match="amendment 1 is not signed by the run's organiser"):
        entry(cycle(EMPTY), forged)


def test_only_the_entry_that_closes_a_cycle_takes_one_in() -> None:
    log = replace(EMPTY, fragments=2)
    with pytest.raises(LogError, match="only the entry that closes a cycle"):
        entry(log, amendment())
    with pytest.raises(LogError, match="only the entry that closes a cycle"):
        log.append(changed(entry(log), amendment()))


@pytest.mark.parametrize("named", [None, amendment(1), amendment(2, 0.5), amendment(3, by=STRANGER)])
def test_no_header_drops_or_changes_what_is_in_force(named: Amendment | None) -> None:
    log = cycle(EMPTY, amendment(2))
    with pytest.raises(LogError, match="amendment"):
        log.append(changed(entry(log), named))


@pytest.mark.parametrize("taken_in", [None, amendment(2)])
def test_an_entry_in_brief_has_what_it_takes_in_and_no_more(taken_in: Amendment | None) -> None:
    log = cycle(EMPTY, amendment(1))
    header = entry(log, taken_in)
    outcome = outcome_of(log, header)
    assert outcome.amendment == taken_in
    assert header_of(log, type(outcome).model_validate(outcome)) == header
    assert unpack(Header, pack(header)) == header


def test_whoever_begins_amid_the_log_has_it_from_one_header() -> None:
    log = cycle(cycle(EMPTY, amendment()))
    assert log.last is not None
    assert EMPTY.at(log.last).amendment == amendment()
    assert EMPTY.may_end_with(log.last, ())
    chain = Chain(EMPTY)
    chain.add(Entry.whole(log.last, None))
    assert chain.end.amendment == amendment()


def test_a_header_that_is_taken_on_trust_names_no_forged_one() -> None:
    last = cycle(cycle(EMPTY)).last
    assert last is not None
    forged = changed(last, amendment(by=STRANGER))
    assert not EMPTY.may_end_with(forged, ())
    with pytest.raises(LogError, match="its amendment is not signed"):
        Chain(EMPTY).add(Entry.whole(forged, None))


@pytest.mark.parametrize(
    ("numbers", "cursors"), [((1, 1), (0, 20)), ((2, 1), (0, 20)), ((1, 2), (20, 0)), ((1, 2), (0, 2**40))]
)
def test_no_header_names_amendments_out_of_order(numbers: tuple[int, ...], cursors: tuple[int, ...]) -> None:
    """Samples would be other text than for others, where a header is taken on trust."""
    good, logged = (
        entry(EMPTY),
        [
            LoggedAmendment(amendment=amendment(number), cursor=cursor)
            for number, cursor in zip(numbers, cursors, strict=True)
        ],
    )
    wrong = good.model_copy(update={"amendments": tuple(logged)})
    with pytest.raises(WireError, match="out of order"):
        unpack(Header, pack(wrong), 1 << 20)
