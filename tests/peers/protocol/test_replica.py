"""The replica alone: entries in order, and the ways back to where the others are."""

from __future__ import annotations

import pytest

from peers.errors import LocalProtocolError
from peers.log.certificate import Proof
from peers.log.header import Header, Member
from peers.log.lineage import RECENT_ENTRIES
from peers.log.state import LogState
from peers.presence.heartbeat import PeerState
from peers.presence.presence import Presence
from peers.protocol.desk import Desk
from peers.protocol.events import (
    Applied,
    Apply,
    Digested,
    Dropped,
    FetchPayload,
    FetchSnapshot,
    Send,
    SnapshotFailed,
    SnapshotRestored,
    TokensLost,
)
from peers.protocol.internal import EntryMade, FarBehind, NobodyAhead
from peers.protocol.messages import Commit, Inquire
from peers.protocol.replica import Replica, ReplicaState
from peers.simulator.simulated_keys import SimulatedKeys
from peers.values.wire import digest_of
from tests.peers.builders import LOG, PAYLOAD, SETTINGS, SIZE, STATE, TOKENS, beat, first_log, inspect, of

NEXT = digest_of(b"the state after the entry")


def roster_of(log: LogState) -> tuple[Member, ...]:
    return log.last.roster if log.last else ()


def after(log: LogState, payload: bytes = PAYLOAD) -> LogState:
    """All that have a lease have trained it."""
    roster = [one.model_copy(update={"samples": log.leases[one.peer]}) for one in roster_of(log)]
    return log.append(log.next_header(roster, payload)) if roster else first_log()


class Place:
    """b's replica, at some place in the log, beside a and c."""

    def __init__(self, log: LogState = LOG) -> None:
        self.desk = Desk("b", SETTINGS, SIZE, 0.0, incarnation=0, keys=SimulatedKeys("b"), inspect=inspect)
        self.presence = Presence("b", 10.0, 40.0, bar=20.0, now=0.0)
        self.replica = Replica(self.desk, self.presence, log, STATE)
        self.beats = 0

    def see(self, log: LogState, names: str = "ac", state: PeerState = PeerState.TRAINING) -> None:
        self.beats += 1
        self.presence.membership.observe([beat(name, log, state, self.beats) for name in names], 0.0)

    def step(self, log: LogState) -> None:
        assert log.last is not None
        self.replica.take(EntryMade(log.last, None, keeps_work=False))
        self.replica.take(Applied(log.last))
        self.replica.take(Digested(log.last, NEXT))
        self.desk.take_effects()


def told(header: Header) -> Commit:
    return Commit(header=header, certificate=None)


def test_an_entry_is_applied_and_then_has_a_digest() -> None:
    place, log = Place(), after(LOG)
    assert log.last is not None
    place.replica.take(EntryMade(log.last, None, keeps_work=True))
    assert of(place.desk.take_effects(), Apply) == [Apply(log.last, True)]
    assert (place.replica.log, place.replica.settled) == (log, LOG)
    place.replica.take(Applied(log.last))
    assert not place.replica.is_settled, "heartbeats name the place before, until the digest is there"
    place.replica.take(Digested(log.last, NEXT))
    assert place.replica.is_settled
    assert place.replica.state_digest == NEXT


def test_a_digest_of_another_entry_is_a_bug_of_ours() -> None:
    place, log = Place(), after(LOG)
    assert log.last is not None
    with pytest.raises(LocalProtocolError, match="was not applied last"):
        place.replica.take(Digested(log.last, NEXT))


def test_a_few_entries_behind_it_asks_what_followed_and_replays_that() -> None:
    place, log = Place(), after(after(LOG))
    place.see(log)
    assert place.replica.catch_up() is None
    assert of(place.desk.take_effects(), Send) == [Send("c", Inquire(position=LOG.position))]
    first = after(LOG).last
    assert first is not None
    behind = place.replica.follow("c", told(first), proof=Proof(True, 2), was_asked=False)
    assert behind is not None
    assert behind.donors == ("a", "c")
    place.replica.take(behind)
    assert of(place.desk.take_effects(), FetchPayload) == [FetchPayload(first, ("a", "c"))]
    place.replica.take(EntryMade(first, None, keeps_work=False))
    assert place.replica.log.last == first


