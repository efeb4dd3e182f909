"""A peer that is behind: what it asks, what it replays, and when it takes another one's state (R14, R21)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from peers.log.certificate import Support
from peers.log.header import Header
from peers.log.lineage import RECENT_ENTRIES, Branch
from peers.log.state import LogState
from peers.messages.messages import Certified, Elsewhere, Inquire, LeaseRequest, Ready
from peers.protocol.effects import Apply, Dropped, FetchLineage, FetchPayload, FetchSnapshot, StopTraining, Train
from peers.protocol.events import (
    Applied,
    Digested,
    HeartbeatsSeen,
    LineageNotSeen,
    LineageSeen,
    PayloadFetched,
    PayloadNotFetched,
    SnapshotRestored,
    TrainingDone,
    TrainingProgress,
)
from peers.protocol.pacemaker import death
from peers.protocol.states import State
from peers.values.wire import digest_of
from peers.values.workload import Progress
from tests.peers.builders import Rig, ahead, certified, follower_at_second, of, roster, sends, trained
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG, SETTINGS, STATE, TIMING, next_header
from tests.peers.protocol.test_peer import IN_STATE, is_told, sees_far_ahead

OTHER = digest_of(b"another state")
FAR = SETTINGS.snapshot_every + 1
PROGRESS = TrainingProgress(Progress(inner_step=1, loss=1.0, tokens_per_second=1.0))
BEHIND = pytest.mark.parametrize("state", [State.JOINING, State.TRAINING, State.READY, State.AVERAGING])


def told(rig: Rig, names: str = "abc", sender: str = "a") -> Header:
    """The others have made the next entry, of what these have trained, and one of them says so."""
    log = rig.log
    header = next_header(log, roster(log, names))
    rig.see(ahead(log, names=names))
    rig.hear(sender, certified(log, header, by="ab"))
    return header


def replays(rig: Rig, names: str = "abc") -> Rig:
    header = told(rig, names)
    rig.do(PayloadFetched(header))
    rig.step(header)
    return rig


# Asking --------------------------------------------------------------------------------------------------------------
@BEHIND
def test_r21_a_few_entries_behind_it_asks_what_followed_and_goes_on_until_it_knows(state: State) -> None:
    for entries in (1, SETTINGS.snapshot_every):
        rig = IN_STATE[state]()
        effects = rig.see(ahead(rig.log, entries))
        assert [message for _, message in sends(effects, Inquire)] == [Inquire(position=rig.peer.log.position)]
        assert rig.peer.state is state
        assert not of(effects, FetchLineage)


@BEHIND
def test_r21_far_behind_it_looks_at_a_log_first_and_then_takes_a_state(state: State) -> None:
    rig = IN_STATE[state]()
    theirs = ahead(rig.log, FAR)
    effects = rig.see(theirs)
    (fetch,) = of(effects, FetchLineage)
    assert fetch.index == theirs.position.index
    assert not of(effects, StopTraining) + sends(effects, Inquire), "it was told so, no more"
    effects = rig.shown(theirs)
    (snapshot,) = of(effects, FetchSnapshot)
    assert (snapshot.donor, snapshot.least) == (fetch.donor, rig.peer.log.position.index + 1)
    assert bool(of(effects, StopTraining)) is (state is State.TRAINING)


def test_r21_an_inquiry_that_leads_nowhere_ends_in_a_look_at_the_log() -> None:
    rig = follower_at_second()
    theirs = ahead(rig.log)
    ((to, _),) = sends(rig.see(theirs), Inquire)
    (other,) = {"a", "b"} - {to}
    assert not of(rig.hear(other, Elsewhere(position=theirs.position)), FetchLineage)
    assert of(rig.hear(to, Elsewhere(position=theirs.position)), FetchLineage)


def test_r21_a_claim_makes_it_look_once_and_changes_nothing() -> None:
    """Regression: a peer that said it had trained more was believed, and all dropped their work."""
    rig = follower_at_second()
    claim = beat("a", rig.peer.log, sequence=9, head=bytes(32), lineage_tokens=2**61)
    assert [fetch.donor for fetch in of(rig.do(HeartbeatsSeen((claim,))), FetchLineage)] == ["a"]
    rig.do(LineageNotSeen("a", "nothing follows"))
    assert rig.peer.state is State.TRAINING
    assert not of(rig.see(others="b"), FetchLineage), "a comes last for a while"
    again = claim.model_copy(update={"sequence": 10})
    assert of(rig.do(HeartbeatsSeen((again,)), after=TIMING.heartbeat_expiry + 0.1), FetchLineage)


def test_r21_a_peer_that_does_not_show_what_it_claims_is_passed_over_after_a_deaths_time() -> None:
    rig, asked = follower_at_second(), list[tuple[float, str]]()
    theirs, start = ahead(rig.log), rig.now
    while len({to for _, to in asked}) < 2:
        rig.now += TIMING.heartbeat
        asked += [(rig.now - start, to) for to, _ in sends(rig.see(theirs), Inquire)]
        assert rig.now - start <= death(TIMING) + 3 * TIMING.heartbeat, "the next one is asked by then"
    assert asked[-1][0] > death(TIMING)


@pytest.mark.parametrize(("is_certified", "moves"), [(True, True), (False, False)])
def test_r21_a_branch_with_a_certified_entry_goes_before_one_without(is_certified: bool, moves: bool) -> None:
    rig = follower_at_second()
    common = rig.peer.log
    theirs = common.append(next_header(common, roster(common), OTHER))
    replays(rig)
    rig.do(HeartbeatsSeen((beat("a", theirs, sequence=9, lineage_tokens=2**61),)))
    ours = Branch(common, rig.peer.log, {0: (b"ours", Support(not is_certified, 1))})
    branch = Branch(common, ahead(theirs), {0: (b"theirs", Support(is_certified, 1))})
    effects = rig.do(LineageSeen("a", branch, ours))
    assert bool(of(effects, FetchSnapshot)) is moves
    assert rig.peer.state is (State.FETCHING if moves else State.TRAINING)


# Replaying -----------------------------------------------------------------------------------------------------------
@BEHIND
def test_an_entry_that_was_missed_is_replayed(state: State) -> None:
    rig = IN_STATE[state]()
    header = told(rig)
    assert of(rig.effects, FetchPayload) == [FetchPayload(header, ("a", "b"))]
    assert rig.peer.state is State.REPLAYING
    assert [effect.header for effect in of(rig.do(PayloadFetched(header)), Apply)] == [header]
    assert rig.peer.log.last == header


def test_one_entry_after_another_is_replayed_until_it_is_where_the_others_are() -> None:
    rig = follower_at_second()
    theirs = ahead(rig.log, 3)
    inquiries = sends(rig.see(theirs), Inquire)
    while rig.peer.log.position.index < theirs.position.index:
        ((to, inquiry),) = inquiries
        assert inquiry.position == rig.peer.log.position
        header = next_header(rig.log, roster(rig.log))
        rig.hear(to, certified(rig.log, header, by="ab"))
        rig.do(PayloadFetched(header))
        inquiries = sends(rig.step(header), Inquire)
    assert rig.peer.settled.position.index == theirs.position.index
    assert rig.peer.state is State.TRAINING


@pytest.mark.parametrize("forged", ["cursor", "certificate"])
def test_an_entry_that_does_not_follow_or_is_not_proven_is_not_replayed(forged: str) -> None:
    rig = follower_at_second()
    log, header = rig.log, next_header(rig.log, roster(rig.log))
    proof = certified(log, header, by="ab")
    other = header.model_copy(update={"cursor": 7}) if forged == "cursor" else next_header(log, roster(log), OTHER)
    rig.see(ahead(log))
    rig.hear("a", Certified(header=other, certificate=proof.certificate))
    assert [(dropped.peer, dropped.what) for dropped in of(rig.effects, Dropped)] == [("a", "certificate")]
    assert rig.peer.state is State.TRAINING


def test_while_one_entry_is_replayed_nothing_else_is_begun() -> None:
    rig = is_told(follower_at_second())
    log = rig.log
    effects = rig.hear("b", certified(log, next_header(log, roster(log, "ab")), by="ab"))
    effects += rig.see(ahead(log, FAR)) + rig.tick()
    assert not [one for one in effects if isinstance(one, FetchPayload | FetchSnapshot | FetchLineage | Apply)]
    assert not sends(effects, Inquire)


def test_a_payload_that_is_not_to_be_had_ends_in_a_snapshot() -> None:
    rig = is_told(follower_at_second())
    log, header = rig.peer.log, rig.peer.replica.replaying
    assert header is not None
    (fetch,) = of(rig.do(PayloadNotFetched(header, "all are busy")), FetchSnapshot)
    assert fetch.least == log.position.index + 1
    assert rig.peer.log == log


# What becomes of the work (R7, R14) ----------------------------------------------------------------------------------
def test_r7_a_peer_that_is_late_goes_on_training_and_brings_its_work_into_a_later_entry() -> None:
    """Its lease is carried on, and its worker has loaded theta."""
    rig = follower_at_second()
    rig.do(PROGRESS)
    lease = rig.peer.log.leases["c"]
    header = told(rig, "ab")
    assert not of(rig.effects, StopTraining)
    assert [one.keeps_work for one in of(rig.do(PayloadFetched(header)), Apply)] == [True]
    assert not of(rig.step(header), Train), "it is at it already"
    assert (rig.peer.state, rig.peer.log.leases["c"]) == (State.TRAINING, lease)
    rig.see()
    assert sends(rig.do(TrainingDone(trained(lease))), Ready)[0][1].samples == lease


def test_r7_a_peer_that_is_done_while_it_replays_is_ready_when_it_has() -> None:
    rig = follower_at_second()
    rig.do(PROGRESS)
    header = told(rig, "ab")
    assert not sends(rig.do(TrainingDone(trained(rig.peer.log.leases["c"]))), Ready)
    rig.do(PayloadFetched(header))
    rig.step(header)
    assert rig.peer.state is State.READY


@pytest.mark.parametrize("missed", [0, 1], ids=["its worker has not begun", "its lease is too old"])
def test_work_that_can_be_in_no_later_entry_is_stopped(missed: int) -> None:
    rig = follower_at_second()
    if missed:
        rig.do(PROGRESS)
        replays(rig, "ab")
    told(rig, "ab")
    assert of(rig.effects, StopTraining)


# Another one's state -------------------------------------------------------------------------------------------------
def newcomer() -> Rig:
    """It has taken over a state of the others."""
    rig = sees_far_ahead(follower_at_second())
    rig.do(SnapshotRestored("a", ahead(rig.log, FAR).last, STATE))
    return rig


def test_r14_a_fetched_state_leads_to_a_lease() -> None:
    rig = Rig("c", "ab")
    theirs = ahead(LOG, FAR, "ab")
    rig.see(theirs)
    rig.shown(theirs)
    effects = rig.do(SnapshotRestored("a", theirs.last, OTHER))
    assert (rig.peer.log.position, rig.peer.state) == (theirs.position, State.JOINING)
    effects += rig.see(theirs, state_digest=OTHER) + rig.tick()
    assert {message.state_digest for _, message in sends(effects, LeaseRequest)} == {OTHER}


@pytest.mark.parametrize("way", [follower_at_second, newcomer, lambda: replays(newcomer())])
def test_r10_one_process_is_one_incarnation_wherever_it_goes(way: Callable[[], Rig]) -> None:
    assert way().peer.incarnation == 0


def test_r14_a_peer_whose_state_is_not_that_of_more_than_half_of_the_voters_takes_theirs() -> None:
    """A bit has flipped here, while the outer step was taken: what most have is what the log leads to."""

    def seen(others: str, incarnation: int = 0) -> list[FetchSnapshot]:
        rig = IN_STATE[State.APPLYING]()
        header = rig.peer.log.last
        assert header is not None
        rig.step(header, OTHER)
        return of(rig.see(others=others, incarnation=incarnation), FetchSnapshot)

    assert [(fetch.donor, fetch.others, fetch.least) for fetch in seen("ab")] == [("a", ("b",), 2)]
    assert not seen("a"), "one against one"
    assert not seen("ab", incarnation=7), "they have no say, as they are"


def test_training_goes_on_while_the_state_is_digested() -> None:
    """Nothing is said to others that would need the digest; then it is said at once."""
    rig = IN_STATE[State.APPLYING]()
    header = rig.peer.log.last
    assert header is not None
    assert of(rig.do(Applied(header)), Train)
    rig.see()
    assert not sends(rig.do(TrainingDone(trained(rig.peer.log.leases["c"]))), Ready)
    assert rig.peer.state is State.READY
    assert sends(rig.do(Digested(header, OTHER)), Ready)[0][1].state_digest == OTHER


def test_recent_entries_are_told_and_no_others() -> None:
    rig = follower_at_second()
    passed: list[LogState] = [rig.log]
    for _ in range(RECENT_ENTRIES):
        replays(rig)
        passed.append(rig.log)
    assert not sends(rig.hear("a", Inquire(position=LOG.position)), Certified)
    for log in passed[-FAR:-1]:
        assert sends(rig.hear("a", Inquire(position=log.position)), Certified)
