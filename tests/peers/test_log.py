"""The log: one header may follow, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from peers.leases import SampleRange
from peers.log import Assignment, Header, LogError, Member
from peers.wire import digest_of, pack, unpack
from tests.peers.builders import LOG, MANIFEST, PAYLOAD, first_log, member


def test_first_position_is_the_manifest() -> None:
    assert LOG.position.index == 0
    assert LOG.position.head == MANIFEST
    assert LOG.roster == ()
    assert LOG.leases == {}


def test_entries_chain() -> None:
    log = first_log()
    assert log.position.index == 1
    header = log.next_header([member("a", 60, 80), member("b", 80, 90)], digest_of(b"second"))
    assert header.previous == log.position.head
    assert header.lineage_tokens == 500
    after = log.append(header)
    assert after.position.index == 2
    assert after.position.head == header.digest
    assert after.roster == ("a", "b")


def test_digest_of_a_fixed_header_never_changes() -> None:
    """Peers of different releases meet in one run; whatever changes these bytes needs another protocol version."""
    header = first_log().last
    assert header is not None
    assert header.digest == digest_of(pack(header))
    assert header.digest.hex() == "a1f99bf83d1cdff52a5f2b84cf4b465ecd990d8ef414c455a98907684fc21b98"
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
    ],
)
def test_every_field_of_a_header_is_checked(field: str, value: Any) -> None:
    log = first_log()
    header = log.next_header([member("a", 60, 80)], PAYLOAD)
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
            "payload": bytes(32),
        }
        changed = Header(**(fields | {field: others.get(field, 12345)}))
        assert changed.digest != header.digest, field


def test_leases_of_absent_peers_go_back_to_the_pool() -> None:
    log = first_log()
    header = log.next_header([member("a", 60, 80)], PAYLOAD)
    assert {lease.peer: lease.samples for lease in header.leases} == {"a": (SampleRange(80, 100),)}
    assert header.free == (SampleRange(100, 120),)
    assert header.cursor == 120


def test_the_untrained_rest_of_a_lease_goes_back_to_the_pool() -> None:
    header = first_log().next_header([member("a", 60, 65), member("b", 80, 100), member("c", 100, 120)], PAYLOAD)
    assert header.leases[0].samples == (SampleRange(65, 80), SampleRange(120, 125))
    assert header.free == ()


def test_a_joiner_may_bring_samples_beyond_the_cursor() -> None:
    log = first_log()
    header = log.next_header([member("a", 60, 80), member("z", 120, 140)], PAYLOAD)
    assert log.append(header).leases.keys() == {"a", "z"}


@pytest.mark.parametrize(
    "roster",
    [
        [member("a", 60, 80), member("b", 60, 80)],
        [member("a", 60, 80), member("b", 79, 90)],
        [member("a", 0, 20)],
        [member("b", 80, 100), member("a", 80, 100)],
    ],
    ids=["the same", "overlapping", "trained in an earlier entry", "another's lease"],
)
def test_samples_of_others_are_refused(roster: list[Member]) -> None:
    with pytest.raises(LogError, match="do not begin a lease of its own"):
        first_log().next_header(roster, PAYLOAD)


@pytest.mark.parametrize("thief", ["b", "z"])
def test_another_peers_lease_cannot_be_claimed_by_being_first(thief: str) -> None:
    """Regression: a peer that claimed a's lease first had a's own Ready refused, in every round."""
    with pytest.raises(LogError, match=f"^{thief}: samples 60.* do not begin"):
        first_log().pool_after([member(thief, 60, 80), member("a", 60, 80)])


def test_rosters_that_lead_nowhere_are_refused() -> None:
    with pytest.raises(LogError, match="twice"):
        LOG.next_header([member("a", 0, 1), member("a", 20, 21)], PAYLOAD)
    with pytest.raises(LogError, match="trained anything"):
        LOG.next_header([Member(peer="a", tokens=0, samples=())], PAYLOAD)


def test_numbers_beyond_all_bounds_are_refused() -> None:
    """Regression: these raised pydantic's error out of the protocol."""
    log = LOG.at(
        Header(
            run="tiny",
            index=0,
            fragment=0,
            previous=MANIFEST,
            roster=(member("a", 0, 1),),
            leases=(Assignment(peer="a", samples=(SampleRange(1, 2),)),),
            cursor=2**62 - 1,
            free=(),
            lineage_tokens=1,
            payload=PAYLOAD,
        )
    )
    with pytest.raises(LogError, match="no header"):
        log.next_header([member("a", 1, 2)], PAYLOAD)


@pytest.mark.parametrize("tokens", [2001, 2**62 - 1])
def test_more_tokens_than_the_samples_have_are_refused(tokens: int) -> None:
    """Regression: one peer that stated 2^62 - 1 tokens stopped the run for good."""
    with pytest.raises(LogError, match=f"^b: {tokens} tokens are more than the 2000 in its samples"):
        LOG.check([member("a", 0, 20), member("b", 20, 40, tokens)])
    LOG.check([member("a", 0, 20), member("b", 20, 40, 2000)])


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
    with pytest.raises(LogError, match=f"^{peer}: samples .* do not begin a lease of its own"):
        first_log().next_header([scattered], PAYLOAD)


def test_two_joiners_cannot_have_one_grant() -> None:
    with pytest.raises(LogError, match="trained or leased already"):
        first_log().check([member("y", 120, 140), member("z", 120, 130)])


def test_who_has_trained_nothing_may_wait_for_those_who_have() -> None:
    idle = Member(peer="a", tokens=0, samples=())
    first_log().check([idle])
    assert first_log().next_header([idle, member("b", 80, 100)], PAYLOAD).lineage_tokens == 400
