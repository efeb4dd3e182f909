"""The log: one header may follow, and nothing else."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from peers.log import state as state_module
from peers.log.chain import follow, outcome_of
from peers.log.header import Assignment, Bystander, Exclusion, Fault, Header, Member, Tenure
from peers.log.state import LogError, take_order
from peers.values.leases import SampleRange, prefix, sample_count
from peers.values.manifest import Amendment, LoggedAmendment
from peers.values.wire import digest_of, pack, unpack
from tests.peers.logs import LOG, MANIFEST, PAYLOAD, STATE, first_log, member, next_header

AMENDMENT = Amendment(number=1, content=b"0.4", signature=bytes(64))


def test_first_position_is_the_manifest() -> None:
    assert LOG.position.index == 0
    assert LOG.position.head == MANIFEST
    assert LOG.roster == ()
    assert LOG.leases == {}


def test_entries_chain() -> None:
    log = first_log()
    assert log.position.index == 1
    header = next_header(log, [member("a", 60, 80), member("b", 80, 90)], digest_of(b"second"))
    assert header.previous == log.position.head
    assert header.lineage_tokens == 450
    after = log.append(header)
    assert after.position.index == 2
    assert after.position.head == header.digest
    assert after.roster == ("a", "b")


def test_digest_of_a_fixed_header_never_changes() -> None:
    """Peers of different releases meet in one run; whatever changes these bytes needs another protocol version."""
    header = first_log().last
    assert header is not None
    assert header.digest == digest_of(pack(header))
    assert header.digest.hex() == "4c2e4adfd2e7dadb1f57005d16d18f3f3c5e32fb4009dae4659643420dc8eaba"
    assert unpack(Header, pack(header)).digest == header.digest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "another"),
        ("index", 7),
        ("fragment", 1),
        ("previous", bytes(32)),
        ("leases", ()),
        ("cursor", 10_000),
        ("free", (SampleRange(0, 1),)),
        ("lineage_tokens", 1),
        ("tenures", (Tenure(peer="a", served=1),)),
        ("excluded", (Exclusion(peer="b", until=7),)),
        ("bystanders", (Bystander(peer="b", incarnation=7),)),
    ],
)
def test_every_field_of_a_header_is_checked(field: str, value: Any) -> None:
    log = first_log()
    header = next_header(log, [member("a", 60, 80)], PAYLOAD)
    forged = header.model_copy(update={field: value})
    with pytest.raises(LogError, match=f"its {field} does not follow"):
        log.append(forged)
    assert log.append(header).last == header


def test_every_field_of_a_header_counts_in_its_digest() -> None:
    header = first_log().last
    assert header is not None
    fields = {field: getattr(header, field) for field in Header.model_fields}
    for field in fields:
        others: dict[str, Any] = {
            "run": "another",
            "roster": (member("z", 0, 1),),
            "leases": (),
            "free": (SampleRange(0, 1),),
            "previous": bytes(32),
            "state": digest_of(b"other"),
            "payload": bytes(32),
            "tenures": (Tenure(peer="a", served=1),),
            "faults": (Fault(peer="z", kind="averages", proof=bytes(32)),),
            "excluded": (Exclusion(peer="z", until=7),),
            "bystanders": (Bystander(peer="z", incarnation=7),),
            "amendments": (LoggedAmendment(amendment=AMENDMENT, cursor=7),),
            "leader": "z",
        }
        changed = Header(**(fields | {field: others.get(field, 12345)}))
        assert changed.digest != header.digest, field


def leases(header: Header) -> dict[str, tuple[SampleRange, ...]]:
    return {lease.peer: lease.samples for lease in header.leases}


def test_leases_of_absent_peers_go_back_to_the_pool() -> None:
    log = replace(first_log(), staleness=0)
    header = next_header(log, [member("a", 60, 80)], PAYLOAD)
    assert leases(header) == {"a": (SampleRange(80, 100),)}
    assert header.free == (SampleRange(100, 120),)
    assert header.cursor == 120


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_who_misses_an_entry_keeps_its_lease_for_as_many_as_it_may_miss(staleness: int) -> None:
    log, trained = replace(first_log(), staleness=staleness), SampleRange(60, 80)
    for missed in range(1, staleness + 1):
        log = log.append(next_header(log, [member("a", trained.start, trained.stop)], PAYLOAD))
        assert log.leases["b"] == (SampleRange(80, 100),), f"it may miss {missed}"
        (trained,) = log.leases["a"]
    assert all(piece.start >= 120 for piece in (trained, *log.pool.free)), "nobody else was given it meanwhile"
    late = next_header(log, [member("a", trained.start, trained.stop), member("b", 80, 100)], PAYLOAD)
    assert late.lineage_tokens == log.lineage_tokens + 200, "b counts, late as it is"
    assert [lease.since for lease in late.leases if lease.peer in "ab"] == [late.index] * 2
    gone = log.append(next_header(log, [member("a", trained.start, trained.stop)], PAYLOAD))
    assert gone.leases.keys() == {"a"}
    assert gone.leases["a"] == (SampleRange(80, 100),), "what b had goes to who is here"
    with pytest.raises(LogError, match=r"^b: samples 80.* begin neither its lease nor a grant"):
        gone.check_member(member("b", 80, 100))


def test_a_lease_that_is_kept_for_somebody_is_nobody_elses() -> None:
    log = first_log().append(next_header(first_log(), [member("a", 60, 80)], PAYLOAD))
    assert (80, 100) not in [(grant[0].start, grant[0].stop) for grant in log.grants]
    with pytest.raises(LogError, match=r"^z: samples 80.* begin neither its lease nor a grant"):
        log.check_member(member("z", 80, 100))


# Whose work counts in part ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("tokens", "is_trained"), [(100, True), (50, True), (49, False), (0, False)])
def test_samples_of_which_less_than_half_counts_are_trained_again(tokens: int, is_trained: bool) -> None:
    log = first_log()
    roster = [member("a", 60, 80), member("b", 80, 100, tokens), member("c", 100, 120)]
    header = next_header(log, roster)
    assert header.roster == tuple(roster)
    assert leases(header)["a"] == (SampleRange(120, 140) if is_trained else SampleRange(80, 100),)
    assert header.lineage_tokens == log.lineage_tokens + 200 + tokens, "what counts does so in any case"
    assert log.append(header).last == header


def test_the_rest_of_a_lease_goes_back_too_when_most_of_it_does_not_count() -> None:
    header = next_header(first_log(), [member("b", 80, 90, 24), member("c", 100, 120)])
    given = [piece for lease in leases(header).values() for piece in lease]
    free = [*given, *header.free]
    covered = sorted(number for piece in free for number in range(piece.start, piece.stop))
    assert covered[:40] == [*range(60, 100)], "a's lease is kept for it, b's is dealt again, whole"
    assert len(covered) == len(set(covered))


def test_an_entry_that_counts_more_of_a_member_is_another_one() -> None:
    log = first_log()
    header = next_header(log, [member("a", 60, 80), member("b", 80, 100, 40)])
    whole = (header.roster[0], member("b", 80, 100))
    with pytest.raises(LogError, match="does not follow"):
        log.append(header.model_copy(update={"roster": whole}))


def test_the_untrained_rest_of_a_lease_goes_back_to_the_pool() -> None:
    header = next_header(first_log(), [member("a", 60, 65), member("b", 80, 100), member("c", 100, 120)], PAYLOAD)
    assert header.leases[0].samples == (SampleRange(65, 80), SampleRange(120, 125))
    assert header.free == ()


def test_a_joiner_may_bring_samples_beyond_the_cursor() -> None:
    log = first_log()
    header = next_header(log, [member("a", 60, 80), member("z", 120, 140)], PAYLOAD)
    assert log.append(header).leases.keys() == {"a", "z", "b", "c"}, "b and c may be late"
    assert leases(next_header(replace(log, staleness=0), header.roster, PAYLOAD)).keys() == {"a", "z"}


@pytest.mark.parametrize(
    "roster",
    [
        [member("a", 60, 80), member("b", 60, 80)],
        [member("a", 60, 80), member("b", 79, 90)],
        [member("a", 0, 20)],
        [member("a", 80, 100), member("b", 80, 100)],
    ],
    ids=["the same", "overlapping", "trained in an earlier entry", "another's lease"],
)
def test_samples_of_others_are_refused(roster: list[Member]) -> None:
    with pytest.raises(LogError, match="begin neither its lease nor a grant"):
        next_header(first_log(), roster, PAYLOAD)


@pytest.mark.parametrize("thief", ["b", "z"])
def test_another_peers_lease_cannot_be_claimed_by_being_first(thief: str) -> None:
    """Regression: a peer that claimed a's lease first had a's own Ready refused, in every round."""
    with pytest.raises(LogError, match=f"^{thief}: samples 60.* begin neither"):
        first_log().pool_after([member(thief, 60, 80), member("a", 60, 80)])


def test_rosters_that_lead_nowhere_are_refused() -> None:
    with pytest.raises(LogError, match="twice"):
        next_header(LOG, [member("a", 0, 1), member("a", 20, 21)], PAYLOAD)
    with pytest.raises(LogError, match="has trained tokens"):
        next_header(LOG, [Member(peer="a", tokens=0, samples=())], PAYLOAD)


@pytest.mark.parametrize(("fragment", "leader"), [(0, "a"), (1, None)])
def test_entries_that_close_a_cycle_have_a_leader_and_no_others(fragment: int, leader: str | None) -> None:
    log = replace(LOG, fragments=2).of(fragment)
    roster = [member("a", 0, 20) if log.closes else Member(peer="a", tokens=1, samples=())]
    with pytest.raises(LogError, match="names its leader"):
        log.next_header(roster, PAYLOAD, leader)
    other = "z" if log.closes else None
    assert log.next_header(roster, PAYLOAD, other).leader == other


def test_numbers_beyond_all_bounds_are_refused() -> None:
    """Regression: these raised pydantic's error out of the protocol."""
    log = LOG.at(
        Header(
            run="tiny",
            index=0,
            fragment=0,
            previous=MANIFEST,
            state=STATE,
            roster=(member("a", 0, 1),),
            leases=(Assignment(peer="a", samples=(SampleRange(1, 2),), since=0),),
            cursor=2**62 - 1,
            free=(),
            lineage_tokens=1,
            payload=PAYLOAD,
        )
    )
    with pytest.raises(LogError, match="cannot have these values"):
        next_header(log, [member("a", 1, 2)], PAYLOAD)


