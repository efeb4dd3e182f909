"""A peer without a lease: when it asks for one, whom, and which answers it accepts (R13, R14)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.log.state import LogState
from peers.messages.messages import LeaseGrant, LeaseRequest, Ready, Refuse
from peers.presence.heartbeat import PeerState
from peers.protocol.effects import Dropped, FetchSnapshot, Train
from peers.protocol.events import (
    Applied,
    Digested,
    HeartbeatsSeen,
    PayloadFetched,
    ReachSeen,
    SignedHeadsSeen,
    SnapshotFailed,
    TrainingDone,
)
from peers.protocol.states import State
from peers.values.leases import SampleRange
from peers.values.signed_heads import SignedHead, SignedHeads
from peers.values.wire import Reach, digest_of
from tests.peers.builders import (
    LEASES,
    Rig,
    ahead,
    at_second,
    certified,
    follower_at_second,
    of,
    roster,
    sends,
    trained,
)
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG, SETTINGS, STATE, TIMING, next_header
from tests.simulator.simulated_keys import SimulatedKeys

OTHER = digest_of(b"another state")
REQUEST = LeaseRequest(position=LOG.position, state_digest=STATE)


def grant(log: LogState = LOG, samples: SampleRange = LEASES["b"][0], steps: int = 10) -> LeaseGrant:
    return LeaseGrant(position=log.position, samples=(samples,), steps=steps)


def asked(rig: Rig) -> list[str]:
    """Return whom the last effects ask for a lease."""
    return [to for to, _ in sends(rig.effects, LeaseRequest)]


def joining(others: str = "ac") -> Rig:
    """b has looked around, and asks a for a lease."""
    rig = Rig(others=others)
    rig.see(state=PeerState.JOINING)
    rig.tick(5.0)
    return rig


# When it asks, and whom ----------------------------------------------------------------------------------------------
def test_r14_it_asks_the_leader_again_and_again_once_it_knows_who_is_there() -> None:
    rig = Rig()
    assert rig.tick(100.0) == [], "it has not even looked"
    rig.see(state=PeerState.JOINING)
    rig.tick()
    assert asked(rig) == ["a"]
    rig.tick(0.5)
    assert asked(rig) == []
    rig.tick(0.5)
    assert asked(rig) == ["a"], "no answer: asked again"


def test_r13_a_run_is_founded_when_enough_peers_have_had_time_to_see_each_other() -> None:
    rig = joining("a")
    assert asked(rig) == [], "two of three"
    rig.see(others="ac", state=PeerState.JOINING)
    rig.tick()
    assert asked(rig) == ["a"]
    early = Rig()
    early.see(state=PeerState.JOINING)
    early.tick(2 * TIMING.heartbeat - 0.1)
    assert asked(early) == []


def test_r13_the_first_leader_gives_itself_a_lease_and_each_other_one_its_own() -> None:
    rig = Rig("a", "bc")
    rig.see(state=PeerState.JOINING)
    assert of(rig.tick(5.0), Train) == [Train(0, (SampleRange(0, 20),), 10, 0)]
    given = [sends(rig.hear(peer, REQUEST), LeaseGrant)[0][1].samples for peer in "bcb"]
    assert given == [(SampleRange(20, 40),), (SampleRange(40, 60),), (SampleRange(20, 40),)]


def test_r13_a_founder_that_is_heard_and_not_reached_is_waited_for_a_long_while() -> None:
    """Else there would be two runs; in the end the others found one without it."""
    rig = Rig()
    rig.do(ReachSeen({"a": Reach.NONE, "c": Reach.OPEN}, {}))
    rig.see(others="c", state=PeerState.JOINING)
    rig.see(others="a", state=PeerState.TRAINING)
    assert not of(rig.tick(5.0), Train)
    assert rig.peer._cycle.joiner.holds_back()
    rig.now += TIMING.grace + 10 * TIMING.partition_grace + TIMING.heartbeat_expiry + 2 * TIMING.heartbeat + 5.0
    rig.see(others="a", state=PeerState.TRAINING)
    assert not rig.peer._cycle.joiner.holds_back()


def test_r14_nothing_is_said_of_a_state_before_it_is_digested() -> None:
    """Neither by a leader that is asked, nor by a peer that has lost its lease."""
    rig = at_second().trained().exchanging().whole().applying()
    header = rig.peer.log.last
    assert header is not None
    rig.do(Applied(header))
    rig.see()
    request = LeaseRequest(position=rig.peer.log.position, state_digest=STATE)
    assert not sends(rig.hear("c", request), LeaseGrant)
    rig.do(Digested(header, STATE))
    assert sends(rig.hear("c", request), LeaseGrant)

    rig = follower_at_second()
    for _ in range(2):  # the first entry leaves it its lease, the second one takes it
        log, header = rig.log, next_header(rig.log, roster(rig.log, "ab"))
        rig.see(ahead(log))
        rig.hear("a", certified(log, header, by="ab"))
        rig.do(PayloadFetched(header))
        rig.do(Applied(header))
        assert not asked(rig)
        rig.do(Digested(header, STATE))
    assert asked(rig) == ["b"]


# What it accepts -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sender", "given"),
    [
        ("c", grant()),
        ("z", grant()),
        ("a", grant(samples=SampleRange(0, 21))),
        ("a", grant(samples=SampleRange(5, 25))),
        ("a", grant(samples=SampleRange(0, 2**61))),
        ("a", grant(samples=SampleRange(0, 1))),
        ("a", grant(steps=11)),
        ("a", grant(steps=0)),
    ],
    ids=[
        "not asked",
        "a stranger",
        "too many samples",
        "no lease of the log",
        "far too many",
        "too few samples",
        "too many steps",
        "no step",
    ],
)
def test_r14_only_a_proper_lease_of_the_leader_that_was_asked_is_trained(sender: str, given: LeaseGrant) -> None:
    rig = joining()
    assert bool(of(rig.hear(sender, given), Dropped)) is (sender == "a")
    assert rig.peer.state is State.JOINING
    assert of(rig.hear("a", grant()), Train) == [Train(0, LEASES["b"], 10, 0)]


@pytest.mark.parametrize(("speed", "steps"), [(0.0, 10), (25.0, 3)])
def test_r14_a_peer_that_knows_that_it_is_slow_trains_less_of_a_grant(speed: float, steps: int) -> None:
    rig = Rig(settings=replace(SETTINGS, smallest_share=0.125))
    rig.peer.trainer.speed = speed
    rig.do(HeartbeatsSeen((beat("a", LOG, speed=100.0), beat("c", LOG, speed=100.0))))
    rig.tick(5.0)
    assert of(rig.hear("a", grant()), Train) == [Train(0, LEASES["b"], steps, 0)]


def test_r19_a_newcomer_that_knows_of_a_signed_head_founds_nothing() -> None:
    """Regression: a stranger that was taken for the leader of an empty log had it found another run."""
    rig = joining()
    signed = SignedHead.sign("tiny", 9, bytes(32), "z", SimulatedKeys("z"))
    rig.do(SignedHeadsSeen(SignedHeads("tiny", ("z",)).with_heads([signed])))
    assert not of(rig.hear("a", grant()), Train)


# Who leads before the first entry ------------------------------------------------------------------------------------
def test_r13_the_giver_of_our_lease_leads_before_its_beats_say_that_it_is_at_work() -> None:
    """Regression: c heard first that b is at work, asked b, and got the samples that a had given itself."""
    rig = joining()
    rig.hear("a", grant())
    assert not sends(rig.hear("c", REQUEST), LeaseGrant)
    assert [to for to, _ in sends(rig.do(TrainingDone(trained(LEASES["b"]))), Ready)] == ["a"]
    assert [to for to, _ in sends(rig.hear("a", REQUEST), LeaseGrant)] == ["a"], "it does not lead if it asks us"


def test_r13_a_peer_that_has_given_leases_leads_itself() -> None:
    """Regression: it asked one that it had given a lease, got what it had given to a third, and refused itself."""
    rig = Rig("a", "bc")
    rig.see(state=PeerState.JOINING)
    rig.now += 5.0
    assert sends(rig.hear("b", REQUEST), LeaseGrant)
    rig.see(others="b")
    assert of(rig.tick(), Train) == [Train(0, (SampleRange(20, 40),), 10, 0)]


# Refused -------------------------------------------------------------------------------------------------------------
def refused(rig: Rig, by: str, state: bytes, reason: str = "no") -> Rig:
    rig.hear(by, Refuse(position=rig.log.position, state_digest=state, reason=reason))
    return rig


def test_r14_a_newcomer_takes_the_state_of_the_leader_that_refuses_its_own() -> None:
    rig = refused(joining(), "a", OTHER)
    assert [fetch.donor for fetch in of(rig.effects, FetchSnapshot)] == ["a"]
    rig.do(SnapshotFailed("a", "it gives none"))
    assert not of(refused(rig, "a", OTHER).effects, FetchSnapshot), "it gave none a moment ago"


def test_r14_a_leader_with_another_state_than_most_is_not_believed() -> None:
    """Regression: whoever led had the right state, and all others fetched it."""
    rig = refused(follower_at_second().trained(), "b", OTHER)
    assert not of(rig.effects, FetchSnapshot)
    assert rig.peer.state is State.READY


def test_r14_samples_that_the_log_gave_are_good_whatever_the_leader_says() -> None:
    rig = refused(follower_at_second().trained(), "b", STATE)
    assert rig.peer.state is State.READY
    assert not asked(rig)


def test_r14_samples_that_another_leader_gave_are_exchanged_for_the_present_ones() -> None:
    rig = Rig("c", "ab").joined().trained()
    assert not asked(refused(rig, "a", STATE)), "a gave them itself"
    rig.waits(int(TIMING.heartbeat_expiry) + 2, PeerState.TRAINING, "b")
    assert rig.leader == "b"
    assert asked(refused(rig, "b", STATE)) == ["b"]
    assert not asked(refused(rig, "b", STATE)), "that it says so again is late"
    assert of(rig.hear("b", grant()), Train) == [Train(0, LEASES["b"], 10, 0)]
