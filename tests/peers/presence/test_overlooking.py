"""Leaders that leave out a voter that is ready, or a newcomer, entry after entry."""

from __future__ import annotations

import pytest

from peers.presence.heartbeat import PeerState
from peers.presence.overlooking import OFTEN, Overlooking
from peers.presence.presence import Presence
from tests.peers.builders import TIMING, beat, first_log

MEMBERS = ("a", "b", "d")


def after(entries: int, leader: str = "a", left_out: str = "c") -> Overlooking:
    overlooking = Overlooking()
    for _ in range(entries):
        overlooking.entry_made(leader, {*MEMBERS, *left_out}, MEMBERS)
    return overlooking


def test_a_leader_that_leaves_the_same_one_out_for_long_comes_after_the_others() -> None:
    assert tuple(after(OFTEN - 1).order(MEMBERS)) == ("a", "b", "d")
    assert tuple(after(OFTEN).order(MEMBERS)) == ("b", "d", "a")
    overlooking = after(OFTEN)
    for _ in range(OFTEN):
        overlooking.entry_made("b", {"c"}, MEMBERS)
        overlooking.entry_made("d", {"c"}, MEMBERS)
    assert tuple(overlooking.order(MEMBERS)) == ("a", "b", "d"), "each of them did so once"


def test_entries_count_that_follow_one_another() -> None:
    overlooking = after(OFTEN - 1)
    overlooking.entry_made("a", {"c"}, (*MEMBERS, "c"))
    overlooking.entry_made("a", {"c"}, MEMBERS)
    assert not overlooking.turns
    overlooking = after(OFTEN - 1)
    overlooking.entry_made("a", (), MEMBERS)
    overlooking.entry_made("a", {"c"}, MEMBERS)
    assert not overlooking.turns, "it was not ready once"


def test_entries_of_others_and_the_leader_itself_do_not_count() -> None:
    overlooking = after(OFTEN - 1)
    overlooking.entry_made("b", {"c"}, MEMBERS)
    assert not overlooking.turns
    assert not after(2 * OFTEN, leader="c").turns, "a leader that is not ready may lead all the same"


def leader_after(state: PeerState, name: str, refused: bool = False) -> str | None:
    """Return whom b takes for its leader once a has made many entries without somebody."""
    log = first_log()
    presence = Presence("b", TIMING.heartbeat_expiry, 60.0, bar=30.0, now=0.0)
    presence.membership.observe([beat("a", log), beat(name, log, state)], 0.0)
    if refused:
        presence.refuse(name)
    for _ in range(OFTEN):
        presence.entry_made(log, ("a", "b"), "a")
    return presence.elect(log, {"b"})


def test_a_voter_that_says_that_it_is_ready_is_left_out() -> None:
    assert leader_after(PeerState.READY, "c") == "b"
    assert leader_after(PeerState.TRAINING, "c") == "a", "it may be late"


@pytest.mark.parametrize("state", [PeerState.JOINING, PeerState.TRAINING, PeerState.READY])
def test_a_newcomer_is_left_out_whatever_it_says(state: PeerState) -> None:
    """Regression: a leader that gave no samples kept all newcomers from the run for as long as it led."""
    assert leader_after(state, "z") == "b"


def test_whom_we_do_not_reach_either_is_not_left_out() -> None:
    assert leader_after(PeerState.JOINING, "z", refused=True) == "a"
    assert leader_after(PeerState.ARCHIVING, "z") == "a", "nor is who takes part in no entry"
