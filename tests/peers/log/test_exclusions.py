"""Who has been proven to lie is excluded for a while, as follows from the log alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from peers.log.chain import follow, header_of, outcome_of
from peers.log.folder import _first_line, _read_first_line
from peers.log.header import EXCLUSION_LIMIT, FAULT_AGE, Exclusion, Fault, Header, may_be_named
from peers.log.lineage import RECENT_ENTRIES
from peers.log.state import LogError, LogState, _exclusions_after
from peers.values.wire import pack, unpack
from tests.peers.logs import LOG, PAYLOAD, SETTINGS, member, newcomer, next_header

EMPTY = replace(LOG, exclusion=3, staleness=2)


def fault(peer: str) -> Fault:
    return Fault(peer=peer, kind="averages", proof=bytes(32))


def founded(empty: LogState = EMPTY, names: str = "abcx") -> LogState:
    roster = [member(name, 20 * place, 20 * place + 20) for place, name in enumerate(names)]
    return empty.append(next_header(empty, roster, PAYLOAD))


def entry(log: LogState, names: Iterable[str], faults: Sequence[Fault] = ()) -> Header:
    return next_header(log, [log.expected(name) for name in names], PAYLOAD, faults)


def excluding(log: LogState, names: str = "abc", accused: str = "x") -> LogState:
    return log.append(entry(log, names, [fault(accused)]))


def test_whoever_an_annex_names_is_excluded_for_so_many_cycles() -> None:
    log = excluding(founded())
    for left in (3, 2, 1):
        assert log.excluded == {"x": 4}, f"{left} cycles are left"
        log = log.append(entry(log, "abc"))
    assert log.excluded == {}


def test_who_is_excluded_has_no_lease_and_its_samples_return() -> None:
    log = founded()
    late = log.append(entry(log, "abc"))
    assert "x" in late.leases, "whoever is late keeps its own"
    assert "x" not in excluding(log).leases
    lease = log.leases["x"][0]
    assert any(free.start <= lease.start < free.stop for free in excluding(log).pool.free) or any(
        lease.start <= given[0].start < lease.stop for given in excluding(log).leases.values()
    )


def test_who_is_excluded_can_be_in_no_entry() -> None:
    log = excluding(founded())
    with pytest.raises(LogError, match="x is excluded up to cycle 4"):
        next_header(log, [log.expected("a"), newcomer(log, "x")], PAYLOAD)
    later = log
    for _ in range(3):
        later = later.append(entry(later, "abc"))
    assert next_header(later, [later.expected("a"), newcomer(later, "x")], PAYLOAD)


def test_who_is_excluded_neither_votes_nor_leads() -> None:
    log = excluding(founded())
    assert "x" not in log.voters
    assert not log.counts("x", 0)
    assert founded().counts("x", 0)


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ("z", "z: its annex names a peer with neither lease nor vote"),
        ("a", "a: its annex names a member"),
        ("xx", "a peer is named twice"),
    ],
)
def test_r9_an_annex_names_others_that_have_a_lease_or_a_vote(faults: str, reason: str) -> None:
    with pytest.raises(LogError, match=reason):
        entry(founded(), "abc", [fault(peer) for peer in faults])


def test_r9_a_voter_without_a_lease_can_be_excluded() -> None:
    """It stands by, and votes: its two votes must convict it, too."""
    log = founded()
    for _ in range(EMPTY.staleness + 1):
        log = log.append(entry(log, "abc"))
    assert "x" in log.voters
    assert "x" not in log.leases
    assert "x" not in excluding(log).voters


def test_nobody_is_excluded_twice_at_once() -> None:
    with pytest.raises(LogError, match="x: its annex names a peer with neither lease nor vote"):
        excluding(excluding(founded()))


def test_the_first_entry_has_no_annex() -> None:
    with pytest.raises(LogError, match="neither lease nor vote"):
        next_header(EMPTY, [member("a", 0, 20)], PAYLOAD, [fault("x")])


def test_a_run_may_do_without() -> None:
    with pytest.raises(LogError, match="only the entry that closes a cycle has an annex"):
        excluding(founded(replace(EMPTY, exclusion=0)))


def test_only_the_entry_that_closes_a_cycle_has_an_annex() -> None:
    log = replace(SETTINGS, fragments=2).empty_log
    first = [member(name, 0, 20).model_copy(update={"samples": ()}) for name in "ab"]
    log = log.append(next_header(log, first, PAYLOAD))
    log = log.append(next_header(log.of(1), [member("a", 0, 20), member("b", 20, 40)], PAYLOAD))
    with pytest.raises(LogError, match="only the entry that closes a cycle has an annex"):
        next_header(log.of(0), [log.of(0).expected("a")], PAYLOAD, [fault("b")])
    named = log.append(next_header(log.of(0), [log.of(0).expected("a")], PAYLOAD))
    assert named.append(next_header(named.of(1), [named.of(1).expected("a")], PAYLOAD, [fault("b")])).excluded


def test_an_entry_in_brief_has_its_annex() -> None:
    log = founded()
    header = entry(log, "abc", [fault("x")])
    outcome = outcome_of(log, header)
    assert outcome.faults == (fault("x"),)
    assert header_of(log, unpack(type(outcome), pack(outcome))) == header
    assert follow(log, outcome) == log.append(header)
    assert header_of(log, outcome.model_copy(update={"faults": ()})).digest != header.digest


def test_who_was_excluded_serves_its_probation_anew() -> None:
    log = founded(replace(EMPTY, probation=1))
    assert not log.is_on_probation("x")
    assert excluding(log).is_on_probation("x")


def test_the_exclusions_of_a_log_are_bounded() -> None:
    before = [Exclusion(peer=f"p{number}", until=10) for number in range(EXCLUSION_LIMIT)]
    after = _exclusions_after(before, [fault("x")], 5, 100)
    assert len(after) == EXCLUSION_LIMIT
    assert after[-1] == Exclusion(peer="x", until=105)
    assert after[0].peer == "p1"


def test_the_file_of_a_log_says_for_how_long_peers_are_excluded() -> None:
    assert _read_first_line(_first_line(EMPTY)) == EMPTY
    assert _first_line(EMPTY) != _first_line(replace(EMPTY, exclusion=4))


@pytest.mark.parametrize(
    ("told_at", "index", "exclusion", "may_be"),
    [
        (5, 5, 3, True),
        (5, 7, 3, True),
        (5, 8, 3, False),
        (5, 4, 3, False),
        (0, 1, 3, False),
        (5, 5 + FAULT_AGE - 1, 1000, True),
        (5, 5 + FAULT_AGE, 1000, False),
        (5, 5, 0, False),
    ],
)
def test_a_lie_may_be_named_as_long_as_nobody_can_have_been_excluded_for_it(
    told_at: int, index: int, exclusion: int, may_be: bool
) -> None:
    assert may_be_named(told_at, index, exclusion) == may_be


def test_a_lie_may_be_named_only_where_peers_know_what_their_log_was_called() -> None:
    assert FAULT_AGE <= RECENT_ENTRIES
