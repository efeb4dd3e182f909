"""Leaders that leave out a voter that is ready, entry after entry."""

from __future__ import annotations

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


def test_who_says_that_it_is_ready_and_votes_is_left_out() -> None:
    log = first_log()

    def leader(state: PeerState = PeerState.READY, name: str = "c") -> str | None:
        presence = Presence("b", TIMING.heartbeat_expiry, 60.0, bar=30.0, now=0.0)
        presence.membership.observe([beat("a", log), beat(name, log, state)], 0.0)
        for _ in range(OFTEN):
            presence.entry_made(log, ("a", "b"), "a")
        return presence.elect(log, {"b"})

    assert leader() == "b"
    assert leader(PeerState.TRAINING) == "a"
    assert leader(name="z") == "a", "a stranger"
