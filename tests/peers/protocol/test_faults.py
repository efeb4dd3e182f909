"""What proves a lie convinces everybody, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest

from peers.log.header import Fault
from peers.protocol.averages import NO_TERMS, Averages
from peers.protocol.faults import (
    KINDS,
    PROOF_LIMIT,
    BadContribution,
    FaultProof,
    SignedAverage,
    SignedEntry,
    TwoAverages,
    TwoCommitments,
    TwoVotes,
    read_proof,
)
from peers.protocol.rounds import Attempt
from peers.values.chunks import Sum
from peers.values.wire import WireError, digest_of, pack
from tests.peers.builders import CONTRIBUTION, COURT, attempt, author, commitment, evidence, first_log, vote
from tests.simulator.simulated_keys import SimulatedKeys

LOG = first_log()
AT = attempt(LOG)
OTHER = Sum(digest_of(b"other"), 1.0)


def signed(digest: bytes, absent: tuple[str, ...] = (), start: int = 0, chunk: int = 1, by: str = "c") -> SignedAverage:
    averages = Averages(by, AT, SimulatedKeys(by), {by: start})
    averages.sign(chunk, digest, absent)
    origin = averages.origin(chunk)
    assert origin is not None
    return SignedAverage(digest=digest, absent=absent, signature=origin.signature)


def two_averages(**changes: Any) -> TwoAverages:
    fields: dict[str, Any] = {
        "round_name": AT,
        "terms": NO_TERMS,
        "reducer": "c",
        "incarnation": 0,
        "chunk": 1,
        "first": signed(digest_of(b"one")),
        "second": signed(digest_of(b"two")),
    }
    return TwoAverages(**(fields | changes))


def two_commitments(**changes: Any) -> TwoCommitments:
    fields: dict[str, Any] = {
        "author": author("c", 0, LOG.position),
        "first": commitment("c", 0, LOG.position, CONTRIBUTION),
        "second": commitment("c", 0, LOG.position, OTHER),
    }
    return TwoCommitments(**(fields | changes))


def bad_contribution(honest: bool = False, **changes: Any) -> BadContribution:
    fields: dict[str, Any] = {"author": author("c", 0, LOG.position), "evidence": evidence(LOG, "c", honest)}
    return BadContribution(**(fields | changes))


def signed_entry(payload: bytes, at: Attempt = AT, by: str = "c", start: int = 0) -> SignedEntry:
    header = LOG.next_header([LOG.expected(peer) for peer in "abc"], payload)
    return SignedEntry(header=header.digest, signature=vote(header, at, by, start))


def two_votes(**changes: Any) -> TwoVotes:
    fields: dict[str, Any] = {
        "attempt": AT,
        "member": "c",
        "incarnation": 0,
        "first": signed_entry(digest_of(b"one")),
        "second": signed_entry(digest_of(b"two")),
    }
    return TwoVotes(**(fields | changes))


GOOD: dict[str, FaultProof] = {
    "two entries": two_votes(),
    "two averages": two_averages(),
    "two averages, one without somebody": two_averages(second=signed(digest_of(b"one"), ("a",))),
    "two commitments": two_commitments(),
    "another norm": two_commitments(second=commitment("c", 0, LOG.position, Sum(CONTRIBUTION.digest, 7.0))),
    "a bad contribution": bad_contribution(),
}
BAD: dict[str, FaultProof] = {
    "twice the same entry": two_votes(second=signed_entry(digest_of(b"one"))),
    "entries in two attempts": two_votes(second=signed_entry(digest_of(b"two"), attempt(LOG, 2))),
    "entries of two leaders' attempts": two_votes(second=signed_entry(digest_of(b"two"), attempt(LOG, 1, "b"))),
    "entries of two starts": two_votes(second=signed_entry(digest_of(b"two"), start=7)),
    "entries that two have signed": two_votes(second=signed_entry(digest_of(b"two"), by="b")),
    "twice the same average": two_averages(second=signed(digest_of(b"one"))),
    "averages of different chunks": two_averages(second=signed(digest_of(b"two"), chunk=2)),
    "averages of two starts": two_averages(second=signed(digest_of(b"two"), start=7)),
    "averages of two reducers": two_averages(second=signed(digest_of(b"two"), by="b")),
    "averages in another round": two_averages(round_name=attempt(LOG, 2)),
    "another reducer": two_averages(reducer="b"),
    "twice the same commitment": two_commitments(second=commitment("c", 0, LOG.position, CONTRIBUTION)),
    "commitments of two starts": two_commitments(second=commitment("c", 7, LOG.position, OTHER)),
    "commitments for two rounds": two_commitments(second=commitment("c", 0, LOG.position, OTHER, after=1)),
    "commitments of two peers": two_commitments(second=commitment("b", 0, LOG.position, OTHER)),
    "a good contribution": bad_contribution(honest=True),
    "a contribution to another round": bad_contribution(author=author("c", 0, LOG.position, 1)),
    "a contribution of another": bad_contribution(author=author("b", 0, LOG.position)),
}


@pytest.mark.parametrize("proof", GOOD.values(), ids=GOOD)
def test_a_proof_convicts(proof: FaultProof) -> None:
    assert proof.convicts(COURT)
    assert (proof.accused, proof.position) == ("c", LOG.position)


@pytest.mark.parametrize("proof", BAD.values(), ids=BAD)
def test_nothing_else_convicts(proof: FaultProof) -> None:
    assert not proof.convicts(COURT)


@pytest.mark.parametrize("proof", GOOD.values(), ids=GOOD)
def test_a_proof_is_bytes_and_named_by_their_digest(proof: FaultProof) -> None:
    data = pack(proof)
    assert read_proof(proof.kind, data) == proof
    assert proof.fault == Fault(peer="c", kind=proof.kind, proof=digest_of(data))


@pytest.mark.parametrize("kind", [*KINDS, "none"])
@pytest.mark.parametrize("data", [b"", b"\x90", b"nonsense", bytes(PROOF_LIMIT + 1)], ids=len)
def test_other_bytes_are_no_proof(kind: str, data: bytes) -> None:
    with pytest.raises(WireError):
        read_proof(kind, data)


def test_all_kinds_of_proofs_are_tried_here() -> None:
    assert {proof.kind for proof in GOOD.values()} == {proof.kind for proof in BAD.values()} == set(KINDS)
