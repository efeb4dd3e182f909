"""What a peer remembers of others' statements, whom that convicts, and which faults an entry may name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import msgpack
import pytest

from peers.audit import evidence as evidence_module
from peers.audit import proofs as proofs_module
from peers.audit.evidence import KEPT, LOOKED_AT, OF_ONE, Evidence, FalseProofError
from peers.audit.proofs import COMMITMENTS, VOTES_OF_ONE, TwoVotes, read_proof
from peers.log.certificate import Certificate, Choice, Phase, Support
from peers.log.header import FAULT_AGE, FAULT_LIMIT, Fault, Header, Kind, Position
from peers.log.lineage import Branch, Lineage
from peers.messages.messages import Certified, Proof, Vote
from peers.values.wire import digest_of, pack
from tests.peers.audit.statements import (
    ABC,
    PAYLOADS,
    ROUND,
    VERIFIER,
    A,
    B,
    author,
    average,
    certified,
    choice,
    commitment,
    committed_chunk,
    evidence,
    header,
    leaving,
    lineage_of,
    log_of,
    round_of,
    shown,
    two_commitments,
    two_votes,
    vote,
)
from tests.peers.logs import SETTINGS, next_header
from tests.simulator.simulated_keys import SimulatedKeys

Faults = tuple[Fault, ...]


def proofs_behind(held: Evidence, faults: Faults) -> list[bool]:
    """Return whether each of these faults is proven to everybody by what is kept of it."""
    found = [read_proof(known.fault.kind, known.data) for known in held.behind(faults)]
    assert [proof.fault for proof in found] == list(faults)
    return [proof.convicts(VERIFIER) for proof in found]


def proof_of(shown: Certified) -> Certificate:
    assert shown.certificate is not None
    return shown.certificate


def taken(proof: TwoVotes, lineage: Lineage) -> Evidence:
    held = evidence(lineage.log.exclusion)
    held.observe_proof("b", shown(proof), lineage)
    return held


# What is observed ------------------------------------------------------------------------------------------------
HERE = Lineage(ABC)


Tell = Callable[[Evidence], Faults]
"""Tells a peer of one statement."""


def votes(given: Vote, peer: str = "c") -> Tell:
    return lambda held: held.observe_vote(peer, given, HERE)


def certificate(entry: Header, what: Choice, signers: str, gone: str = "") -> Tell:
    return lambda held: held.observe_certified(certified(entry, what, signers, gone=gone), ABC, HERE)


def farewell(index: int) -> Tell:
    return lambda held: held.observe_farewell("c", leaving("c", index), HERE)


def averaged(value: bytes) -> Tell:
    return lambda held: held.observe_average(ROUND, average(value), HERE)


def committed(value: bytes) -> Tell:
    return lambda held: held.observe_commitment(author(), commitment(value), HERE)


VOTED = votes(vote("c", choice(A, 1)))
CONTRADICTIONS: dict[str, tuple[Tell, Tell]] = {
    "two votes": (VOTED, votes(vote("c", choice(B, 1)))),
    "a vote, and another one in a certificate": (VOTED, certificate(B, choice(B, 1), "bc")),
    "a lock, and a vote that forgets it": (
        certificate(A, choice(A, 1, Phase.COMMIT), "ac"),
        certificate(B, choice(B, 2), "bc"),
    ),
    "a vote after a farewell": (VOTED, farewell(1)),
    "a vote after a farewell in a certificate": (VOTED, certificate(B, choice(B, 2), "a", gone="bc")),
    "two averages": (averaged(b"one"), averaged(b"two")),
    "two commitments": (committed(b"one"), committed(b"two")),
}


def test_r9_a_voter_without_a_lease_is_observed_too() -> None:
    """c stands by: it has a vote, and so may lie with it."""
    log = replace(ABC, staleness=0)
    after = log.append(next_header(log, [log.expected(peer) for peer in "ab"]))
    lineage = Lineage(after)
    assert "c" not in after.leases
    assert "c" in after.voters
    held = evidence()
    lies = two_votes("c", after.position)
    assert held.observe_vote("c", lies.first, lineage) == ()
    (fault,) = held.observe_vote("c", lies.second, lineage)
    assert fault.peer == "c"


def test_r9_votes_of_no_fragment_are_not_remembered() -> None:
    """Else they would push out those that convict."""
    held, lineage = evidence(), lineage_of()
    nowhere = ABC.position.model_copy(update={"fragment": 1})
    lies = two_votes("c", nowhere)
    held.observe_vote("c", lies.first, lineage)
    assert held.observe_vote("c", lies.second, lineage) == ()


@pytest.mark.parametrize("pair", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_two_statements_convict_in_either_order(pair: tuple[Tell, Tell], is_reversed: bool) -> None:
    held, (first, second) = evidence(), reversed(pair) if is_reversed else pair
    assert first(held) == () == first(held)
    assert not held.has_convicted("c")
    (fault,) = second(held)
    assert fault.peer == "c"
    assert second(held) == () == first(held), "it is convicted"
    assert held.has_convicted("c")
    assert held.has([fault], HERE)
    assert proofs_behind(held, (fault,)) == [True]
    assert held.provable(ABC, HERE, "ab") == (fault,)


def test_a_bad_contribution_convicts() -> None:
    held = evidence()
    (fault,) = held.observe_blocks(author(), committed_chunk(), HERE)
    assert proofs_behind(held, (fault,)) == [True]
    assert evidence().observe_blocks(author(), committed_chunk(is_honest=True), HERE) == ()


def test_all_signers_of_two_certificates_are_convicted() -> None:
    held = evidence()
    assert held.observe_certified(certified(A, choice(A, 1), "abc"), ABC, HERE) == ()
    faults = held.observe_certified(certified(B, choice(B, 1), "bc"), ABC, HERE)
    assert [fault.peer for fault in faults] == ["b", "c"]
    assert proofs_behind(held, faults) == [True, True]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("c", vote("c", choice(A, 1))), ("c", vote("c", choice(B, 2)))),
        (("c", vote("c", choice(A, 1))), ("c", vote("c", choice(B, 1), incarnation=8))),
        (("c", vote("c", choice(A, 1))), ("c", vote("b", choice(B, 1)))),
        (("c", vote("b", choice(A, 1))), ("c", vote("c", choice(B, 1)))),
        (("c", vote("c", choice(A, 1))), ("b", vote("b", choice(B, 1)))),
        (("z", vote("z", choice(A, 1))), ("z", vote("z", choice(B, 1)))),
    ],
    ids=["two ballots", "two incarnations", "unsigned", "unsigned at first", "two peers", "a stranger"],
)
def test_honest_votes_and_those_of_others_convict_nobody(first: tuple[str, Vote], second: tuple[str, Vote]) -> None:
    held = evidence()
    for peer, given in (first, second, first):
        assert held.observe_vote(peer, given, HERE) == ()


def test_an_unsigned_vote_hides_nothing() -> None:
    held = evidence()
    forged = vote("c", choice(A, 1)).model_copy(update={"signature": bytes(64)})
    for given in (forged, vote("c", choice(A, 1)), forged):
        assert held.observe_vote("c", given, HERE) == ()
    assert held.observe_vote("c", vote("c", choice(B, 1)), HERE)


def test_another_incarnation_hides_nothing() -> None:
    held = evidence()
    for given in (vote("c", choice(A, 1), incarnation=8), vote("c", choice(A, 1))):
        assert held.observe_vote("c", given, HERE) == ()
    assert held.observe_vote("c", vote("c", choice(B, 1)), HERE)
    held = evidence()
    for given in (vote("c", choice(A, 1), incarnation=8), vote("c", choice(A, 1))):
        assert held.observe_vote("c", given, HERE) == ()
    assert farewell(1)(held)
    held = evidence()
    farewell(1)(held)
    held.observe_farewell("c", leaving("c", 1, incarnation=8), HERE)
    assert VOTED(held)


def test_a_minoritys_certificate_names_its_group() -> None:
    held = evidence()
    assert held.observe_certified(certified(A, choice(A, 1, group="bc"), "c", group="bc"), ABC, HERE) == ()
    (fault,) = held.observe_certified(certified(B, choice(B, 1, group="cb"), "c", group="cb"), ABC, HERE)
    assert fault.peer == "c"


def test_honest_exchanges_convict_nobody() -> None:
    """An heir averages a chunk again, another round has other averages, and a peer may train again."""
    held, other = evidence(), round_of(view=1)
    for round, said in (
        (ROUND, average(b"one")),
        (ROUND, average(b"two", by="b")),
        (ROUND, average(b"two", chunk=5)),
        (other, average(b"two", round=other)),
        (ROUND, average(b"two", by="z")),
        (ROUND, average(b"two", chunk=6)),
        (ROUND, average(b"three", chunk=6)),
    ):
        assert held.observe_average(round, said, HERE) == ()
    for number, value in enumerate((b"one", b"two")):
        assert held.observe_commitment(author(number=number), commitment(value, author(number=number)), HERE) == ()
    forged = commitment(b"three").model_copy(update={"signature": bytes(64)})
    assert held.observe_commitment(author(), forged, HERE) == ()


def test_an_unsigned_commitment_hides_nothing() -> None:
    held = evidence()
    forged = commitment(b"three").model_copy(update={"signature": bytes(64)})
    for given in (forged, commitment(b"one"), forged):
        assert held.observe_commitment(author(), given, HERE) == ()
    assert held.observe_commitment(author(), commitment(b"two"), HERE)


def test_an_average_without_its_reducers_signature_convicts_nobody() -> None:
    held = evidence()
    held.observe_average(ROUND, average(b"one"), HERE)
    assert held.observe_average(ROUND, average(b"two", by="b", reducer="c"), HERE) == ()


def test_farewells_of_other_incarnations_and_later_ones_convict_nobody() -> None:
    held = evidence()
    held.observe_vote("c", vote("c", choice(A, 1)), HERE)
    for said in (leaving("c", 2), leaving("c", 1, incarnation=8), leaving("b", 1)):
        assert held.observe_farewell("c", said, HERE) == ()
    assert held.observe_farewell("c", leaving("c", 1), HERE)


def test_what_is_stated_elsewhere_is_not_remembered() -> None:
    held, elsewhere = evidence(), log_of("abd").position
    for entry in (A, B):
        assert held.observe_vote("c", vote("c", choice(entry, 1), elsewhere), HERE) == ()
        assert held.observe_certified(certified(entry, choice(entry, 1), "bc"), log_of("abcd"), HERE) == ()
    founding = SETTINGS.empty_log.position
    for entry in (A, B):
        assert held.observe_vote("c", vote("c", choice(entry, 1), founding), HERE) == (), "told before the first entry"


def test_a_late_statement_convicts_while_an_entry_may_name_it() -> None:
    for entries, is_late in ((FAULT_AGE - 1, False), (FAULT_AGE, True)):
        held, lineage = evidence(), lineage_of(entries=entries)
        held.observe_vote("c", vote("c", choice(A, 1)), HERE)
        assert (held.observe_vote("c", vote("c", choice(B, 1)), lineage) == ()) is is_late


def test_where_two_branches_part_their_certificates_convict_also_who_broke_a_lock() -> None:
    """Their commits name one signer of two votes 2, and the prepare certificate that was seen one that broke a lock."""
    held, log = evidence(), log_of("abcde")
    one, other = header(0, log), header(1, log)
    branches = [
        Branch(
            log,
            log.append(entry),
            first={0: (entry.digest, Support(True, 3))},
            certificates={0: proof_of(certified(entry, choice(entry, view, Phase.COMMIT), signers, log))},
        )
        for entry, view, signers in ((one, 1, "abc"), (other, 2, "cde"))
    ]
    lineage = Lineage(log)
    held.observe_certified(certified(other, choice(other, 2), "bde", log), log, lineage)
    faults = held.observe_split(branches[0], branches[1], lineage)
    assert [fault.peer for fault in faults] == ["b"], "c only changed its mind in a later ballot, as far as is known"
    assert proofs_behind(held, faults) == [True]
    assert held.observe_certified(certified(other, choice(other, 2), "cde", log), log, lineage)[0].peer == "c"


def late(signers: str, view: int = 2, phase: Phase = Phase.COMMIT) -> Certified:
    return certified(B, choice(B, view, phase), signers)


def test_the_commit_of_another_branch_convicts_when_it_is_shown_to_those_who_voted_on_the_later_one() -> None:
    """c has locked A, and helped to prepare B without a certificate. Here B was made."""
    held, lineage = evidence(), Lineage(ABC)
    for phase, signers in ((Phase.PREPARE, "bc"), (Phase.COMMIT, "ab")):
        assert held.observe_certified(certified(B, choice(B, 2, phase), signers), ABC, lineage) == ()
    lineage.append(B, ABC.append(B))
    other = certified(A, choice(A, 1, Phase.COMMIT), "ac")
    (fault,) = held.observe_late("a", other, lineage)
    assert fault.peer == "c"
    assert proofs_behind(held, (fault,)) == [True]


@pytest.mark.parametrize("signers", ["c", "bc"])
def test_a_late_certificate_is_proven_first(signers: str) -> None:
    """What is no certificate is not remembered, and takes no place from what is."""
    held, lineage = evidence(), lineage_of(entries=1)
    forged = certified(B, choice(B, 2), signers)
    if signers == "bc":
        signers_of = tuple(one.model_copy(update={"signature": bytes(64)}) for one in proof_of(forged).signers)
        forged = forged.model_copy(update={"certificate": proof_of(forged).model_copy(update={"signers": signers_of})})
    assert held.observe_late("a", forged, lineage) == ()
    assert held.observe_vote("c", vote("c", choice(A, 2)), lineage) == ()
    assert held.observe_late("a", certified(B, choice(B, 2), "bc"), lineage)


def test_a_late_prepare_certificate_of_the_entry_that_was_made_tells_something_new() -> None:
    held, lineage = evidence(), Lineage(ABC)
    lineage.append(B, ABC.append(B))
    held.observe_vote("c", vote("c", choice(A, 1, Phase.COMMIT)), lineage)
    assert held.observe_late("a", late("bc"), lineage) == ()
    assert held.observe_late("a", late("bc", phase=Phase.PREPARE), lineage)


def test_late_certificates_of_no_use_are_passed_over() -> None:
    lineage, other = lineage_of(entries=1), log_of("abd")
    entry = header(0, other)
    elsewhere = certified(entry, choice(entry, 1), "ab", other)
    nothing = late("bc").model_copy(update={"certificate": None})
    far = late("bc").model_copy(update={"header": B.model_copy(update={"fragment": 1})})
    for shown_late in (elsewhere, nothing, far):
        held = evidence()
        assert held.observe_late("a", shown_late, lineage) == ()
        assert held.observe_vote("c", vote("c", choice(A, 2, Phase.COMMIT)), lineage) == ()


def test_a_few_late_certificates_of_each_sender_are_checked_in_a_cycle() -> None:
    lineage, held = Lineage(ABC), evidence()
    lineage.append(A, ABC.append(A))
    held.observe_vote("c", vote("c", choice(A, 2, Phase.COMMIT)), lineage)
    ours = certified(A, choice(A, 1, Phase.COMMIT), "ab")
    for _ in range(2 * LOOKED_AT):
        held.observe_late("a", ours, lineage)  # as honest peers answer stragglers: that costs nothing
    for view in range(LOOKED_AT - 1):
        held.observe_late("a", late("ab", 5 + view), lineage)
    assert held.observe_late("a", late("bc"), lineage), "the last one that is looked at"
    held = evidence()
    held.observe_vote("c", vote("c", choice(A, 2, Phase.COMMIT)), lineage)
    for view in range(LOOKED_AT):
        held.observe_late("a", late("ab", 5 + view), lineage)
    assert held.observe_late("a", late("bc"), lineage) == ()
    assert held.observe_late("b", late("bc"), lineage)


def test_late_certificates_of_an_excluded_sender_are_not_looked_at() -> None:
    held, lineage = evidence(), excluded()
    held.observe_vote("b", vote("b", choice(A, 2, Phase.COMMIT)), lineage)
    assert held.observe_late("c", late("ab"), lineage) == ()
    assert held.observe_late("a", late("ab"), lineage)


def test_a_fork_of_voters_that_counted_themselves_out_convicts_them() -> None:
    held, log = evidence(), log_of("abcde")
    one, other = header(0, log), header(1, log)
    lineage = Lineage(log)
    assert not held.observe_certified(certified(one, choice(one, 1, Phase.COMMIT), "ab", log, gone="de"), log, lineage)
    faults = held.observe_certified(certified(other, choice(other, 1, Phase.COMMIT), "cde", log), log, lineage)
    assert [fault.peer for fault in faults] == ["d", "e"]
    assert proofs_behind(held, faults) == [True, True]


def test_a_certificate_of_another_place_hides_nothing() -> None:
    held, lineage = evidence(), lineage_of(entries=1)
    log = lineage.log
    held.observe_certified(certified(A, choice(A, 1), "bc"), log, lineage)
    for number in range(2):
        given = vote("c", choice(header(number, log), 1), log.position)
        assert bool(held.observe_vote("c", given, lineage)) is (number == 1)


def test_certificates_of_no_use_are_passed_over() -> None:
    held = evidence()
    assert (
        held.observe_certified(certified(A, choice(A, 1), "a").model_copy(update={"certificate": None}), ABC, HERE)
        == ()
    )
    far = certified(A, choice(A, 1), "ab")
    signers = tuple(one.model_copy(update={"place": 9}) for one in proof_of(far).signers)
    far = far.model_copy(update={"certificate": proof_of(far).model_copy(update={"signers": signers})})
    assert held.observe_certified(far, ABC, HERE) == ()


# How much is remembered ------------------------------------------------------------------------------------------
def test_a_flood_of_votes_does_not_hide_those_in_certificates() -> None:
    held = evidence()
    held.observe_certified(certified(A, choice(A, 1, Phase.COMMIT), "bc"), ABC, HERE)
    for view in range(2, 3 * VOTES_OF_ONE):
        held.observe_vote("c", vote("c", choice(A, view)), HERE)
    assert held.observe_certified(certified(B, choice(B, 3 * VOTES_OF_ONE), "c"), ABC, HERE)


def test_a_certificate_counts_after_a_flood_of_votes() -> None:
    held, last = evidence(), 3 * VOTES_OF_ONE
    for view in range(1, last):
        held.observe_vote("c", vote("c", choice(A, view)), HERE)
    held.observe_certified(certified(A, choice(A, last, Phase.COMMIT), "c"), ABC, HERE)
    assert held.observe_certified(certified(B, choice(B, last + 1), "c"), ABC, HERE)


def test_r9_certificates_that_one_peer_makes_alone_are_a_few() -> None:
    """It can make as many as it likes, and they would be remembered in place of all other votes."""
    held = evidence()
    for view in range(1, 3 * VOTES_OF_ONE):
        held.observe_certified(certified(A, choice(A, view, Phase.COMMIT, group="c"), "c", group="c"), ABC, HERE)
    assert held._statements._votes_of == {"c": VOTES_OF_ONE}


def test_r9_votes_of_many_fragments_push_out_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs_module, "VOTES_OF_PEER", 3)
    monkeypatch.setattr(proofs_module, "VOTES", 8)
    settings = replace(SETTINGS, fragments=8)
    held, log = Evidence(settings, SimulatedKeys("").verify, PAYLOADS * 8), log_of("abc", settings.empty_log)
    places = [log.of(fragment).position for fragment in range(8)]
    held.observe_vote("b", vote("b", choice(A, 1), places[0]), Lineage(log))
    for place in places[1:]:
        for view in range(1, VOTES_OF_ONE):
            held.observe_vote("c", vote("c", choice(A, view), place), Lineage(log))
    assert held.observe_vote("b", vote("b", choice(B, 1), places[0]), Lineage(log))


def test_votes_are_forgotten_with_time_and_when_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    held, lineage = evidence(), lineage_of(entries=FAULT_AGE + 2)
    statements = held._statements
    held.observe_vote("c", vote("c", choice(A, 1)), HERE)
    assert statements._votes_of.total() == 1
    for peer in "abc":
        held.observe_vote(peer, vote(peer, choice(A, 1), lineage.log.position), lineage)
    assert statements._votes_of.total() == 3, "the first one is too old"
    monkeypatch.setattr(proofs_module, "VOTES", 4)
    before = Position(index=lineage.log.position.index - 1, head=lineage.heads[-2])
    for peer in "abc":
        held.observe_vote(peer, vote(peer, choice(A, 1), before), lineage)
    assert statements._votes_of.total() == 3, "of the position that was heard of first"


def test_averages_and_commitments_of_few_are_remembered() -> None:
    held = evidence()
    rounds = [round_of(view=view) for view in range(proofs_module.ROUNDS + 1)]
    for round in rounds:
        held.observe_average(round, average(b"one", round=round), HERE)
    assert held.observe_average(rounds[0], average(b"two", round=rounds[0]), HERE) == ()
    assert held.observe_average(rounds[-1], average(b"two", round=rounds[-1]), HERE)
    held = evidence()
    for number in range(COMMITMENTS + 1):
        held.observe_commitment(author(number=number), commitment(b"one", author(number=number)), HERE)
    assert held.observe_commitment(author(), commitment(b"two"), HERE) == ()
    last = author(number=COMMITMENTS)
    assert held.observe_commitment(last, commitment(b"two", last), HERE)


# Proofs of others ------------------------------------------------------------------------------------------------
def test_what_is_proven_may_be_named_and_is_shown() -> None:
    proof, held = two_votes(), evidence()
    assert not held.has([proof.fault], HERE)
    assert held.missing_proofs([proof.fault], HERE) == (proof.fault.proof,)
    assert held.observe_proof("b", shown(proof), HERE) == (proof.fault,)
    assert held.observe_proof("b", shown(proof), HERE) == (), "it is known"
    assert held.provable(ABC, HERE, "ab") == (proof.fault,)
    assert held.has([proof.fault], HERE)
    assert held.missing_proofs([proof.fault], HERE) == ()
    assert held.show("a", [proof.fault], ABC.position, 0.0) == (shown(proof),)


def test_members_and_peers_without_a_lease_are_not_named() -> None:
    held = taken(two_votes(), HERE)
    assert held.provable(ABC, HERE, "abc") == ()
    stranger = two_votes("z")
    assert evidence().observe_proof("b", shown(stranger), HERE) == ()
    assert taken(stranger, HERE).provable(ABC, HERE, "ab") == ()


@pytest.mark.parametrize("kind", get_args(Kind))
def test_what_proves_nothing_is_refused(kind: Kind) -> None:
    same = two_commitments().model_copy(update={"second": two_commitments().first})
    with pytest.raises(FalseProofError):
        evidence().observe_proof("b", Proof(position=ABC.position, fault=kind, proof=pack(same)), HERE)


def test_another_fault_than_the_proven_one_is_not_proven() -> None:
    held, fault = taken(two_votes(), HERE), two_votes().fault
    assert not held.has([fault.model_copy(update={"peer": "a"})], HERE)
    assert not held.has([fault.model_copy(update={"kind": "averages"})], HERE)
    assert not held.has([fault, two_votes("a").fault], HERE)
    assert held.has([], HERE)


@pytest.mark.parametrize(
    "position",
    [
        Position(index=ABC.position.index, head=digest_of(b"another run")),
        Position(index=ABC.position.index + 1, head=ABC.position.head),
        Position(index=2**61, head=ABC.position.head),
    ],
)
def test_a_lie_elsewhere_proves_nothing_here_and_who_shows_it_need_not_know(position: Position) -> None:
    proof = two_votes(position=position)
    assert evidence().observe_proof("b", shown(proof), HERE) == ()
    assert not taken(proof, HERE).has([proof.fault], HERE)


@pytest.mark.parametrize("exclusion", [3, 1000])
def test_a_lie_is_named_once(exclusion: int) -> None:
    """While it is recent enough to be named, the peer that was excluded for it still is."""
    log = replace(ABC, exclusion=exclusion)
    window = min(exclusion, FAULT_AGE)
    recent, late = lineage_of(log, window - 1), lineage_of(log, window)
    assert taken(two_votes(), recent).provable(recent.log, recent, "ab")
    assert not taken(two_votes(), late).provable(late.log, late, "ab")
    held = taken(two_votes(), recent)
    assert not held.provable(late.log, late, "ab")
    held = taken(two_votes(), recent)
    assert not held.has([two_votes().fault], late), "it grows old"
    assert not held.has_convicted("c")


def test_a_peer_that_knows_few_heads_judges_as_all_others_once_its_log_has_told_it_the_rest() -> None:
    """Regression: a peer that began in the middle took part in no entry that named a peer for a lie before."""
    whole = lineage_of(entries=5)
    for index, head in enumerate(whole.heads, ABC.position.index):
        lineage, proof = Lineage(whole.log), two_votes(position=Position(index=index, head=head))
        assert taken(proof, whole).has([proof.fault], whole)
        assert taken(proof, lineage).has([proof.fault], lineage) == (index == whole.log.position.index)
        lineage.recall(lineage.known_from, whole.heads)
        assert taken(proof, lineage).has([proof.fault], lineage)


def excluded() -> Lineage:
    """Return a lineage that has excluded c."""
    members = [ABC.expected(peer) for peer in "ab"]
    lineage = Lineage(ABC)
    entry = next_header(ABC, members, faults=[two_votes().fault])
    lineage.append(entry, ABC.append(entry))
    return lineage


def test_who_is_excluded_already_is_not_judged_again() -> None:
    held, lineage, other = taken(two_votes(), HERE), excluded(), two_votes(seed=1)
    assert held.observe_proof("b", shown(other), lineage) == ()
    forged = other.model_copy(update={"second": other.first})
    assert held.observe_proof("b", shown(forged), lineage) == ()
    assert not held.has_convicted("c")


def test_what_an_entry_has_named_can_be_kept_with_it() -> None:
    """The proof is asked for when the entry is applied already."""
    held = taken(two_votes(), HERE)
    excluded()
    assert proofs_behind(held, (two_votes().fault,)) == [True]


def test_a_run_without_exclusions_names_nobody() -> None:
    log = replace(ABC, exclusion=0)
    assert taken(two_votes(), Lineage(log)).provable(log, Lineage(log), "ab") == ()


def test_who_floods_others_with_proofs_fills_no_memory_and_pushes_out_no_named_one() -> None:
    names = [f"liar{number:04}" for number in range(KEPT)]
    log = log_of(["a", "c", *names])
    lineage, held = Lineage(log), evidence()
    proofs = [two_votes("c", log.position, seed) for seed in range(2 * OF_ONE)]
    for proof in proofs:
        held.observe_proof("a", shown(proof), lineage)
        assert held.has([proofs[0].fault, proof.fault], lineage), "what we may have named, and what another one may"
    assert held.provable(log, lineage, "a") == (proofs[0].fault,)
    kept = held.behind([proof.fault for proof in proofs])
    assert [known.fault for known in kept] == [proof.fault for proof in (*proofs[: OF_ONE - 1], proofs[-1])]
    for name in names:
        held.observe_proof(name, shown(two_votes(name, log.position)), lineage)
    assert held.behind([proofs[-1].fault]) == ()
    assert len(held.behind([two_votes(name, log.position).fault for name in names])) == KEPT
    assert held.has([proof.fault for proof in proofs], lineage), "it is proven still"
    assert held.provable(log, lineage, names) == ()
    held.observe_proof("a", shown(proofs[-1]), lineage)
    assert held.behind([proofs[-1].fault]), "shown again, it is kept again"


def test_what_is_proven_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_module, "PROVEN", 3)
    held, proofs = evidence(), [two_votes(seed=seed) for seed in range(5)]
    for proof in proofs:
        held.observe_proof("b", shown(proof), HERE)
    assert [held.has([proof.fault], HERE) for proof in proofs] == [False, False, True, True, True]


def test_the_bytes_of_what_is_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_module, "KEPT_BYTES", 2 * len(pack(two_votes())))
    held = evidence()
    for peer in "abc":
        held.observe_proof("b", shown(two_votes(peer)), HERE)
    assert [known.fault.peer for known in held.behind([two_votes(peer).fault for peer in "abc"])] == ["b", "c"]


def test_only_an_entry_that_closes_its_cycle_names_peers() -> None:
    log = log_of("abc", replace(SETTINGS, fragments=2).empty_log)
    held, lineage = evidence(), Lineage(log)
    proof = two_votes(position=log.position)
    assert held.observe_proof("b", shown(proof), lineage) == (proof.fault,)
    assert held.provable(log.of(0), lineage, "ab") == ()
    assert held.provable(log.of(1), lineage, "ab") == (proof.fault,)


def test_an_entry_names_a_few() -> None:
    peers = [f"p{number}" for number in range(FAULT_LIMIT + 2)]
    log = log_of(["a", *peers])
    lineage, held = Lineage(log), evidence()
    for peer in peers:
        held.observe_proof(peer, shown(two_votes(peer, log.position)), lineage)
    faults = held.provable(log, lineage, "a")
    assert [fault.peer for fault in faults] == peers[:FAULT_LIMIT]
    assert next_header(log, [log.expected("a")], faults=faults).faults == faults


def test_what_costs_too_much_to_show_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    held = taken(two_votes(), HERE)
    monkeypatch.setattr(evidence_module, "SHOWN_BYTES", 2 * len(pack(two_votes())) - 1)
    assert held.provable(ABC, HERE, "a")
    assert not held.provable(ABC, HERE, "ab")
    held.observe_proof("b", shown(two_votes("b")), HERE)
    assert held.provable(ABC, HERE, "a") == (two_votes().fault,), "both together cost too much"


# What liars can cost ---------------------------------------------------------------------------------------------
def forged(seed: int) -> Proof:
    proof = two_votes(seed=seed)
    return shown(proof.model_copy(update={"second": proof.first}))


def test_a_few_proofs_of_each_sender_are_looked_at_in_a_cycle() -> None:
    held = evidence()
    for seed in range(LOOKED_AT):
        held.observe_proof("a", shown(two_votes(seed=seed)), HERE)
        held.observe_proof("a", shown(two_votes()), HERE)  # a known one costs nothing
    assert held.has([two_votes(seed=LOOKED_AT - 1).fault], HERE)
    more, named = two_votes("b", seed=99), two_votes("b", seed=100)
    assert held.observe_proof("a", shown(more), HERE) == ()
    held.missing_proofs([named.fault], HERE)
    assert held.observe_proof("a", shown(named), HERE) == (named.fault,), "a header names it"
    held, later = evidence(), lineage_of(entries=1)
    for seed in range(LOOKED_AT):
        held.observe_proof("a", shown(two_votes(seed=seed)), HERE)
    assert held.observe_proof("a", shown(more), later) == (more.fault,)


def test_after_a_false_proof_only_named_ones_of_its_sender_are_looked_at() -> None:
    held, good = evidence(), two_votes()
    with pytest.raises(FalseProofError):
        held.observe_proof("a", forged(1), HERE)
    assert held.observe_proof("a", forged(2), HERE) == ()
    assert held.observe_proof("a", shown(good), HERE) == ()
    assert not held.has([good.fault], HERE)
    assert held.observe_proof("a", shown(good), HERE) == (good.fault,), "it was named"


def test_a_named_proof_that_is_false_is_looked_at_once() -> None:
    held, false = evidence(), forged(1)
    held.missing_proofs([Fault(peer="c", kind="votes", proof=digest_of(false.proof))], HERE)
    with pytest.raises(FalseProofError):
        held.observe_proof("a", false, HERE)
    assert held.observe_proof("a", false, HERE) == ()


def test_named_proofs_are_waited_for_within_bounds() -> None:
    held = evidence()
    named = [two_votes(seed=seed).fault for seed in range(evidence_module.WANTED + 1)]
    with pytest.raises(FalseProofError):
        held.observe_proof("a", forged(99), HERE)
    held.missing_proofs(named, HERE)
    assert held.observe_proof("a", shown(two_votes(seed=0)), HERE) == ()
    assert held.observe_proof("a", shown(two_votes(seed=1)), HERE) == (named[1],)


def test_proofs_of_an_excluded_sender_are_not_looked_at() -> None:
    lineage, proof = excluded(), two_votes("b", excluded().log.position)
    assert evidence().observe_proof("c", shown(proof), lineage) == ()
    assert evidence().observe_proof("a", shown(proof), lineage) == (proof.fault,)


def test_a_proof_is_shown_once_and_again_after_a_pause_that_doubles() -> None:
    held, faults = taken(two_votes(), HERE), (two_votes().fault,)
    pause, at = SETTINGS.timing.heartbeat_expiry, ABC.position

    def is_shown(now: float, again: bool = True, to: str = "a") -> bool:
        return bool(held.show(to, faults, at, now, again))

    assert is_shown(0.0)
    assert is_shown(0.0, to="b")
    assert not is_shown(100.0, again=False)
    assert not is_shown(pause / 2)
    assert is_shown(pause)
    assert not is_shown(2 * pause)
    assert is_shown(3 * pause)
    assert not is_shown(6 * pause)
    held.missing_proofs((), lineage_of(entries=1))
    assert is_shown(6 * pause, again=False), "in the next cycle as at first"


@pytest.mark.parametrize("kind", get_args(Kind))
def test_no_bytes_of_a_proof_raise_anything_but_the_named_error(kind: Kind) -> None:
    draw, held = random.Random(f"{kind} proofs"), evidence()
    proofs = [pack(two_votes()), pack(two_commitments())]
    for number in range(400):
        lineage = lineage_of(entries=number % 3)
        try:
            held.observe_proof(
                f"p{number}", Proof(position=ABC.position, fault=kind, proof=_noise(draw, proofs)), lineage
            )
        except FalseProofError:
            continue


def _noise(draw: random.Random, proofs: list[bytes]) -> bytes:
    """Return random bytes, a random structure of plain values, or a good proof that is damaged or of another kind."""
    match draw.randrange(3):
        case 0:
            return draw.randbytes(draw.randrange(200))
        case 1:
            packed: bytes = msgpack.packb(_plain(draw, 5))
            return packed
        case _:
            data = bytearray(draw.choice(proofs))
            for _ in range(draw.randrange(4)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            return bytes(data[: draw.choice((len(data), draw.randrange(len(data))))])


def _plain(draw: random.Random, depth: int) -> object:
    match draw.randrange(7 if depth else 5):
        case 0:
            return draw.choice((0, 1, -1, 2**61, 2**63))
        case 1:
            return draw.choice(("", "c", "z" * 200, "\x00"))
        case 2:
            return draw.randbytes(draw.choice((0, 32, 64)))
        case 3:
            return draw.choice((None, True, 1.0, float("nan"), float("inf")))
        case 4:
            return {}
        case _:
            return [_plain(draw, depth - 1) for _ in range(draw.randrange(8))]
