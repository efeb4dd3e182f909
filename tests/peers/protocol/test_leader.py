"""The leader of a view: when it begins, what it proposes, and what it does when something does not come (R4, R7)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from peers.log.certificate import Ballot, Phase
from peers.log.header import Header
from peers.log.settings import RunSettings
from peers.messages.commitment import Norms
from peers.messages.messages import Begin, Certified, Part, Proof, Propose, Ready
from peers.messages.rounds import Round
from peers.presence.heartbeat import PeerState
from peers.protocol.effects import Send
from peers.protocol.leader import AGAIN
from peers.protocol.pacemaker import death
from peers.protocol.parts import Reducers
from peers.protocol.voting import Refusal
from peers.values.wire import digest_of
from tests.peers.builders import Rig, at_second, averaged, certified, choice, of, ready, sends, two_votes, vote
from tests.peers.logs import SETTINGS, TIMING, TOKENS


def leading(settings: RunSettings = SETTINGS) -> Rig:
    """b leads the second entry, and is ready itself."""
    rig = at_second(settings).trained()
    assert rig.peer.round.is_led_by_us
    rig.see(state=PeerState.READY)
    return rig


def leading_six() -> Rig:
    """b leads the second entry of a to f, four of whom are a quorum."""
    rig = Rig("b", "acdef").joined().trained().exchanging("abcdef").whole()
    log, header = rig.log, rig.next_header("abcdef")
    rig.hear("a", certified(log, header, Phase.PREPARE, "acde"))
    for name in "acde":
        rig.hear(name, vote(name, log, choice(header, Phase.COMMIT)))
    rig.applied().trained()
    rig.see(state=PeerState.READY)
    return rig


def begun_without_f(rig: Rig, silence: int, hearing: str = "") -> Round:
    """Let so much time pass without f, and return the round of the others. Some of them hear f."""
    begins: list[tuple[str, Begin]] = []
    for _ in range(silence):
        rig.see(others="acde", state=PeerState.READY)
        for name in "acde":
            named = ("f",) if name in hearing else ()
            begins += sends(says_ready(rig, name, named=named).effects, Begin)
        begins += sends(rig.tick(), Begin)
    return begins[-1][1].round


def says_ready(rig: Rig, names: str = "ac", **changes: Any) -> Rig:
    for name in names:
        rig.hear(name, ready(rig.log, name, **changes))
    return rig


def begun(rig: Rig, names: str = "ac") -> Round:
    """Have these say Ready, and return the round that begins."""
    says_ready(rig, names)
    told = sends(rig.effects, Begin)
    assert sorted(to for to, _ in told) == sorted(names)
    round = told[0][1].round
    assert isinstance(round, Round)
    return round


def tells_part(rig: Rig, round: Round, names: str = "abc", absent: str = "") -> list[tuple[str, Propose]]:
    """Have these reducers tell the leader what they have averaged. Returns the proposals."""
    proposed: list[tuple[str, Propose]] = []
    for name in names:
        chunks = [chunk for chunk in range(round.chunks) if Reducers(round).of(chunk)[0] == name]
        averages = tuple(averaged(round, name, chunk, absent=absent if name not in absent else "") for chunk in chunks)
        proposed += sends(rig.hear(name, Part(round=round.name, averages=averages)), Propose)
    return proposed


def proposed(rig: Rig, absent: str = "") -> Propose:
    told = tells_part(rig, begun(rig), absent=absent)
    assert {to for to, _ in told} >= {"a", "c"}
    return told[-1][1]


# Begin ----------------------------------------------------------------------------------------------------------
def test_it_begins_as_soon_as_all_that_are_expected_are_ready() -> None:
    rig = leading()
    assert not sends(says_ready(rig, "a").effects, Begin), "c is at work, and not too late"
    told = sends(says_ready(rig, "c").effects, Begin)
    assert sorted(to for to, _ in told) == ["a", "c"]
    assert [member.peer for member in told[0][1].round.roster] == ["a", "b", "c"]


def test_it_waits_for_those_who_are_late_until_the_grace_is_over() -> None:
    rig = says_ready(leading(), "a")
    effects = []
    for _ in range(int(rig.peer.settings.timing.grace) + 3):
        effects += says_ready(rig, "a").effects + rig.see(state=PeerState.READY) + rig.tick()
    (told,) = {message.round.peers for _, message in sends(effects, Begin)}
    assert told == ("a", "b")


def test_fewer_than_a_quorum_begin_nothing() -> None:
    rig = leading()
    assert not sends(rig.waits(60, PeerState.TRAINING), Begin)


def test_those_who_are_ready_in_another_view_are_not_counted() -> None:
    rig = leading()
    says_ready(rig, "ac", view=3)
    assert not sends(rig.effects, Begin)


def test_r3_in_large_rounds_who_votes_is_told_the_norms_and_who_does_nothing_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A voter without them could not tell an average that is too long. One on probation neither averages nor votes."""
    monkeypatch.setattr("peers.protocol.contributions.FEW", 3)
    rig = leading(replace(SETTINGS, probation=1))
    rig.see(others="d", state=PeerState.READY)
    says_ready(rig, "d", samples=rig.log.grants[0])
    says_ready(rig, "a", tokens=0, commitment=None)
    told = dict(sends(says_ready(rig, "c").effects, Begin))
    assert {peer: len(begin.commitments) for peer, begin in told.items()} == {"a": 0, "c": 2, "d": 0}
    assert (told["a"].norms, told["d"].norms) == (Norms.of(told["c"].commitments), None)


