"""Probation follows from the log alone: who is new neither counts nor votes, and all peers know the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import pytest

from peers.log.certificate import CertificateError, Signer, Support, certify, electorate, prove
from peers.log.chain import header_of, outcome_of
from peers.log.header import MEMBER_LIMIT, Header, Member
from peers.log.state import LogError, LogState
from peers.values.wire import pack, unpack
from tests.peers.logs import LOG, PAYLOAD, certificate, choice_of, newcomer, next_header, votes
from tests.simulator.simulated_keys import SimulatedKeys

EMPTY = replace(LOG, probation=2)
VERIFY = SimulatedKeys("a").verify


def bringing(log: LogState, names: Iterable[str]) -> list[Member]:
    """Members that have trained all of their leases, newcomers a grant each."""
    grants = iter(range(len(log.grants)))
    return [log.expected(name) if name in log.leases else newcomer(log, name, next(grants)) for name in names]


def after(log: LogState, names: Iterable[str]) -> LogState:
    """The log after an entry of these, all others being gone."""
    gone = [peer for peer in log.voters if peer not in names]
    return log.append(next_header(log, log.without_unproven(bringing(log, names)), PAYLOAD, (), gone))


def founded(names: str = "abc") -> LogState:
    return after(EMPTY, names)


def test_founders_have_served() -> None:
    log = founded()
    assert not any(map(log.is_on_probation, "abc"))
    assert log.voters == log.roster == tuple("abc")
    assert log.ring == tuple("bca"), "a founded it"
    assert log.last is not None
    assert log.last.tokens_of("a") > 0


def test_a_newcomer_counts_and_votes_after_so_many_outer_steps() -> None:
    log, tokens, voters = founded(), [], []
    for _ in range(4):
        log = after(log, "abcz")
        assert log.last is not None
        tokens.append(log.last.tokens_of("z"))
        voters.append("".join(peer for peer, _ in electorate(log, log.last).voters))
        assert log.last.tokens_of("a") > 0
    assert tokens == [0, 0, 100, 100]
    assert voters == ["abc", "abcz", "abcz", "abcz"]


def test_what_it_trains_meanwhile_is_trained_again() -> None:
    log = after(founded(), "abcz")
    lease = log.leases["z"]
    log = after(log, "abcz")
    assert log.last is not None
    [share] = [one for one in log.last.roster if one.peer == "z"]
    assert (share.tokens, share.samples) == (0, ())
    open_again = {n for piece in (*log.pool.free, *chain(*log.leases.values())) for n in range(piece.start, piece.stop)}
    assert all(n in open_again for piece in lease for n in range(piece.start, piece.stop))


def test_nobody_can_write_another_header() -> None:
    log = after(founded(), "abc")
    with pytest.raises(LogError, match="on probation counts"):
        next_header(log, bringing(log, "abcz"), PAYLOAD)
    honest = next_header(log, log.without_unproven(bringing(log, "abcz")), PAYLOAD)
    for tenures in ((), honest.tenures[:-1], tuple(one.model_copy(update={"served": 2}) for one in honest.tenures)):
        with pytest.raises(LogError, match="its tenures does not follow"):
            log.append(honest.model_copy(update={"tenures": tenures}))


def test_sybils_are_no_quorum() -> None:
    """Many that came at once have no say together, as long as one is there that was before."""
    log = after(founded("a"), "a" + "stuvwxyz")
    assert log.voters == ("a",)
    assert log.last is not None
    assert electorate(log, log.last).voters == (("a", 0),)
    assert [log.counts(peer, 0) for peer in "as"] == [True, False]
    log = after(founded("a"), "as")
    assert log.ring == ("a", "s"), "nor does one of them lead first"


def test_signatures_of_newcomers_certify_nothing() -> None:
    log = after(founded("a"), "a" + "stu")
    header = next_header(log, log.without_unproven(bringing(log, "astu")))
    choice = choice_of(header)
    theirs = votes(choice, header, [(peer, 0) for peer in "stu"])
    assert certify(log, header, choice, (), theirs, {}) is None
    ours = certificate(log, header, "a")
    assert prove(ours, log, header, VERIFY) == Support(True, 1)
    signers = tuple(Signer(place=place, signature=bytes(64)) for place in (1, 2, 3))
    with pytest.raises(CertificateError, match="names a voter twice, or an unknown one"):
        prove(ours.model_copy(update={"signers": signers}), log, header, VERIFY)
    alone = certificate(log, header, "stu")
    assert prove(alone, log, header, VERIFY) == Support(False, 0), "nor do they speak for a minority's entry"


def test_whoever_was_there_before_need_not_serve_again() -> None:
    log = founded()
    for _ in range(5):
        log = after(log, "ab")
    assert not log.is_on_probation("c")
    log = after(log, "abc")
    assert log.voters == tuple("abc")


def test_probation_is_served_in_rosters_and_not_by_waiting() -> None:
    log = after(founded(), "abcz")
    for _ in range(5):
        log = after(log, "abc")
    assert log.is_on_probation("z")
    assert not after(log, "abcz").is_on_probation("z")


def test_newcomers_that_are_left_alone_go_on() -> None:
    """When all who counted are gone, what newcomers make counts: else the run would have ended with them."""
    log = after(founded(), "abcyz")
    alone = after(log, "yz")
    assert alone.last is not None
    assert alone.last.tokens_of("z") > 0
    assert alone.voters == ("y", "z")


def test_what_is_remembered_is_bounded() -> None:
    log = founded()
    tenures = tuple(
        one.model_copy(update={"peer": f"old{number}", "served": 1 + number % 2})
        for number in range(2 * MEMBER_LIMIT)
        for one in (log.last.tenures[:1] if log.last else ())
    )
    assert log.last is not None
    long = log.at(log.last.model_copy(update={"tenures": tenures}))
    header = next_header(long, long.without_unproven(bringing(long, "abc")), PAYLOAD)
    assert len(header.tenures) == 3 + MEMBER_LIMIT
    assert {one.served for one in header.tenures[3:]} == {2}, "those that have served are remembered for longest"


def test_headers_and_outcomes_have_it() -> None:
    log = after(founded(), "abcz")
    header = next_header(log, log.without_unproven(bringing(log, "abcz")), PAYLOAD)
    assert unpack(Header, pack(header)) == header
    assert header_of(log, outcome_of(log, header)) == header
    assert log.at(log.last).served == log.served, "who takes over a snapshot knows the same"


def test_without_probation_nothing_is_remembered() -> None:
    log = after(LOG, "abc")
    for names in ("abcz", "az"):
        log = after(log, names)
        assert log.last is not None
        assert log.last.tenures == ()
        assert log.voters == log.roster
        assert log.last.tokens_of("z") > 0