@pytest.mark.parametrize("tokens", [101, 2**62 - 1])
def test_more_tokens_than_the_samples_have_are_refused(tokens: int) -> None:
    """Regression: one peer that stated 2^62 - 1 tokens stopped the run for good."""
    with pytest.raises(LogError, match=f"^b: {tokens} tokens are more than the 100 in its samples"):
        LOG.pool_after([member("a", 0, 20), member("b", 20, 40, tokens)])
    LOG.pool_after([member("a", 0, 20), member("b", 20, 40, 100)])


@pytest.mark.parametrize(
    ("peer", "samples"),
    [
        ("a", ((60, 61), (62, 63))),
        ("a", ((61, 80),)),
        ("z", ((120, 121), (122, 123))),
        ("z", ((121, 140),)),
        ("z", ((120, 141),)),
        ("z", ((10**15, 10**15 + 1),)),
    ],
    ids=["holes", "not from the start", "a joiner's holes", "between two grants", "more than a grant", "far away"],
)
def test_only_the_beginning_of_a_lease_may_be_trained(peer: str, samples: tuple[tuple[int, int], ...]) -> None:
    """Regression: 800 ranges of one sample each froze every peer for seconds, and the log grew with them for ever."""
    scattered = Member(peer=peer, tokens=1, samples=tuple(SampleRange(*piece) for piece in samples))
    with pytest.raises(LogError, match=f"^{peer}: samples .* begin neither its lease nor a grant"):
        next_header(first_log(), [scattered], PAYLOAD)