def test_a_member_that_has_not_heard_of_the_round_is_told_again() -> None:
    rig = leading()
    round = begun(rig)
    assert [to for to, _ in sends(says_ready(rig, "a").effects, Begin)] == ["a"]
    assert not sends(says_ready(rig, "a", round=round.name, terms=round.terms).effects, Begin)


# Liars (R9) ----------------------------------------------------------------------------------------------------------
def convinced(rig: Rig, liar: str = "c") -> Rig:
    for lie in two_votes(liar, rig.log):
        rig.hear(liar, lie)
    return rig


def test_r9_a_peer_that_is_proven_to_lie_is_in_no_round_and_the_header_excludes_it() -> None:
    """Each member is shown the proof before the proposal, once; and again if it says that it lacks it."""
    rig = convinced(leading())
    round = sends(says_ready(rig, "a").effects, Begin)[-1][1].round
    assert round.peers == ("a", "b"), "and the liar is not waited for"
    says_ready(rig, "c")
    tells_part(rig, round, "ab")
    to_a = [message for to, message in sends(rig.effects, Proof) + sends(rig.effects, Propose) if to == "a"]
    proof, propose = to_a
    (fault,) = propose.header.faults
    assert (fault.peer, fault.kind, proof.fault) == ("c", "votes", "votes")
    assert digest_of(proof.proof) == fault.proof
    assert [exclusion.peer for exclusion in propose.header.excluded] == ["c"]
    kinds = [type(effect.message) for effect in of(rig.effects, Send) if effect.to == "a"]
    assert kinds.index(Proof) < kinds.index(Propose)
    rig.now += 10 * TIMING.resend
    assert sends(says_ready(rig, "a", round=round.name, unproven=(fault.proof,)).effects, Proof)


def test_r9_a_proof_that_a_member_shows_convicts_as_well() -> None:
    rig = convinced(leading())
    faults = rig.peer._context.evidence.provable(rig.log, rig.peer.lineage, "ab")
    (known,) = rig.peer._context.evidence.behind(faults)
    other = leading()
    other.hear("a", Proof(position=other.log.position, fault="votes", proof=known.data))
    assert sends(says_ready(other, "a").effects, Begin)[-1][1].round.peers == ("a", "b")


