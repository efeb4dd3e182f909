"""What convicts a peer before anybody, and what does not."""

from __future__ import annotations

import random
from typing import get_args

import pytest

from peers.audit.proofs import (
    PROOFS,
    BadContribution,
    FaultProof,
    TwoVotes,
    Verifier,
    contradict,
    read_proof,
)
from peers.log.certificate import Choice, Phase
from peers.log.header import Fault, Kind
from peers.messages.messages import PROOF_LIMIT
from peers.values.wire import WireError, digest_of, pack
from tests.peers.audit.statements import (
    ABC,
    ROUND,
    VERIFIER,
    A,
    B,
    author,
    average,
    choice,
    commitment,
    committed_chunk,
    log_of,
    round_of,
    two_averages,
    two_commitments,
    two_votes,
    verify,
    vote,
    vote_after_farewell,
)

ONE = average(b"one")
LATER = round_of(view=1)
GOOD: dict[str, FaultProof] = {
    "two votes": two_votes(),
    "a vote after a farewell": vote_after_farewell(),
    "two averages": two_averages(ONE, average(b"two")),
    "two averages, one without a member": two_averages(ONE, average(b"one", ("a",))),
    "two commitments": two_commitments(),
    "another norm": two_commitments().model_copy(update={"second": commitment(b"0 0", squares=7.0)}),
    "a bad contribution": BadContribution(author=author(), evidence=committed_chunk()),
}
BAD: dict[str, FaultProof] = {
    "twice the same vote": two_votes().model_copy(update={"second": two_votes().first}),
    "votes of two peers": two_votes().model_copy(update={"second": two_votes("b").second}),
    "another peer's votes": two_votes().model_copy(update={"peer": "b"}),
    "votes of two positions": two_votes().model_copy(update={"second": two_votes("c", log_of("abd").position).second}),
    "votes of two incarnations": two_votes().model_copy(update={"second": vote("c", choice(B, 0), incarnation=8)}),
    "a vote before a farewell": vote_after_farewell(index=2),
    "a farewell of another incarnation": vote_after_farewell(incarnation=8),
    "a farewell of another run": vote_after_farewell(run="another"),
    "a farewell that is not signed": vote_after_farewell().model_copy(update={"signature": bytes(64)}),
    "twice the same average": two_averages(ONE, average(b"one")),
    "averages of different chunks": two_averages(ONE, average(b"two", chunk=5)),
    "averages of two incarnations": two_averages(ONE, average(b"two", incarnation=8)),
    "averages of two reducers": two_averages(ONE, average(b"two", by="b")),
    "an average that another peer has signed": two_averages(ONE, average(b"two", by="b", reducer="c")),
    "averages of another round": two_averages(ONE, average(b"two"), LATER),
    "averages of two rounds": two_averages(ONE, average(b"two", round=LATER)),
    "twice the same commitment": two_commitments().model_copy(update={"second": two_commitments().first}),
    "commitments of two incarnations": two_commitments().model_copy(
        update={"second": commitment(b"two", author(incarnation=8))}
    ),
    "commitments of two trainings": two_commitments().model_copy(
        update={"second": commitment(b"two", author(number=1))}
    ),
    "commitments of two peers": two_commitments().model_copy(update={"second": commitment(b"two", author("b"))}),
    "a good contribution": BadContribution(author=author(), evidence=committed_chunk(is_honest=True)),
    "a contribution of another training": BadContribution(author=author(number=1), evidence=committed_chunk()),
    "a contribution of another peer": BadContribution(author=author("b"), evidence=committed_chunk()),
    "a contribution to no fragment": BadContribution(
        author=author(position=ABC.position.model_copy(update={"fragment": 1})), evidence=committed_chunk()
    ),
}


@pytest.mark.parametrize("proof", GOOD.values(), ids=GOOD)
def test_a_proof_convicts(proof: FaultProof) -> None:
    assert proof.convicts(VERIFIER)
    assert (proof.accused, proof.position) == ("c", ABC.position)


