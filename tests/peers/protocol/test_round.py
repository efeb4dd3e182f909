"""One member at one position: what it takes part in (R3), votes for (R5, R6), and does with what is decided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from peers.audit.evidence import Evidence
from peers.log.certificate import Ballot, Group, Phase
from peers.log.header import MEMBER_LIMIT, NO_PAYLOAD, Member
from peers.messages.averages import Origin
from peers.messages.commitment import Norms, digest_of_all
from peers.messages.messages import Certified, Part, Proof, Propose, Ready, Vote
from peers.messages.rounds import Round, Share
from peers.presence.heartbeat import PeerState
from peers.presence.presence import Presence
from peers.protocol.effects import Apply, Dropped, FetchPayload, OpenRound
from peers.protocol.events import Applied, Captured, Digested, PayloadFetched, PayloadNotFetched, ReducedArrived
from peers.protocol.own_work import Objection, OwnWork
from peers.protocol.pacemaker import death
from peers.protocol.round import STALLED, RoundState
from peers.protocol.states import State
from peers.protocol.trainer import Trainer
from peers.protocol.voting import Refusal
from peers.values.wire import digest_of
from peers.values.workload import Trained
from tests.peers.builders import (
    CONTRIBUTION,
    FIRST,
    PAYLOADS,
    SIZE,
    Rig,
    ahead,
    at_second,
    begin_of,
    certified,
    choice,
    commitment,
    context,
    follower_at_second,
    of,
    propose,
    roster,
    round_of,
    sends,
    trained,
    two_votes,
    vote,
)
from tests.peers.logs import PAYLOAD, SETTINGS, STATE, TIMING, TOKENS, first_log, next_header
from tests.simulator.simulated_keys import SimulatedKeys

SECOND = Ballot(view=0, attempt=2)


def ready_at_second() -> Rig:
    """b is ready with its second lease. It leads itself: so c leads view 1."""
    return follower_at_second().trained()


def whole() -> Rig:
    """All of the round's averages are here; nothing is proposed."""
    return ready_at_second().exchanging().whole()


def proposal(rig: Rig, **changes: Any) -> Propose:
    assert rig.peer.exchange is not None
    fields: dict[str, Any] = {"round": rig.peer.exchange.round, "marks": rig.marks}
    header = changes.pop("header", None) or rig.next_header()
    return propose(header, **(fields | changes))


def votes(rig: Rig, phase: Phase) -> list[tuple[str, Vote]]:
    return [(to, said) for to, said in sends(rig.effects, Vote) if said.choice.phase is phase]


def told(rig: Rig) -> Ready:
    """Return what the leader is told at the next opportunity."""
    for _ in range(3):
        found = sends(rig.tick(), Ready)
        if found:
            said: Ready = found[-1][1]
            return said
    raise AssertionError("nothing was said")


def test_r17_a_round_may_count_nothing_of_a_member_on_probation() -> None:
    """It trains and takes part; its round has it without tokens, unless all members are new."""
    log = replace(first_log(replace(SETTINGS, probation=2).empty_log), probation=2)
    here = context("d", replace(SETTINGS, probation=2))
    presence = Presence("d", 10.0, 40.0, 0.0, here.is_farewell)
    work = OwnWork(here, presence, Trainer(here), log)
    work.make(trained(log.grants[0]))
    mine, others = work.member(), roster(log)
    for members, is_taken in (((*others, mine.model_copy(update={"tokens": 0, "samples": ()})), True), (others, False)):
        shares = tuple(Share(member=member, chunks=2) for member in members)
        assert work.is_taken_by(Round(name=round_of(log).name, shares=shares)) is is_taken
    assert log.is_on_probation("d")


# Ready ----------------------------------------------------------------------------------------------------------
def test_the_leader_of_the_view_is_told_again_and_again() -> None:
    rig = ready_at_second()
    ((to, said),) = sends(rig.effects, Ready)
    assert (to, said.view, said.round, said.lock) == ("b", 0, None, None)
    assert not sends(rig.tick(0.1), Ready), "not at every event"
    assert sends(rig.tick(TIMING.resend), Ready) == [("b", said)]