def test_who_is_slower_gets_fewer_samples_next() -> None:
    slow = member("a", 0, 20).model_copy(update={"wants": 6})
    log = LOG.append(next_header(LOG, [slow, member("b", 20, 40)], PAYLOAD))
    assert {peer: sample_count(lease) for peer, lease in log.leases.items()} == {"a": 6, "b": 20}
    assert log.pool.cursor == 66


def test_more_samples_than_a_lease_has_are_refused() -> None:
    greedy = member("a", 0, 20).model_copy(update={"wants": 21})
    with pytest.raises(LogError, match=r"^a: it wants 21 samples; a lease has 20"):
        next_header(LOG, [greedy], PAYLOAD)


def test_two_joiners_cannot_have_one_grant() -> None:
    with pytest.raises(LogError, match="trained or leased already"):
        first_log().pool_after([member("y", 120, 140), member("z", 120, 130)])


def test_who_has_trained_nothing_may_wait_for_those_who_have() -> None:
    idle = Member(peer="a", tokens=0, samples=())
    first_log().check_member(idle)
    assert next_header(first_log(), [idle, member("b", 80, 100)], PAYLOAD).lineage_tokens == 400


def test_free_ranges_are_bounded_and_nothing_is_trained_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members train only beginnings of leases that lie in pieces: more and more ranges return. Some are given up."""
    monkeypatch.setattr(state_module, "FREE_LIMIT", 2)
    draw, log = random.Random(1), replace(LOG, run="crumbs")
    trained, largest = set[int](), 0
    for index in range(40):
        leases = log.leases or dict(zip("abcdef", log.grants, strict=False))
        present = draw.sample(sorted(leases), draw.randint(1, len(leases)))
        joining = dict(
            zip("xyz"[: draw.randint(0, 3) if index else 0], list(log.grants)[draw.randint(0, 2) :], strict=False)
        )
        offers = {peer: leases[peer] for peer in present} | {p: g for p, g in joining.items() if p not in leases}
        roster = []
        for peer, lease in offers.items():
            samples = prefix(lease, draw.randint(1, sample_count(lease)))
            wants = draw.choice((0, 0, 7, 13))
            tokens = LOG.tokens_per_sample * sample_count(samples)
            roster.append(Member(peer=peer, tokens=tokens, samples=samples, wants=wants))
        roster = [one for name in take_order(log.roster, offers) for one in roster if one.peer == name]
        before, header = log, next_header(log, roster, digest_of(b"%d" % index))
        log = log.append(header)
        assert follow(before, outcome_of(before, header)) == log, "all peers give up the same"
        numbers = [n for one in roster for piece in one.samples for n in range(piece.start, piece.stop)]
        assert not trained.intersection(numbers)
        trained.update(numbers)
        held = [n for lease in log.leases.values() for piece in lease for n in range(piece.start, piece.stop)]
        free = [n for piece in header.free for n in range(piece.start, piece.stop)]
        assert not trained.intersection(held + free)
        assert len(set(held + free)) == len(held + free)
        largest = max(largest, len(header.free))
    assert largest == 2
    assert len(trained) + len(held) + len(free) < header.cursor, "what was given up"