def test_nobody_is_followed_who_is_not_further_on_unless_it_was_asked() -> None:
    place, first = Place(), after(LOG).last
    assert first is not None
    place.see(LOG)
    assert place.replica.follow("a", told(first), proof=Proof(True, 2), was_asked=False) is None
    behind = place.replica.follow("a", told(first), proof=Proof(True, 2), was_asked=True)
    assert behind is not None
    assert behind.donors == ("a",)
    assert place.replica.follow("z", told(first), proof=Proof(True, 2), was_asked=True) is None


def test_an_entry_that_does_not_follow_is_dropped_with_its_senders_name() -> None:
    place = Place()
    place.see(after(after(LOG)))
    second = after(after(LOG)).last
    assert second is not None
    place.beats = 2
    place.see(after(after(after(LOG))))
    assert place.replica.follow("a", told(second), proof=Proof(True, 2), was_asked=False) is None
    assert [one.peer for one in of(place.desk.take_effects(), Dropped)] == ["a"]


def far_from(log: LogState, entries: int) -> LogState:
    for _ in range(entries):
        log = after(log)
    return log


def test_far_behind_it_takes_a_state_and_then_replays() -> None:
    place, log = Place(), far_from(LOG, SETTINGS.snapshot_every + 1)
    place.see(log)
    far = place.replica.catch_up()
    assert far == FarBehind("c", 1)
    place.replica.take(far)
    assert of(place.desk.take_effects(), FetchSnapshot) == [FetchSnapshot("c", ("a",), 1)]
    place.replica.take(SnapshotRestored("c", first_log().last, NEXT))
    assert place.replica.state is ReplicaState.LEVEL
    assert place.replica.log.position == first_log().position
    place.desk.take_effects()
    assert place.replica.catch_up() is None, "it has a snapshot: from here on it asks what followed"
    assert of(place.desk.take_effects(), Send)


def test_a_snapshot_must_be_so_new_that_what_followed_is_known() -> None:
    place, log = Place(), far_from(LOG, 3)
    place.see(log.at(log.last), names="a")
    heartbeat = beat("c", log, sequence=9, index=1000)
    place.presence.membership.observe([heartbeat, beat("d", log, PeerState.ARCHIVING, 9, index=1000)], 0.0)
    assert place.replica.far_behind("c").least == 1000 - RECENT_ENTRIES // 2
    assert place.replica.far_behind("d").least == 1, "archives know everything"


def test_a_donor_that_failed_is_asked_again_only_if_there_is_no_other() -> None:
    place, log = Place(), far_from(LOG, SETTINGS.snapshot_every + 1)
    place.see(log)
    for donor, distrusted in (("c", {"c"}), ("a", {"c"})):
        place.replica.take(FarBehind(donor))
        place.replica.take(SnapshotFailed(donor, "gone"))
        assert place.presence.distrusted == distrusted


def test_who_leaves_a_lineage_loses_its_own_tokens_in_it() -> None:
    place = Place()
    place.step(after(LOG))
    other = LOG.append(LOG.next_header(roster_of(first_log()), NEXT))
    place.replica.take(FarBehind("a"))
    place.replica.take(SnapshotRestored("a", other.last, NEXT, (other.position.head,)))
    [lost] = of(place.desk.take_effects(), TokensLost)
    assert (lost.what, lost.tokens) == ("entries", TOKENS)


def test_what_it_caught_up_with_may_be_gone() -> None:
    place, log = Place(), after(LOG)
    place.see(after(log))
    assert log.last is not None
    behind = place.replica.follow("a", told(log.last), proof=Proof(True, 2), was_asked=False)
    assert behind is not None
    place.replica.take(behind)
    place.replica.take(NobodyAhead())
    assert (place.replica.state, place.replica.replaying) == (ReplicaState.LEVEL, None)