def test_a_leader_that_is_not_heard_is_passed_over() -> None:
    rig = ready_at_second()
    effects = rig.waits(20, others="a")
    assert ("a", 2) in {(to, said.view) for to, said in sends(effects, Ready)} or rig.peer.round.pacemaker.view > 0


# Exchange -------------------------------------------------------------------------------------------------------
def test_the_leader_of_its_view_begins_a_round_that_it_joins() -> None:
    rig = ready_at_second()
    round = round_of(rig.log, leader="b")
    assert of(rig.hear("b", begin_of(round, rig.log)), OpenRound) == [OpenRound(round)]
    assert rig.peer.state is State.AVERAGING
    assert told(rig).round == round.name
    assert told(rig).terms == round.terms


@pytest.mark.parametrize("sender", ["a", "z"])
def test_nobody_else_begins_a_round(sender: str) -> None:
    rig = ready_at_second()
    rig.hear(sender, begin_of(round_of(rig.log, leader=sender), rig.log))
    assert rig.peer.state is State.READY


def test_of_a_later_view_it_joins_nothing_yet() -> None:
    rig = ready_at_second()
    later = Ballot(view=1, attempt=1)
    rig.hear("c", begin_of(round_of(rig.log, ballot=later, leader="c"), rig.log))
    rig.hear("b", begin_of(round_of(rig.log, ballot=later, leader="b"), rig.log))
    assert rig.peer.state is State.READY


def test_a_round_without_it_or_with_less_than_it_brings_is_none_of_its() -> None:
    rig = ready_at_second()
    rig.hear("b", begin_of(round_of(rig.log, "ab", leader="b"), rig.log))
    assert rig.peer.state is State.READY
    round = round_of(rig.log, leader="b")
    shares = tuple(
        share.model_copy(update={"member": share.member.model_copy(update={"tokens": 1})})
        if share.member.peer == "c"
        else share
        for share in round.shares
    )
    rig.hear("b", begin_of(round.model_copy(update={"shares": shares}), rig.log))
    assert rig.peer.state is State.READY


def test_a_round_that_can_lead_to_no_entry_is_dropped() -> None:
    rig = ready_at_second()
    round = round_of(rig.log, leader="b")
    fewer = round.model_copy(update={"shares": tuple(one.model_copy(update={"chunks": 1}) for one in round.shares)})
    assert of(rig.hear("b", begin_of(fewer, rig.log)), Dropped)
    for chunks in (2, 0):
        some = {"a": 2, "b": 4 - chunks, "c": chunks}
        dealt = tuple(one.model_copy(update={"chunks": some[one.member.peer]}) for one in round.shares)
        untold = begin_of(round.model_copy(update={"shares": dealt}), rig.log, commitments=())
        assert of(rig.hear("b", untold), Dropped), "it votes, and could not tell an average that is too long (R3)"
    unknown = {"format": 1 + len(SIZE.thinner)}
    strange = [one.member.model_copy(update=unknown if one.member.peer == "a" else {}) for one in round.shares]
    shares = [one.model_copy(update={"member": each}) for one, each in zip(round.shares, strange, strict=True)]
    said = [commitment(peer, rig.log).contribution for peer in "abc"]
    said[0] = said[0].model_copy(update=unknown)
    far = round.model_copy(update={"shares": tuple(shares), "committed": digest_of_all(said)})
    dropped = of(rig.hear("b", begin_of(far, rig.log, commitments=tuple(said))), Dropped)
    assert [one.reason for one in dropped] == ["its round cannot lead to an entry"], "this run has no such format"
    assert rig.peer.state is State.READY


