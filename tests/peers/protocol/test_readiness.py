"""The leader's book: who gets which samples, who is ready, and who can't be in the entry (R14)."""

from __future__ import annotations

from typing import Any

import pytest

from peers.messages.messages import LeaseGrant, LeaseRequest, Ready, Refuse
from peers.presence.heartbeat import PeerState
from peers.protocol.effects import Dropped
from peers.protocol.pacemaker import death
from peers.values.leases import SampleRange
from peers.values.wire import digest_of
from tests.peers.builders import Rig, at_second, commitment, of, ready, sends
from tests.peers.logs import SETTINGS, STATE, TIMING

OTHER = digest_of(b"another state")


def leading() -> Rig:
    """b leads the second entry and trains; a and c, and the newcomers d and e, are heard."""
    rig = at_second()
    rig.others = "acde"
    rig.see()
    return rig


def asks(rig: Rig, peer: str, state: bytes = STATE) -> LeaseGrant | None:
    found = sends(rig.hear(peer, LeaseRequest(position=rig.peer.log.position, state_digest=state)), LeaseGrant)
    return found[0][1] if found else None


def awaited(rig: Rig) -> set[str]:
    """Return the peers that the leader waits for, once any is ready."""
    is_ready(rig, "a")
    rig.tick()
    return rig.peer.round.leader.readiness.awaited.peers


def is_ready(rig: Rig, peer: str, **changes: Any) -> bool:
    rig.hear(peer, ready(rig.log, peer, **changes))
    return peer in rig.peer.round.leader.readiness.of(0)


# Leases ---------------------------------------------------------------------------------------------------------
def test_each_joiner_gets_samples_of_its_own_and_the_same_when_it_asks_again() -> None:
    rig = leading()
    first, second = asks(rig, "d"), asks(rig, "e")
    assert first is not None
    assert second is not None
    assert first.samples != second.samples
    assert asks(rig, "d") == first
    assert first.steps == SETTINGS.inner_steps


def test_r14_what_a_silent_joiner_was_granted_is_given_again_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be training it all the same. But made-up names can't take all of them."""
    rig = leading()
    log = rig.peer.round.log
    monkeypatch.setitem(vars(log), "grants", log.grants[:2])
    first = asks(rig, "d")
    for _ in range(int(TIMING.heartbeat_expiry) + 2):
        rig.see(others="acef")
        rig.tick()
    second = asks(rig, "e")
    assert first is not None
    assert second is not None
    assert second.samples != first.samples
    assert asks(rig, "f") == first


def test_r7_a_joiner_that_has_not_used_its_grant_is_not_waited_for_again() -> None:
    """It may ask each time, and never be ready."""
    rig = leading()
    for expected in ("abcd", "abce"):
        assert asks(rig, "d") is not None, "it may be ready in time"
        if "e" in expected:
            assert asks(rig, "e") is not None
        rig.trained()
        assert awaited(rig) == set(expected)
        rig.exchanging().whole().applying().applied()


def test_a_member_that_asks_has_its_lease() -> None:
    rig = leading()
    granted = asks(rig, "c")
    assert granted is not None
    assert granted.samples == rig.peer.log.leases["c"]


def test_a_joiner_with_another_state_is_told_so() -> None:
    rig = leading()
    assert asks(rig, "d", OTHER) is None
    ((to, refusal),) = sends(rig.effects, Refuse)
    assert (to, refusal.state_digest) == ("d", STATE)


def test_the_leader_alone_gives_samples() -> None:
    rig = Rig("c", "abd").joined().trained().exchanging().whole().applying().applied()
    assert rig.leader == "b"
    assert asks(rig, "d") is None


