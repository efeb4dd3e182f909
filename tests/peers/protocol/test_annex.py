"""How a proven lie comes into the log: found, shown to the leader, named in a round, checked, and applied."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from peers.log.header import Fault, Header
from peers.log.lineage import Lineage
from peers.presence.heartbeat import PeerState
from peers.protocol.acceptor import Acceptor
from peers.protocol.effects import Apply, Dropped, Note, OpenRound, Trouble
from peers.protocol.events import PayloadFetched, TrainingDone
from peers.protocol.faults import FaultProof, TwoCommitments
from peers.protocol.messages import Abort, Adopt, Begin, Commit, Complete, LeaseGrant, LeaseRequest, Prove, Ready
from peers.protocol.schedule import Schedule
from peers.protocol.states import State
from peers.protocol.witness import JUDGED
from peers.values.chunks import Sum
from peers.values.wire import digest_of, pack
from tests.peers.builders import (
    CONTRIBUTION,
    LOG,
    PAYLOAD,
    STATE,
    TIMING,
    Rig,
    attempt,
    commit,
    commitment,
    commitments,
    complete,
    holders_of,
    holding,
    member,
    of,
    ready,
    round_of,
    sends,
    trained,
)
from tests.peers.protocol.test_docket import proof
from tests.peers.protocol.test_peer import at_second, leading

OTHER = Sum(digest_of(b"other"), 1.0)


def prove(rig: Rig, shown: FaultProof) -> Prove:
    return Prove(position=rig.peer.log.position, fault=shown.kind, proof=pack(shown))


def lie(rig: Rig, peer: str = "c") -> TwoCommitments:
    """What the peer has signed where the rig is."""
    return proof(peer, rig.peer.log.position)


def begin(rig: Rig, faults: tuple[Fault, ...], number: int = 1, members: str = "ab") -> Begin:
    """a begins a round without c, and names faults."""
    at = rig.attempt(number)
    round = round_of(at, [one for one in rig.roster() if one.peer in members]).model_copy(update={"faults": faults})
    return Begin(attempt=at, round=round, seconds=20.0, open=False, commitments=commitments(round))


def annexed(rig: Rig, faults: tuple[Fault, ...], members: str = "ab") -> Header:
    """The entry with these members, whose annex names these."""
    return rig.peer.log.in_state(STATE).next_header(
        [one for one in rig.roster() if one.peer in members], PAYLOAD, faults
    )


# Members -------------------------------------------------------------------------------------------------------
def test_a_member_signs_an_annex_only_when_it_has_seen_what_proves_it() -> None:
    rig = at_second().trained()
    shown = lie(rig)
    faults = (shown.fault,)
    assert not of(rig.hear("a", begin(rig, faults)), OpenRound)
    assert rig.is_in(State.READY)
    rig.hear("a", prove(rig, shown))
    assert of(rig.hear("a", begin(rig, faults)), OpenRound)
    rig.holding()
    (said,) = [message for _, message in sends(rig.effects, Complete)]
    header = annexed(rig, faults)
    assert said == complete(header, rig.attempt(), "b"), "it signs the entry with its annex"
    rig.hear("a", commit(rig.peer.log, header, by="ab"))
    (apply,) = of(rig.effects, Apply)
    assert apply.proofs == (pack(shown),), "which is kept with the entry"
    assert rig.peer.log.excluded.keys() == {"c"}


def test_a_liar_pushes_no_proof_out_by_showing_others_against_itself() -> None:
    """Regression: one more between the leader's proof and its Begin kept a member from the round; and one later, from
    going on with it."""
    rig = at_second().trained()
    named, *others = (proof("c", rig.peer.log.position, seed=seed) for seed in range(80))
    rig.hear("a", prove(rig, named))
    for other in others:
        rig.hear("c", prove(rig, other))
    assert of(rig.hear("a", begin(rig, (named.fault,))), OpenRound)
    rig.hear("c", prove(rig, proof("c", rig.peer.log.position, seed=80)))
    rig.hear("a", begin(rig, (named.fault,)).model_copy(update={"attempt": rig.attempt(2)}))
    assert rig.peer.slot.attempt == rig.attempt(2)


def test_no_round_is_named_after_a_later_attempt() -> None:
    """Regression: a member that was in such a round took part in no other at that place."""
    rig = at_second().trained()
    (dropped,) = of(rig.hear("a", rig.begin(1, name=rig.attempt(1000))), Dropped)
    assert "a later name than the attempt" in dropped.reason
    assert of(rig.hear("a", rig.begin(1)), OpenRound)


def test_a_leader_that_names_somebody_without_proof_is_given_up() -> None:
    rig = at_second().trained()
    fault = Fault(peer="c", kind="averages", proof=bytes(32))
    limit = rig.now + Schedule(TIMING).stall
    while rig.now <= limit:
        assert not rig.peer.presence.distrusted
        rig.hear("a", begin(rig, (fault,)))
        rig.see(state=PeerState.READY, others="a")
        rig.now += TIMING.heartbeat
    rig.hear("a", begin(rig, (fault,)))
    assert rig.peer.presence.distrusted == {"a"}
    assert rig.is_in(State.READY)


def test_what_proves_nothing_costs_whoever_shows_it_its_place() -> None:
    rig = at_second().trained()
    forged = lie(rig).model_copy(update={"second": lie(rig).first})
    (dropped,) = of(rig.hear("a", prove(rig, forged)), Dropped)
    assert (dropped.peer, dropped.what) == ("a", "proof")
    assert rig.peer.presence.standing.barred(rig.now) == {"a"}
    assert rig.peer.presence.distrusted == {"a"}


def looks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whose proofs are looked at from now on."""
    judged: list[str] = []

    def look(kind: str, data: bytes, lineage: Lineage) -> Fault | None:
        judged.append(kind)
        return take(kind, data, lineage)

    docket = rig.peer._course._desk.docket
    take = docket.take
    monkeypatch.setattr(docket, "take", look)
    return judged