@pytest.mark.parametrize("lie", ["", "norms", "own", "none"])
def test_r3_a_voter_that_averages_nothing_in_a_large_round_checks_its_norms(
    lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peers.protocol.contributions.FEW", 2)
    rig = ready_at_second()
    said = [commitment(peer, rig.log).contribution for peer in "abc"]
    if lie == "own":
        said[2] = said[2].model_copy(update={"squares": 1e30})
    norms = Norms.of(said)
    if lie == "norms":
        norms = norms.model_copy(update={"squares": (1e30, 1.0, 1.0)})
    chunks = {"a": 3, "b": 3, "c": 0}
    round = round_of(rig.log, leader="b")
    dealt = tuple(one.model_copy(update={"chunks": chunks[one.member.peer]}) for one in round.shares)
    round = round.model_copy(update={"shares": dealt, "committed": digest_of_all(said)})
    rig.hear("b", begin_of(round, rig.log, commitments=(), norms=None if lie == "none" else norms))
    assert (rig.peer.state is State.AVERAGING) == (not lie)


def test_a_later_ballot_goes_on_with_the_round_and_no_earlier_round_is_joined_again() -> None:
    rig = ready_at_second()
    old, new = round_of(rig.log, leader="b"), round_of(rig.log, ballot=SECOND, leader="b")
    rig.hear("b", begin_of(new, rig.log))
    assert not of(rig.hear("b", begin_of(old, rig.log)), OpenRound), "it would average anew what it has signed"
    assert not of(rig.hear("b", begin_of(new, rig.log, Ballot(view=0, attempt=3))), OpenRound)
    assert rig.peer.exchange is not None
    assert rig.peer.exchange.round == new


def test_r3_a_peer_is_heir_only_to_a_round_of_its_present_training() -> None:
    """A member without chunks of its own checks as an heir what is said of its commitment."""
    rig = ready_at_second()
    round = round_of(rig.log, leader="b")
    chunks = {"a": 6, "b": 0, "c": 0}
    shares = tuple(one.model_copy(update={"chunks": chunks[one.member.peer]}) for one in round.shares)
    stated = tuple(commitment(peer, rig.log, number=7).contribution for peer in "abc")
    round = round.model_copy(update={"shares": shares, "committed": digest_of_all(stated)})
    begin = begin_of(round, rig.log, heirs=(("a", "c"),), commitments=stated)
    assert not of(rig.hear("b", begin), OpenRound)
    assert rig.peer.state is State.READY


def test_a_round_of_the_same_name_is_no_other_round() -> None:
    rig = ready_at_second().exchanging()
    other = round_of(rig.log, leader="b").model_copy(update={"committed": bytes(32)})
    assert of(rig.hear("b", begin_of(other, rig.log, SECOND)), Dropped)


def test_the_leader_is_told_of_our_averages_until_it_proposes() -> None:
    rig = whole()
    ((to, part),) = sends(rig.effects, Part)
    assert to == "b"
    assert {average.reducer for average in part.averages} == {"c"}
    assert sends(rig.tick(TIMING.resend), Part) == [("b", part)]
    rig.hear("b", proposal(rig))
    assert not sends(rig.tick(TIMING.resend), Part)


# Vote 1 ---------------------------------------------------------------------------------------------------------
def test_it_votes_for_what_the_round_came_to_and_tells_all() -> None:
    rig = whole()
    rig.hear("b", proposal(rig))
    assert sorted(to for to, _ in votes(rig, Phase.PREPARE)) == ["a", "b"], "and itself"
    rig.hear("b", proposal(rig))
    assert [to for to, _ in votes(rig, Phase.PREPARE)] == ["b"], "asked again, it tells the leader again"


def test_a_proposal_waits_for_its_payload() -> None:
    rig = ready_at_second().exchanging()
    rig.hear("b", proposal(rig))
    assert not votes(rig, Phase.PREPARE)
    said = told(rig)
    assert (said.refused, said.reason) == (FIRST, Refusal.NO_PAYLOAD.value), "the leader knows that it was heard"
    rig.whole()
    assert votes(rig, Phase.PREPARE)


FAR = Ballot(view=1 << 40, attempt=1)


@pytest.mark.parametrize(("group", "by"), [((("a", 0),), "a"), ((("a", 0), ("c", 0), ("x", 0)), "ax")])
def test_r6_a_certificate_of_a_minority_that_this_peer_does_not_join_moves_nothing(group: Group, by: str) -> None:
    """One liar can sign it with keys that it makes up: all others would be in its view, and vote in none before."""
    rig = whole()
    rig.hear("a", certified(rig.log, rig.next_header(), Phase.PREPARE, by, FAR, group))
    assert not votes(rig, Phase.COMMIT)
    assert (rig.peer.round.pacemaker.view, rig.peer.round.voter.prepared) == (0, None)


def test_r6_a_founding_that_too_few_have_prepared_moves_nothing() -> None:
    rig = Rig("b", "ac").joined()
    header = rig.log.next_header(roster(rig.log, "a"), PAYLOAD, "a")
    rig.hear("a", certified(rig.log, header, Phase.PREPARE, "a", FAR))
    assert (rig.peer.round.pacemaker.view, rig.peer.round.voter.prepared) == (0, None)


def refusal(rig: Rig, what: Propose, sender: str = "b") -> str:
    rig.hear(sender, what)
    assert not votes(rig, Phase.PREPARE)
    return told(rig).reason


def test_an_average_or_an_absence_that_no_reducer_has_signed_is_refused() -> None:
    rig = whole()
    assert rig.peer.exchange is not None
    header = rig.peer.exchange.round.entry(rig.log, {"a": 1}, PAYLOAD, "b")
    assert refusal(rig, proposal(rig, header=header)) == Refusal.UNSIGNED_AVERAGE.value


@pytest.mark.parametrize(
    ("absent", "view", "reason"),
    [("ab", 0, Refusal.MOST_ABSENT.value), ("a", 0, ""), ("ab", 2, Refusal.MOST_ABSENT.value), ("ab", 3, "")],
)
def test_r5_a_header_of_less_than_half_of_its_rounds_tokens_is_refused(absent: str, view: int, reason: str) -> None:
    """Else a reducer of all chunks, which signs that all others were absent, would make entries of its own work. When
    all have led in vain it is agreed to: a link may be broken for good."""
    rig = ready_at_second().exchanging().whole(absent)
    exchange = rig.peer.exchange
    assert exchange is not None
    assert exchange.round.counts_enough(exchange.absent(), view, len(rig.log.ring)) == (not reason)
    if view:
        return
    header = exchange.round.entry(rig.log, exchange.absent(), PAYLOAD, "b")
    rig.hear("b", propose(header, round=exchange.round, marks=b""))
    assert told(rig).reason == reason
    assert bool(votes(rig, Phase.PREPARE)) == (not reason)


def test_an_entry_that_names_another_leader_than_its_view_has_is_refused() -> None:
    rig = whole()
    assert refusal(rig, proposal(rig, header=rig.next_header(leader="a"))) == Refusal.DOES_NOT_FOLLOW.value


def test_a_voter_that_is_heard_is_not_gone() -> None:
    rig = ready_at_second()
    round = round_of(rig.log, "bc", leader="b")
    rig.hear("b", begin_of(round, rig.log))
    rig.whole()
    header = round.entry(rig.log, {}, PAYLOAD, "b", gone=("a",))
    assert refusal(rig, proposal(rig, header=header)) == Refusal.NOT_GONE.value
    assert told(rig).named == ("a",)


def newcomers_round(rig: Rig) -> Round:
    """Return a round with d, which brings a grant's work and has no say yet."""
    new = Member(peer="d", tokens=TOKENS, samples=rig.log.grants[0], incarnation=7)
    round = round_of(rig.log, leader="b")
    said = [commitment(peer, rig.log).contribution for peer in "abcd"]
    return round.model_copy(
        update={"shares": (*round.shares, Share(member=new, chunks=0)), "committed": digest_of_all(said)}
    )


@pytest.mark.parametrize(("incarnation", "is_heard"), [(None, False), (8, False), (7, True)])
def test_r5_a_member_that_would_get_a_say_is_heard_by_the_voter(incarnation: int | None, is_heard: bool) -> None:
    """Else the leader might have made it up, or named another incarnation of it."""
    rig = ready_at_second()
    if incarnation is not None:
        rig.see(others="d", incarnation=incarnation)
    round = newcomers_round(rig)
    rig.hear("b", begin_of(round, rig.log))
    rig.whole()
    what = proposal(rig, header=round.entry(rig.log, {}, PAYLOAD, "b"))
    if is_heard:
        rig.hear("b", what)
        assert votes(rig, Phase.PREPARE)
        return
    assert refusal(rig, what) == Refusal.STRANGER.value
    assert told(rig).named == ("d",)
    rig.see(others="d", incarnation=7)
    rig.tick()
    assert votes(rig, Phase.PREPARE), "it is heard by now"


def test_r5_a_fault_that_is_not_proven_here_is_refused_until_the_proof_comes() -> None:
    rig = ready_at_second()
    evidence = Evidence(SETTINGS, SimulatedKeys("z").verify, PAYLOADS)
    faults = [fault for lie in two_votes("a", rig.log) for fault in evidence.observe_vote("a", lie, rig.peer.lineage)]
    round = round_of(rig.log, "bc", leader="b")
    rig.hear("b", begin_of(round, rig.log))
    rig.whole()
    header = round.entry(rig.log, {}, PAYLOAD, "b", tuple(faults))
    assert refusal(rig, proposal(rig, header=header)) == Refusal.UNPROVEN_FAULT.value
    assert told(rig).unproven == (faults[0].proof,)
    (known,) = evidence.behind(faults)
    rig.hear("b", Proof(position=rig.log.position, fault="votes", proof=known.data))
    rig.tick()
    assert votes(rig, Phase.PREPARE)


def test_r5_a_minoritys_proposal_is_refused_where_a_quorum_is_heard_or_it_leaves_a_peer_out() -> None:
    rig = whole()
    assert refusal(rig, proposal(rig, group=(("b", 0), ("c", 0)))) == Refusal.NOT_ALONE.value
    assert told(rig).named == ("a",)


def test_a_proposal_of_a_later_view_or_of_another_peer_is_not_looked_at() -> None:
    rig = whole()
    rig.hear("c", proposal(rig, ballot=Ballot(view=1, attempt=1)))
    rig.hear("a", proposal(rig))
    assert not votes(rig, Phase.PREPARE)


def test_a_proposal_that_is_taken_back_is_not_voted_for() -> None:
    """The leader names heirs, since averages that it had named can't be had."""
    rig = ready_at_second().exchanging()
    rig.hear("b", proposal(rig))
    assert rig.peer.exchange is not None
    rig.hear("b", begin_of(rig.peer.exchange.round, rig.log, SECOND, heirs=(("a", "c"),)))
    rig.whole()
    assert not votes(rig, Phase.PREPARE)


def test_what_was_prepared_is_voted_for_when_its_payload_was_fetched_from_those_who_have_it() -> None:
    rig = ready_at_second()
    header = rig.next_header(leader="a")
    shown = certified(rig.log, header, Phase.PREPARE, by="ab").certificate
    again = propose(header, SECOND, shown)
    assert of(rig.hear("b", again), FetchPayload) == [FetchPayload(header, ("b", "a"))]
    rig.do(PayloadNotFetched(header, "gone"))
    assert of(rig.tick(), FetchPayload), "once more, and not at once"
    rig.do(PayloadFetched(header))
    assert votes(rig, Phase.PREPARE)


def test_r8_more_made_up_peers_than_a_message_can_name_end_no_process() -> None:
    """They beat, as if at work here: names are made up for nothing."""
    round = ready_at_second().peer.round
    named = tuple(f"x{number}" for number in range(MEMBER_LIMIT + 1))
    said = round._work.ready(STATE, 0, None, round.voter, FIRST, Objection(Refusal.NOT_ALONE, named))
    assert said.named == named[:MEMBER_LIMIT]
    round.attendance.at_work |= dict.fromkeys(named, 0)
    assert len(round.attendance.group) == MEMBER_LIMIT


def test_r5_nothing_is_fetched_for_a_certificate_that_one_peer_can_make_alone() -> None:
    """Payloads that are fetched are kept on the disk: such certificates would fill it."""
    rig = ready_at_second()
    header = rig.next_header(leader="a")
    shown = certified(rig.log, header, Phase.PREPARE, by="b", group=(("b", 0),)).certificate
    assert not of(rig.hear("b", propose(header, SECOND, shown)), FetchPayload)
    assert not votes(rig, Phase.PREPARE)


@pytest.mark.parametrize("is_alone", [False, True])
def test_r6_a_commit_that_one_peer_can_make_alone_is_not_passed_on(
    monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    """Each would cost sixteen messages of as many kilobytes, and those of whom they reach."""
    monkeypatch.setattr("peers.protocol.voter.OPEN_LIMIT", 2)
    rig = at_second().trained()
    assert rig.peer.round.is_led_by_us
    group = (("a", 0), ("b", 0), ("c", 0)) if is_alone else ()
    commit = certified(rig.log, rig.next_header(), by="ac", group=group)
    told = [to for to, _ in sends(rig.hear("a", commit), Certified)]
    assert told == ([] if is_alone else ["a", "c"])
    assert not sends(rig.hear("a", commit), Certified), "its payload is being fetched: it is no news"


def bound(rig: Rig) -> Propose:
    """Return a proposal of the header that the peer is bound to. It lacks the payload."""
    header = rig.next_header(leader="a")
    lock = certified(rig.log, header, Phase.PREPARE, by="ab")
    rig.hear("b", lock)
    return propose(header, SECOND, lock.certificate)


def test_r10_a_vote_is_given_up_when_its_payload_was_nowhere_for_the_partition_grace() -> None:
    """A fetch that takes longer than that is under way: somebody has the payload."""
    rig = ready_at_second()
    what = bound(rig)
    rig.hear("b", what)
    before = rig.peer.incarnation
    rig.waits(int(TIMING.partition_grace) + 60)
    assert rig.peer.incarnation == before, "it comes slowly"
    rig.do(PayloadNotFetched(what.header, "the link broke"))
    for _ in range(int(TIMING.partition_grace) + 30):
        if of(rig.effects, FetchPayload):
            rig.do(PayloadNotFetched(what.header, "gone"))
        rig.see(state=PeerState.READY)
        rig.tick()
        if rig.peer.incarnation != before:
            break
    assert rig.peer.incarnation == before + 1


def test_a_payload_that_nobody_gives_is_asked_for_after_pauses_that_double() -> None:
    rig = ready_at_second()
    what = bound(rig)
    asked = [0.0] if of(rig.hear("b", what), FetchPayload) else []
    begun = rig.now
    for _ in range(40):
        if of(rig.effects, FetchPayload):
            rig.do(PayloadNotFetched(what.header, "not kept here"))
        rig.see(state=PeerState.READY)
        if of(rig.tick(), FetchPayload):
            asked.append(rig.now - begun)
    assert asked == [0.0, 1.0, 3.0, 7.0, 15.0, 25.0, 35.0], "up to the expiry"


# Vote 2, and the entry ------------------------------------------------------------------------------------------
def prepared(rig: Rig, by: str = "ab") -> Certified:
    return certified(rig.log, rig.next_header(), Phase.PREPARE, by)


def test_votes_of_a_quorum_prepare_and_commit() -> None:
    rig = whole()
    what, log, header = proposal(rig), rig.log, rig.next_header()
    rig.hear("b", what)
    rig.hear("b", vote("b", log, what.choice))
    assert sorted(to for to, _ in votes(rig, Phase.COMMIT)) == ["a", "b"], "two of three have voted"
    assert told(rig).lock == Certified(header=header, certificate=rig.peer.round.voter.prepared.certificate)  # type: ignore[union-attr]
    rig.hear("b", vote("b", log, choice(header, Phase.COMMIT)))
    (apply,) = of(rig.effects, Apply)
    assert apply.header == header
    assert apply.certificate is not None
    assert apply.certificate.choice.phase is Phase.COMMIT


def test_a_voter_that_trains_gives_vote_2_and_is_shown_no_entry_before_its_payload() -> None:
    rig = at_second()
    header = rig.next_header("ac")
    rig.hear("a", certified(rig.log, header, Phase.PREPARE))
    assert votes(rig, Phase.COMMIT)
    assert rig.peer.state is State.TRAINING
    (fetch,) = of(rig.hear("a", certified(rig.log, header)), FetchPayload)
    assert set(fetch.donors) == {"a", "c"}
    assert rig.peer.replica.replaying == header
    assert of(rig.do(PayloadFetched(header)), Apply)


def test_a_certificate_that_proves_nothing_is_dropped() -> None:
    rig = whole()
    shown = prepared(rig)
    assert shown.certificate is not None
    forged = shown.certificate.model_copy(update={"signers": shown.certificate.signers[:1]})
    rig.hear("a", shown.model_copy(update={"certificate": forged}))
    assert [one.peer for one in of(rig.effects, Dropped)] == ["a"]
    assert not votes(rig, Phase.COMMIT)


@pytest.mark.parametrize("trickles", [False, True])
def test_r6_what_is_decided_comes_with_the_exchange_or_is_fetched(trickles: bool) -> None:
    """A reducer that sends a chunk each second keeps nobody for long."""
    rig = ready_at_second().exchanging()
    header, log = rig.next_header(), rig.log
    rig.hear("b", proposal(rig))
    assert not of(rig.hear("b", certified(log, header, by="ab")), FetchPayload)
    assert rig.peer.round.state is RoundState.DECIDED
    exchange = rig.peer.round.exchange
    assert exchange is not None
    for second in range(int(death(TIMING) if trickles else STALLED * TIMING.resend) + 1):
        assert rig.peer.round.state is RoundState.DECIDED, f"it has waited for {second} seconds"
        if trickles:
            rig.do(ReducedArrived(exchange.name, "a", 0, (), digest_of(b"0"), Origin(reducer="a", signature=bytes(64))))
        if second % TIMING.heartbeat == 0:
            rig.see(state=PeerState.READY)
        rig.tick()
    assert rig.peer.state is State.REPLAYING


def test_what_is_decided_is_made_as_soon_as_its_payload_is_whole() -> None:
    rig = ready_at_second().exchanging()
    rig.hear("b", proposal(rig))
    rig.hear("b", certified(rig.log, rig.next_header(), by="ab"))
    assert of(rig.whole().effects, Apply)


def test_a_repeated_vote_is_answered_by_the_certificate_that_came_of_it() -> None:
    rig = whole()
    what, log = proposal(rig), rig.log
    rig.hear("b", what)
    rig.hear("b", vote("b", log, what.choice))
    assert sends(rig.hear("b", vote("b", log, what.choice)), Certified)
    assert not sends(rig.hear("b", vote("b", log, what.choice)), Certified), "certificates are long"
    assert sends(rig.hear("b", vote("b", log, what.choice), TIMING.resend), Certified)


@pytest.mark.parametrize("has_work", [True, False])
def test_a_fragment_that_it_has_trained_is_not_skipped(has_work: bool) -> None:
    rig = Rig(settings=replace(SETTINGS, fragments=2)).joined()
    rig.do(Captured(0, Trained((), TOKENS * has_work, 1.0, contribution=CONTRIBUTION if has_work else None)))
    assert rig.peer.rounds[0].state is RoundState.READY
    log = rig.log.of(0)
    idle = [Member(peer=name, tokens=0, samples=()) for name in "abc"]
    rig.hear("a", propose(log.next_header(idle, NO_PAYLOAD, None)))
    assert bool(votes(rig, Phase.PREPARE)) is not has_work
    if has_work:
        assert told(rig).reason == Refusal.HAS_WORK.value


def test_the_entry_after_one_that_is_not_digested_yet_is_believed() -> None:
    """R6. Regression: it was held against the state before."""
    rig = Rig().joined().trained().exchanging().whole().applying()
    last, state = rig.peer.log.last, digest_of(b"the state after")
    assert last is not None
    rig.do(Applied(last))
    log = rig.peer.log.in_state(state)
    rig.see(ahead(log))
    effects = rig.hear("a", certified(log, next_header(log, roster(log, "ac"))))
    effects += rig.do(Digested(last, state))
    assert not of(effects, Dropped)
    assert of(effects, FetchPayload)
