"""A log of several fragments: each cycle has one entry of each, in any order, and what is fixed before it begins."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from peers.log.header import NO_PAYLOAD, Header, Member, cycle_head
from peers.log.state import LogError, LogState
from peers.values.leases import SampleRange
from peers.values.wire import digest_of
from tests.peers.logs import PAYLOAD, SETTINGS, TOKENS, member, next_header

FRAGMENTS = 3
LOG = replace(SETTINGS, fragments=FRAGMENTS).empty_log
SAMPLES = {"a": (0, 20), "b": (20, 40), "c": (40, 60)}


def entry(log: LogState, fragment: int, names: str = "abc", payload: bytes = PAYLOAD) -> Header:
    """What these members make of a fragment: only the closing entry says which samples they trained."""
    view = log.of(fragment)
    if not view.closes:
        return next_header(view, [Member(peer=name, tokens=TOKENS, samples=()) for name in names], payload)
    trained = {name: log.leases.get(name) or (SampleRange(*SAMPLES[name]),) for name in names}
    return next_header(view, [Member(peer=name, tokens=TOKENS, samples=trained[name]) for name in names], payload)


def after_cycle(log: LogState, names: str = "abc") -> LogState:
    for fragment in log.pending:
        log = log.append(entry(log, fragment, names))
    return log


@pytest.mark.parametrize("order", list(permutations(range(FRAGMENTS))), ids=str)
def test_entries_of_a_cycle_come_in_any_order_and_lead_to_one_place(order: tuple[int, ...]) -> None:
    log = LOG
    for done, fragment in enumerate(order):
        assert log.position == LOG.position, "the cycle is not over"
        assert len(log.made) == done
        log = log.append(entry(LOG, fragment))
    assert log == after_cycle(LOG)
    assert log.position.index == 1
    assert log.position.head == cycle_head([entry(LOG, fragment).digest for fragment in range(FRAGMENTS)])
    assert log.pending == (0, 1, 2)


def test_each_fragment_has_its_own_place() -> None:
    places = {LOG.of(fragment).position for fragment in range(FRAGMENTS)}
    assert len(places) == FRAGMENTS
    assert all(place.is_in_cycle_of(LOG.position) for place in places)
    assert not after_cycle(LOG).position.is_in_cycle_of(LOG.position)
    assert [str(LOG.of(fragment).position)[:3] for fragment in (0, 1)] == ["0:0", "0/1"]


def test_a_fragment_has_one_entry_in_a_cycle() -> None:
    log = LOG.append(entry(LOG, 1))
    for payload in (PAYLOAD, digest_of(b"another")):
        with pytest.raises(LogError, match="its fragment does not follow"):
            log.append(entry(LOG, 1, payload=payload))
    with pytest.raises(LogError, match="its fragment does not follow"):
        LOG.append(next_header(replace(LOG, fragments=4).of(3), [member("a", 0, 20)], PAYLOAD))


def test_roster_and_leases_are_those_of_the_cycle_before_until_it_is_over() -> None:
    log = after_cycle(LOG)
    assert (log.roster, sorted(log.leases)) == (("a", "b", "c"), ["a", "b", "c"])
    amid = log.append(entry(log, 2, "ab"))
    assert (amid.roster, amid.leases, amid.pool) == (log.roster, log.leases, log.pool)
    over = amid.append(entry(amid, 0, "abc")).append(entry(amid, 1, "c"))
    assert over.roster == ("a", "b"), "who is in the closing entry"
    assert over.lineage_tokens == log.lineage_tokens + 2 * TOKENS


def test_only_the_closing_entry_says_which_samples_were_trained() -> None:
    with pytest.raises(LogError, match="only the entry that closes a cycle"):
        next_header(LOG, [member("a", 0, 20)], PAYLOAD)
    header = entry(LOG, 0)
    assert (header.leases, header.cursor, header.free, header.lineage_tokens) == ((), 0, (), 0)


def test_nobody_weighs_more_than_a_whole_lease() -> None:
    most = SETTINGS.samples_per_lease * SETTINGS.tokens_per_sample
    assert next_header(LOG, [Member(peer="a", tokens=most, samples=())], PAYLOAD)
    with pytest.raises(LogError, match="tokens are more than"):
        next_header(LOG, [Member(peer="a", tokens=most + 1, samples=())], PAYLOAD)


def test_who_has_a_short_lease_weighs_no_more_than_that() -> None:
    """Regression: who was slow, or said so, weighed a whole lease in all entries but the closing one."""
    closing = next_header(LOG.of(2), [member("a", 0, 20).model_copy(update={"wants": 5})], PAYLOAD)
    log = LOG
    for header in (entry(LOG, 0), entry(LOG, 1), closing):
        log = log.append(header)
    assert next_header(log, [Member(peer="a", tokens=5 * SETTINGS.tokens_per_sample, samples=())], PAYLOAD)
    with pytest.raises(LogError, match="26 tokens are more than the 25"):
        next_header(log, [Member(peer="a", tokens=5 * SETTINGS.tokens_per_sample + 1, samples=())], PAYLOAD)


def test_a_state_is_taken_over_at_the_end_of_a_cycle() -> None:
    log = after_cycle(after_cycle(LOG))
    assert LOG.at(log.last, log.ends) == log
    assert LOG.at(log.last).position.head != log.position.head, "the digests of all entries make its name"


def test_another_entry_of_any_fragment_makes_another_lineage() -> None:
    heads = {after_cycle(LOG).position.head}
    for changed in range(FRAGMENTS):
        log = LOG
        for fragment in range(FRAGMENTS):
            log = log.append(entry(LOG, fragment, payload=digest_of(b"x") if fragment == changed else PAYLOAD))
        heads.add(log.position.head)
    assert len(heads) == FRAGMENTS + 1


def test_with_one_fragment_the_entry_names_the_lineage() -> None:
    log = SETTINGS.empty_log
    header = next_header(log, [member("a", 0, 20)], PAYLOAD)
    assert log.append(header).position.head == header.digest


def test_an_entry_has_a_payload_unless_nobody_trained_its_fragment() -> None:
    nobody = [Member(peer="a", tokens=0, samples=())]
    assert LOG.append(next_header(LOG, nobody, NO_PAYLOAD)).pending == (1, 2)
    with pytest.raises(LogError, match="no member of the roster has trained tokens"):
        next_header(LOG, nobody, PAYLOAD)
    with pytest.raises(LogError, match="its payload is missing"):
        next_header(LOG, [Member(peer="a", tokens=TOKENS, samples=())], NO_PAYLOAD)
    for payload in (PAYLOAD, NO_PAYLOAD):
        with pytest.raises(LogError, match="no member of the roster has trained tokens"):
            next_header(LOG.of(2), nobody, payload)