def test_nothing_is_looked_at_of_a_sender_that_has_shown_a_false_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each was checked, however many came."""
    rig = at_second().trained()
    judged = looks(rig, monkeypatch)
    for seed in range(3):
        made_up = proof("c", rig.peer.log.position, seed=seed)
        rig.hear("a", prove(rig, made_up.model_copy(update={"second": made_up.first})))
    rig.hear("a", prove(rig, lie(rig)))
    assert len(judged) == 1
    rig.hear("c", prove(rig, lie(rig)))
    rig.hear("a", prove(rig, lie(rig)))
    assert len(judged) == 3, "what is known costs nothing"


def test_of_each_sender_a_few_proofs_are_looked_at_and_those_that_a_leader_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = at_second().trained()
    judged = looks(rig, monkeypatch)
    shown = [proof("c", rig.peer.log.position, seed=seed) for seed in range(JUDGED + 3)]
    *_, named = shown
    for one in shown:
        rig.hear("a", prove(rig, one))
    assert len(judged) == JUDGED
    assert not of(rig.hear("a", begin(rig, (named.fault,))), OpenRound)
    rig.hear("a", prove(rig, named))
    assert of(rig.hear("a", begin(rig, (named.fault,))), OpenRound)


def test_nothing_is_looked_at_of_whoever_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = leading_without("c")
    judged = looks(rig, monkeypatch)
    rig.hear("c", prove(rig, lie(rig, "b")))
    assert not judged
    rig.hear("b", prove(rig, lie(rig, "a")))
    assert judged


def test_whoever_is_shown_to_have_lied_is_barred() -> None:
    rig = at_second().trained()
    told = of(rig.hear("a", prove(rig, lie(rig))), Note)
    assert [note.text for note in told] == ["c is shown to have lied: commitments"]
    assert rig.peer.presence.standing.barred(rig.now) == {"c"}
    assert rig.peer.presence.distrusted == {"c"}, "nor is it a leader"
    assert not of(rig.hear("a", prove(rig, lie(rig))), Note), "it is known"


def test_a_member_shows_its_leader_what_it_knows_now_and_then() -> None:
    rig = at_second().trained()
    rig.hear("c", prove(rig, lie(rig)))
    shown = sends(rig.tick(), Prove)
    assert shown == [("a", prove(rig, lie(rig)))]
    assert not sends(rig.tick(), Prove)
    rig.see(state=PeerState.READY)
    rig.now += TIMING.heartbeat_expiry - 2
    rig.see(state=PeerState.READY)
    assert sends(rig.tick(), Prove) == shown


def test_an_entry_with_an_annex_is_taken_over_only_with_its_proof() -> None:
    rig = at_second().trained()
    header = annexed(rig, (lie(rig).fault,))
    held = holding(header, rig.attempt(), "a")
    adopt = Adopt(attempt=rig.attempt(2), header=header, holders=holders_of(held, "ac"), seconds=20.0)
    rig.hear("a", adopt)
    assert rig.is_in(State.READY)
    rig.hear("a", prove(rig, lie(rig)))
    rig.hear("a", adopt)
    assert rig.is_in(State.AVERAGING)


@pytest.mark.parametrize("is_known", [True, False])
def test_what_too_few_have_signed_is_followed_only_with_the_proof_of_its_annex(is_known: bool) -> None:
    rig = at_second()
    before = rig.peer.log
    header = annexed(rig, (lie(rig).fault,), members="a")
    if is_known:
        rig.hear("a", prove(rig, lie(rig)))
    rig.see(before.append(header), others="a")
    rig.now += 2 * TIMING.heartbeat_expiry
    rig.see(before.append(header), others="a")
    minority = attempt(before).model_copy(update={"alone": True})
    rig.hear("a", commit(before, header, minority, by="a"))
    assert (rig.peer.replica.replaying == header) == is_known


# Leaders -------------------------------------------------------------------------------------------------------
def gathering() -> Rig:
    """a leads, and is ready; b and c are not yet."""
    rig = leading()
    rig.hear("b", ready(rig.peer.log, "b", last_attempt=1))
    rig.hear("b", ready(rig.peer.log, "b", last_attempt=1))
    assert rig.is_in(State.READY)
    return rig


def test_a_leader_names_what_is_shown_to_it_and_shows_it_to_all() -> None:
    rig = gathering()
    rig.hear("b", prove(rig, lie(rig)))
    said = rig.hear("c", ready(rig.peer.log, "c", last_attempt=2))
    assert not sends(said, Begin), "it is barred"
    rig.hear("b", ready(rig.peer.log, "b", last_attempt=2))
    effects = [*rig.effects, *rig.tick()]
    ((to, began),) = sends(effects, Begin)
    assert to == "b"
    assert began.round.faults == (lie(rig).fault,)
    assert began.round.peers == ("a", "b")
    assert sends(effects, Prove) == [("b", prove(rig, lie(rig)))], "before it is to sign that"
    assert rig.is_in(State.AVERAGING), "it is convinced itself"


def test_a_leader_shows_a_proof_again_only_to_a_member_that_lacks_it_and_ever_more_rarely() -> None:
    """Regression: each repeated Begin had all proofs beside it, of up to a megabyte."""
    rig = gathering()
    rig.hear("b", prove(rig, lie(rig)))
    rig.hear("b", ready(rig.peer.log, "b", last_attempt=2))
    rig.tick()
    shown = list[float]()
    for is_lacking in (False, True):
        said = ready(rig.peer.log, "b", last_attempt=2, unproven=(lie(rig).fault.proof,) * is_lacking)
        for _ in range(10):
            told = rig.hear("b", said, TIMING.resend)
            assert sends(told, Begin)
            shown += [rig.now] * len(sends(told, Prove))
            assert is_lacking or not shown
    pauses = [later - earlier for earlier, later in pairwise(shown)]
    assert pauses == [2 * TIMING.resend, 4 * TIMING.resend]


def test_a_member_says_which_proofs_it_lacks_of_what_its_leader_begins() -> None:
    rig = at_second().trained()
    first, second = (proof("c", rig.peer.log.position, seed=seed) for seed in range(2))
    ((_, said),) = sends(rig.effects, Ready)
    assert said.unproven == ()
    rig.hear("a", begin(rig, (first.fault,)))
    assert [one.unproven for _, one in sends(rig.tick(), Ready)] == [(first.fault.proof,)]
    rig.hear("a", begin(rig, (second.fault,)))
    rig.hear("a", prove(rig, first))
    assert [one.unproven for _, one in sends(rig.tick(), Ready)] == [(second.fault.proof,)]
    rig.hear("a", prove(rig, second))
    assert [one.unproven for _, one in sends(rig.tick(), Ready)] == [()]


def test_two_commitments_for_one_attempt_are_a_lie() -> None:
    rig = gathering()
    log = rig.peer.log
    rig.hear("c", ready(log, "c", last_attempt=2))
    second = commitment("c", 0, log.position, OTHER, after=2)
    rig.hear("c", ready(log, "c", last_attempt=2, commitment=second))
    assert [note.text for note in of(rig.effects, Note)] == ["c is shown to have lied: commitments"]
    rig.hear("b", ready(log, "b", last_attempt=2))
    began = [message for _, message in sends([*rig.effects, *rig.tick()], Begin)]
    assert [fault.peer for one in began for fault in one.round.faults] == ["c"]
    assert all(one.round.peers == ("a", "b") for one in began)


def test_a_commitment_that_nobody_signed_hides_no_two_that_somebody_did() -> None:
    """Regression: whichever came first was compared with all others."""
    rig = gathering()
    log = rig.peer.log
    good = [commitment("c", 0, log.position, root, after=2) for root in (CONTRIBUTION, OTHER)]
    for said in (good[0].model_copy(update={"signature": bytes(64)}), *good):
        rig.hear("c", ready(log, "c", last_attempt=2, commitment=said))
    assert [note.text for note in of(rig.effects, Note)][-1:] == ["c is shown to have lied: commitments"]


@pytest.mark.parametrize("is_other", [True, False])
def test_two_entries_signed_in_one_attempt_are_a_lie(is_other: bool) -> None:
    rig = leading().holding()
    rig.hear("c", rig.complete("c"))
    rig.hear("c", rig.complete("c", payload=digest_of(b"another") if is_other else PAYLOAD))
    told = [note.text for note in of(rig.effects, Note)]
    assert told == ["c is shown to have lied: votes"] * is_other


@pytest.mark.parametrize("junk", ["1 first", "9 first", "9 between", "1 between"])
def test_an_entry_that_nobody_signed_hides_no_two_that_somebody_did(junk: str) -> None:
    """Regression: whatever a member said first was compared with all else; and what it said of another attempt took
    its place."""
    rig = leading().holding()
    unsigned = rig.complete("c", int(junk[0])).model_copy(update={"signature": bytes(64)})
    signed = [rig.complete("c", payload=payload) for payload in (PAYLOAD, digest_of(b"another"))]
    for said in [unsigned, *signed] if "first" in junk else [signed[0], unsigned, signed[1]]:
        rig.hear("c", said)
    assert [note.text for note in of(rig.effects, Note)] == ["c is shown to have lied: votes"]


def test_what_a_member_signed_for_another_one_is_compared_with_what_it_said_to_us() -> None:
    """In an open attempt c tells b of another entry than the leader, which commits what c told it."""
    rig = at_second().trained().averaging().holding()
    rig.hear("c", rig.complete("c", payload=digest_of(b"another")))
    assert not of(rig.effects, Note), "it is its first word"
    rig.hear("a", rig.commit(by="ac"))
    assert "c is shown to have lied: votes" in [note.text for note in of(rig.effects, Note)]
    assert rig.is_in(State.APPLYING)
    assert rig.peer.presence.standing.barred(rig.now) == {"c"}
    rig.applied()
    rig.do(TrainingDone(trained(rig.lease)))
    assert [to for to, _ in sends(rig.effects, Prove)] == ["a"], "whose next entry may name it"


@pytest.mark.parametrize("what", ["the same", "in another attempt", "a forged word", "a forged certificate"])
def test_what_does_not_contradict_a_certificate_proves_nothing(what: str) -> None:
    rig = at_second().trained().averaging().holding()
    said = rig.complete("c", 7 if "attempt" in what else 1, PAYLOAD if what == "the same" else digest_of(b"another"))
    rig.hear("c", said.model_copy(update={"signature": bytes(64)}) if "word" in what else said)
    made = rig.commit(by="ac")
    if "certificate" in what:
        assert made.certificate is not None
        votes = tuple(vote.model_copy(update={"signature": bytes(64)}) for vote in made.certificate.votes)
        made = made.model_copy(update={"certificate": made.certificate.model_copy(update={"votes": votes})})
    rig.hear("a", made)
    assert not [note for note in of(rig.effects, Note) if "lied" in note.text]
    assert not rig.peer.presence.standing.barred(rig.now)


@pytest.mark.parametrize(
    "changes",
    [
        {"last_attempt": 3},
        {"incarnation": 7, "last_attempt": 2},
        {"last_attempt": 2, "rate": 7},
    ],
)
def test_who_commits_anew_for_a_later_attempt_or_as_another_start_is_honest(changes: dict[str, Any]) -> None:
    rig = gathering()
    rig.hear("c", ready(rig.peer.log, "c", last_attempt=2))
    rig.hear("c", ready(rig.peer.log, "c", **changes))
    assert not of(rig.effects, Note)
    assert not rig.peer.presence.standing.barred(rig.now)


# The honest never say two things -------------------------------------------------------------------------------
def test_who_trains_anew_at_a_place_commits_to_that_for_a_later_attempt() -> None:
    acceptor = Acceptor()
    numbers = []
    for root in (CONTRIBUTION, CONTRIBUTION, OTHER, CONTRIBUTION):
        acceptor.commit(root)
        numbers.append(acceptor.last_attempt)
    assert numbers == [0, 0, 1, 2]


def test_ready_never_has_two_commitments_for_one_attempt() -> None:
    rig = at_second().trained()
    ((_, first),) = sends(rig.effects, Ready)
    rig.peer._course.catching_up.drop_work()
    rig.tick()
    rig.do(TrainingDone(replace(trained(rig.lease), contribution=OTHER)))
    ((_, second),) = sends(rig.effects, Ready)
    assert second.commitment.root != first.commitment.root
    assert second.last_attempt > first.last_attempt


def test_nobody_comes_back_to_a_round_that_it_has_left_for_another() -> None:
    """Else a leader could have an honest member average a chunk twice, of different blocks, and sign both."""
    rig = at_second().trained().averaging()
    first = rig.peer.exchange
    assert first is not None
    assert sends(rig.hear("a", Abort(attempt=rig.attempt(), reason="")), Ready)
    rig.hear("a", rig.begin(2))
    assert rig.peer.exchange is not first
    second = rig.peer.exchange
    assert of(rig.hear("a", rig.begin(3, name=first.name)), Dropped)
    assert rig.peer.exchange is second


def test_nor_does_one_that_contributes_nothing_and_commits_to_nothing() -> None:
    acceptor, rounds = Acceptor(), [round_of(attempt(LOG, number), [member("a", 0, 8)]) for number in (2, 1, 2, 3)]
    assert [acceptor.may_enter(round) for round in rounds] == [True, False, False, True]


# Who is excluded -----------------------------------------------------------------------------------------------
def test_who_is_excluded_gets_no_lease_and_is_in_no_round() -> None:
    rig = leading_without("c")
    log = rig.peer.log
    request = LeaseRequest(position=log.position, state_digest=STATE, relayed=(), unreached=())
    assert not sends(rig.hear("c", request), LeaseGrant)
    assert not rig.hear("c", ready(log, "c"))
    assert sends(rig.hear("z", request), LeaseGrant)


def leading_without(accused: str) -> Rig:
    """a leads after an entry that excludes one of the others."""
    rig = gathering()
    rig.hear("b", prove(rig, lie(rig, accused)))
    rig.hear("b", ready(rig.peer.log, "b", last_attempt=2))
    rig.tick()
    rig.holding()
    rig.hear("b", complete(annexed(rig, (lie(rig, accused).fault,)), rig.attempt(3), "b"))
    rig.applied()
    assert rig.peer.log.excluded.keys() == {accused}
    rig.see(others="bcz", state=PeerState.READY)
    return rig


def test_who_is_excluded_is_told_so_and_waits() -> None:
    rig = at_second()
    header = annexed(rig, (lie(rig, "b").fault,), members="ac")
    after = rig.peer.log.append(header)
    rig.see(after)
    rig.hear("a", Commit(header=header, certificate=commit(rig.peer.log, header, by="ac").certificate))
    rig.do(PayloadFetched(header))
    rig.step(header)
    assert rig.peer.log.excluded.keys() == {"b"}
    told = list[Trouble]()
    for _ in range(20):
        rig.see(after)
        told += of(rig.effects, Trouble) + of(rig.tick(), Trouble)
        assert not sends(rig.effects, Ready)
    (trouble,) = told
    assert "excludes it for its next 1000 outer steps" in trouble.reason
    assert "join from a sound machine with a new identity" in trouble.reason
    assert not sends(rig.tick(5.0), LeaseRequest)