@pytest.mark.parametrize("proof", BAD.values(), ids=BAD)
def test_nothing_else_convicts(proof: FaultProof) -> None:
    assert not proof.convicts(VERIFIER)


@pytest.mark.parametrize("proof", GOOD.values(), ids=GOOD)
def test_a_proof_is_bytes_and_named_by_their_digest(proof: FaultProof) -> None:
    data = pack(proof)
    assert read_proof(proof.kind, data) == proof
    assert proof.fault == Fault(peer="c", kind=proof.kind, proof=digest_of(data))


def test_a_proof_is_read_as_the_kind_that_it_is() -> None:
    for proof in GOOD.values():
        for kind in set(get_args(Kind)) - {proof.kind}:
            with pytest.raises(WireError):
                read_proof(kind, pack(proof))


def test_all_kinds_of_proofs_are_tried_here() -> None:
    assert {type(proof) for proof in GOOD.values()} == {type(proof) for proof in BAD.values()} == set(PROOFS)
    assert {proof.kind for proof in PROOFS} == set(get_args(Kind))


def test_a_contribution_is_judged_with_the_codec_of_its_fragment() -> None:
    assert not GOOD["a bad contribution"].convicts(Verifier("tiny", verify, payloads=()))


# Votes -----------------------------------------------------------------------------------------------------------
VOTED = choice(A, 3, Phase.COMMIT)


@pytest.mark.parametrize(
    ("first", "second", "is_lie"),
    [
        (choice(A, 1), choice(B, 1), True),
        (choice(A, 1), choice(A, 1, group="b"), True),
        (choice(A, 2), choice(A, 2, justify=1), True),
        (choice(A, 1, Phase.COMMIT), choice(B, 1, Phase.COMMIT), True),
        (choice(A, 1), choice(A, 1), False),
        (choice(A, 1), choice(B, 1, Phase.COMMIT), False),
        (VOTED, choice(B, 4), True),
        (VOTED, choice(B, 4, justify=2), True),
        (VOTED, choice(B, 4, justify=3), True),
        (VOTED, choice(B, 5, justify=3), True),
        (VOTED, choice(B, 6, justify=4), False),
        (VOTED, choice(A, 4), False),
        (VOTED, choice(B, 2), False),
        (VOTED, choice(B, 4, Phase.COMMIT), False),
        (VOTED, choice(B, 4, group="b"), False),
        (choice(A, 3, Phase.COMMIT, group="b"), choice(B, 4), False),
    ],
)
def test_two_votes_of_one_ballot_or_a_forgotten_lock_convict(first: Choice, second: Choice, is_lie: bool) -> None:
    for one, other in ((first, second), (second, first)):
        proof = TwoVotes(peer="b", first=vote("b", one), second=vote("b", other))
        assert contradict(proof.first, proof.second) is is_lie
        assert read_proof("votes", pack(proof)).convicts(VERIFIER) is is_lie


# Bytes from the network --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [*get_args(Kind), "none"])
@pytest.mark.parametrize("data", [b"", b"\x90", b"nonsense", bytes(PROOF_LIMIT + 1)], ids=len)
def test_other_bytes_are_no_proof(kind: str, data: bytes) -> None:
    with pytest.raises(WireError):
        read_proof(kind, data)


@pytest.mark.parametrize("proof", GOOD.values(), ids=GOOD)
def test_a_proof_that_is_changed_anywhere_is_no_proof(proof: FaultProof) -> None:
    """Each changed byte makes it unreadable, or takes away what it proves."""
    draw, data = random.Random(1), pack(proof)
    for _ in range(200):
        place, flipped = draw.randrange(len(data)), draw.randrange(1, 256)
        changed = data[:place] + bytes([data[place] ^ flipped]) + data[place + 1 :]
        try:
            read = read_proof(proof.kind, changed)
        except WireError:
            continue
        assert not read.convicts(VERIFIER) or read == proof


def test_a_name_of_a_round_in_another_ballot_is_another_round() -> None:
    assert ROUND.terms != LATER.terms