# Parts ----------------------------------------------------------------------------------------------------------
def test_it_proposes_when_all_parts_are_here() -> None:
    rig = leading()
    round = begun(rig)
    assert not tells_part(rig, round, "ab")
    told = tells_part(rig, round, "c")
    assert {to for to, _ in told} >= {"a", "c"}
    propose = told[0][1]
    assert (propose.ballot, propose.round, propose.justify) == (round.name.ballot, round.name, None)
    assert (propose.header.leader, propose.header.peers) == ("b", ("a", "b", "c"))


def test_who_is_absent_from_chunks_counts_for_less() -> None:
    header = proposed(leading(), absent="a").header
    tokens = {member.peer: member.tokens for member in header.roster}
    assert tokens == {"a": TOKENS * 2 // 6, "b": TOKENS, "c": TOKENS}, "its own two chunks have its blocks"


def test_a_part_that_does_not_come_in_time_gets_heirs_at_most_twice() -> None:
    rig = leading()
    round = begun(rig)
    tells_part(rig, round, "ab")
    told: list[Begin] = []
    for _ in range(100):
        says_ready(rig, "ac", round=round.name, terms=round.terms)
        rig.see(state=PeerState.AVERAGING)
        told += [message for to, message in sends(rig.tick(), Begin) if to == "a"]
    heirs = [message.heirs for message in told if message.heirs]
    assert dict(heirs[0]).keys() == {"c"}
    assert {message.round for message in told} == {round}, "the same round goes on"
    assert len({message.ballot.attempt for message in told}) <= 2


def test_a_reducer_that_dies_gets_an_heir_at_once() -> None:
    rig = leading()
    round = begun(rig)
    tells_part(rig, round, "ab")
    effects = []
    for _ in range(int(TIMING.heartbeat_expiry) + 3):
        says_ready(rig, "a", round=round.name, terms=round.terms)
        effects += rig.see(others="a", state=PeerState.AVERAGING) + rig.tick()
    assert any(message.heirs for _, message in sends(effects, Begin))


# Proposals ------------------------------------------------------------------------------------------------------
def header_of(rig: Rig) -> Header:
    return rig.next_header("abc", leader="a")


def test_what_was_prepared_is_proposed_again_and_needs_no_exchange() -> None:
    rig = leading()
    lock = certified(rig.log, header_of(rig), Phase.PREPARE, "ac", Ballot(view=0, attempt=1))
    told = sends(says_ready(rig, "a", lock=lock).effects, Propose)
    assert {to for to, _ in told} == {"a", "c"}, "a and we are a quorum; c is here, too"
    propose = told[0][1]
    assert (propose.header, propose.justify) == (lock.header, lock.certificate)
    assert not sends(rig.effects, Begin)


def test_a_lock_that_proves_nothing_is_no_lock() -> None:
    rig = leading()
    lock = certified(rig.log, header_of(rig), Phase.PREPARE, "ac")
    assert lock.certificate is not None
    forged = lock.certificate.model_copy(update={"signers": lock.certificate.signers[:1]})
    says_ready(rig, "ac", lock=lock.model_copy(update={"certificate": forged}))
    assert sends(rig.effects, Begin)


@pytest.mark.parametrize("ballot", [Ballot(view=1, attempt=1), Ballot(view=0, attempt=2**61)], ids=str)
def test_r4_a_lock_that_no_ballot_of_the_view_can_take_over_is_passed_over(ballot: Ballot) -> None:
    """A minority's may be made by one peer alone; each proposal of it would be refused (R5)."""
    rig = leading()
    lock = certified(rig.log, header_of(rig), Phase.PREPARE, "ac", ballot)
    says_ready(rig, "ac", lock=lock)
    assert not sends(rig.effects, Propose)
    assert sends(rig.effects, Begin)


def test_a_false_lock_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have a hundred signatures, and is shown in each Ready."""
    rig = leading()
    lock = certified(rig.log, header_of(rig), Phase.PREPARE, "ac")
    assert lock.certificate is not None
    forged = lock.certificate.model_copy(update={"signers": lock.certificate.signers[:1]})
    checked: list[Certified] = []
    monkeypatch.setattr(rig.peer.round.voter, "is_prepared", checked.append)
    for _ in range(3):
        says_ready(rig, "a", lock=lock.model_copy(update={"certificate": forged}))
        rig.tick()
    assert len(checked) == 1


def test_a_member_that_says_ready_again_and_again_is_told_of_the_round_once_in_a_moment() -> None:
    """Begin may be a hundred times as long as Ready."""
    rig = leading()
    begun(rig)
    told = [len(sends(says_ready(rig, "a").effects, Begin)) for _ in range(5)]
    assert told == [1, 0, 0, 0, 0]
    rig.now += TIMING.resend
    assert sends(says_ready(rig, "a").effects, Begin)


def test_a_lock_that_comes_late_takes_the_place_of_our_proposal() -> None:
    rig = leading()
    first = proposed(rig)
    lock = certified(rig.log, header_of(rig), Phase.PREPARE, "ac", Ballot(view=0, attempt=9))
    rig.now += TIMING.resend
    told = sends(says_ready(rig, "a", lock=lock).effects, Propose)
    again = told[-1][1]
    assert again.header == lock.header != first.header
    assert first.ballot < again.ballot


def test_a_voter_that_has_voted_in_a_newer_ballot_gets_a_newer_one() -> None:
    rig = leading()
    first = proposed(rig)
    rig.now += TIMING.resend
    told = sends(says_ready(rig, "a", refused=first.ballot, reason=Refusal.OLD_BALLOT.value).effects, Propose)
    assert told[-1][1].header == first.header
    assert first.ballot < told[-1][1].ballot


@pytest.mark.parametrize("beyond", [-0.5, 0.5])
def test_r12_a_leader_calls_a_voter_gone_only_after_a_deaths_time(beyond: float) -> None:
    """It is more patient than its members, so that they have noticed, too, when they are asked to agree."""
    rig = leading()
    rig.waits(int(death(TIMING)) - 1, PeerState.READY, "a")
    rig.tick(1.0 + beyond)
    header = tells_part(rig, begun(rig, "a"), "ab")[-1][1].header
    assert rig.log.gone_in(header) == (("c",) if beyond > 0 else ())


def test_r12_a_voter_that_so_many_hear_that_the_others_are_no_quorum_is_not_gone() -> None:
    rig = leading_six()
    round = begun_without_f(rig, 200, hearing="acd")
    first = tells_part(rig, round, "abcde")[-1][1]
    assert rig.log.gone_in(first.header) == ()


def test_r12_a_voter_whom_so_few_hear_that_the_rest_are_a_quorum_is_gone_all_the_same() -> None:
    """Else one liar would keep the dead for ever."""
    rig = leading()
    rig.waits(int(death(TIMING)) + 1, PeerState.READY, "a")
    round = begun(rig, "a")
    seat = rig.peer.round.leader
    assert seat._obstacles_to_remove({"a": ("c",)}) == {"c"}, "b alone is no quorum of three"
    says_ready(rig, "c", round=round.name)
    assert seat._obstacles_to_remove({"a": ("c",)}) == set(), "b and c are"


def test_r4_averages_that_keep_most_members_from_voting_are_made_by_an_heir() -> None:
    """The leader itself may have them, or be in no round: a reducer with a thin link gives them to few."""
    rig = leading()
    first = proposed(rig)
    name = first.round
    assert name is not None
    rig.whole().now += TIMING.round_timeout
    refused = {"round": name, "refused": first.ballot, "reason": Refusal.NO_PAYLOAD.value, "lacking": ("c",)}
    assert not sends(says_ready(rig, "a", **refused).effects, Begin), "one of three does not matter"
    again = sends(says_ready(rig, "c", **refused).effects + rig.tick(), Begin)
    assert {to for to, _ in again} == {"a", "c"}
    (heir,) = {begin.heirs for _, begin in again}
    assert [reducer for reducer, _ in heir] == ["c"]
    assert rig.peer._context.experience.undealt.at(rig.log.position.index) == {"c"}


def test_r5_a_round_that_comes_to_less_than_half_is_begun_anew_with_other_reducers() -> None:
    """A reducer that signs that all others were absent gains nothing."""
    rig = leading()
    rig.peer._context.experience.undealt.note("ac", rig.log.position.index)
    round = begun(rig)
    assert [share.chunks for share in round.shares] == [0, 6, 0]
    assert not tells_part(rig, round, absent="ac")
    told = sends(says_ready(rig, "ac").effects + rig.tick(), Begin)
    again = told[-1][1].round
    assert again.name.ballot > round.name.ballot
    assert [share.chunks for share in again.shares] == [2, 2, 2], "none is better than the others"


def test_r5_a_newcomer_whom_too_many_do_not_hear_is_in_no_further_round() -> None:
    """a and c refuse what they are asked, and the leader alone is no quorum. d stays ready, and is not waited for."""
    rig = leading()
    rig.see(others="d", state=PeerState.READY)
    says_ready(rig, "d", samples=rig.log.grants[0])
    round = sends(says_ready(rig, "ac").effects, Begin)[-1][1].round
    assert round.peers == ("a", "b", "c", "d")
    first = tells_part(rig, round, "abcd")[-1][1]
    rig.see(state=PeerState.READY, others="acd")
    rig.now += AGAIN * TIMING.heartbeat
    refused = {"round": round.name, "refused": first.ballot, "reason": Refusal.STRANGER.value, "named": ("d", "c")}
    assert not sends(says_ready(rig, "a", **refused).effects, Begin), "b and c may still agree"
    says_ready(rig, "c", **refused)
    told = sends(rig.effects + rig.tick(), Begin)
    assert {begin.round.peers for _, begin in told} == {("a", "b", "c")}, "c has its say anyway"


def test_a_member_that_says_nothing_to_a_proposal_is_asked_again() -> None:
    rig = leading()
    first = proposed(rig)
    name = first.round
    assert not sends(says_ready(rig, "a", round=name).effects, Propose), "a moment ago it was"
    rig.now += 3 * TIMING.resend
    assert sends(says_ready(rig, "a", round=name).effects, Propose) == [("a", first)]
    rig.now += 3 * TIMING.resend
    waits = ready(rig.log, "a", round=name, refused=first.ballot, reason=Refusal.NO_PAYLOAD.value)
    assert not sends(rig.hear("a", waits), Propose), "it waits for the payload"


def test_when_it_is_prepared_nothing_is_proposed_any_more() -> None:
    rig = leading()
    first = proposed(rig)
    for name in "ac":
        rig.hear(name, vote(name, rig.log, first.choice))
    rig.now += 10 * TIMING.resend
    says_ready(rig, "a", refused=first.ballot, reason=Refusal.NOT_GONE.value)
    assert not [one for _, one in sends(rig.effects, Propose) if one.ballot != first.ballot]
    assert rig.peer.round.voter.prepared is not None


def test_a_straggler_is_told_what_was_prepared() -> None:
    rig = leading()
    first = proposed(rig)
    for name in "ac":
        rig.hear(name, vote(name, rig.log, first.choice))
    ((to, shown),) = sends(rig.hear("a", vote("a", rig.log, first.choice)), Certified)
    assert (to, shown.header) == ("a", first.header)


def test_a_quorum_of_votes_2_makes_the_entry_though_its_own_exchange_lags_behind() -> None:
    rig = leading()
    first = proposed(rig)
    for phase in Phase:
        for name in "ac":
            voted = choice(first.header, phase)
            rig.hear(name, vote(name, rig.log, voted))
    assert rig.peer.round.is_decided


def test_when_most_are_in_a_later_view_it_leads_no_more() -> None:
    rig = leading()
    begun(rig)
    rig.see(state=PeerState.READY, view=1)
    rig.tick()
    assert rig.peer.round.led_by == "c"
    assert not sends(says_ready(rig, "ac", view=1).effects, Begin)


def test_ready_is_said_to_itself_too() -> None:
    rig = at_second().trained()
    assert not sends(rig.effects, Ready), "it came straight back"
    assert rig.peer.round.leader.readiness.of(0).keys() == {"b"}