# Ready ----------------------------------------------------------------------------------------------------------
def test_what_is_said_again_and_again_is_remembered_for_as_long_as_a_peer_lives() -> None:
    rig = leading()
    assert is_ready(rig, "a")
    for _ in range(int(death(TIMING)) + 2):
        rig.see(state=PeerState.READY)
        rig.tick()
    assert not rig.peer.round.leader.readiness.of(0), "it says so no more"
    assert is_ready(rig, "a")
    for _ in range(int(TIMING.heartbeat_expiry) + 2):
        rig.see(others="c", state=PeerState.READY)
        rig.tick()
    assert not rig.peer.round.leader.readiness.of(0), "it is not heard any more"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"state_digest": OTHER}, "state"),
        ({"samples": (SampleRange(7, 9),)}, "begin neither its lease nor a grant"),
        ({"tokens": 10_000}, "tokens"),
        ({"commitment": None}, "has a commitment if and only if"),
        ({"tokens": 0}, "has a commitment if and only if it has tokens"),
        ({"wants": 10_000}, "wants"),
    ],
    ids=["another state", "others' samples", "too many tokens", "no commitment", "no tokens", "wants too much"],
)
def test_what_cannot_be_in_an_entry_is_refused(changes: dict[str, Any], reason: str) -> None:
    rig = leading()
    assert not is_ready(rig, "a", **changes)
    ((to, refusal),) = sends(rig.effects, Refuse)
    assert to == "a"
    assert reason in refusal.reason


def test_r12_a_newcomer_without_tokens_is_in_no_round() -> None:
    """No entry could follow, so that one stranger with an empty Ready would void each round."""
    rig = leading()
    assert not is_ready(rig, "d", tokens=0, samples=(), commitment=None)
    assert is_ready(rig, "a", tokens=0, samples=(), commitment=None), "a voter keeps its say"


@pytest.mark.parametrize(
    "changes", [{"wants": 2**61}, {"incarnation": 9}], ids=["wants too much", "has not signed that"]
)
def test_r14_a_ready_that_differs_in_anything_is_checked_again(changes: dict[str, Any]) -> None:
    rig = leading()
    granted = asks(rig, "d")
    assert granted is not None
    assert is_ready(rig, "d", samples=granted.samples)
    rig.hear("d", ready(rig.log, "d", samples=granted.samples, **changes))
    assert rig.peer.round.leader.readiness.of(0)["d"] == ready(rig.log, "d", samples=granted.samples)


def test_a_commitment_that_is_not_its_own_is_refused() -> None:
    rig = leading()
    assert not is_ready(rig, "a", commitment=commitment("c", rig.log))
    assert [one.peer for one in of(rig.effects, Dropped)] == ["a"]


def test_of_two_joiners_with_the_same_samples_one_is_refused() -> None:
    rig = leading()
    granted = asks(rig, "d")
    assert granted is not None
    assert is_ready(rig, "d", samples=granted.samples)
    assert not is_ready(rig, "e", samples=granted.samples)
    assert [to for to, _ in sends(rig.effects, Refuse)] == ["e"]


def test_what_another_leader_has_granted_is_good() -> None:
    rig = leading()
    assert is_ready(rig, "e", samples=rig.peer.log.grants[3])


def test_a_voter_that_says_ready_in_two_incarnations_is_not_taken_in() -> None:
    """Voters would not vote for an entry that takes its say."""
    rig = leading()
    said = {"incarnation": 9, "commitment": commitment("a", rig.log, incarnation=9)}
    assert not is_ready(rig, "a", **said)
    rig.see(incarnation=9)
    assert is_ready(rig, "a", **said), "it has started again"


def test_a_peer_that_leaves_is_ready_no_more() -> None:
    rig = leading()
    assert is_ready(rig, "a")
    rig.peer.round.leader.on_leaving("a")
    assert not rig.peer.round.leader.readiness.of(0)


def test_views_are_kept_apart() -> None:
    rig = leading()
    rig.hear("a", ready(rig.log, "a", view=2))
    readiness = rig.peer.round.leader.readiness
    assert not readiness.of(0)
    assert readiness.of(2).keys() == {"a"}
    assert readiness.views() == {"a": 2}


def test_a_stranger_is_not_answered() -> None:
    rig = leading()
    assert not sends(rig.hear("z", ready(rig.log, "z", samples=rig.log.grants[0])), Refuse)
    assert isinstance(ready(rig.log, "a"), Ready)
    assert not rig.peer.round.leader.readiness.of(0)
