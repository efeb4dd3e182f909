"""Who is admitted to a run by invitation: tickets, and what becomes of those that are not good any more."""

from __future__ import annotations

import pytest

from peers.errors import AdmissionError
from peers.presence.admission import PRESENT, RunAdmission
from peers.presence.heartbeat import PeerState
from peers.values.identity import Identity
from peers.values.tickets import GRACE, Revocations, Ticket
from peers.values.wire import pack
from tests.peers.presence.beaters import RUN, Beater, Clock

ORGANISER, ARCHIVE, FRIEND, STRANGER, THIRD = (Identity.generate() for _ in range(5))
NOW = 1_800_000_000.0
LATER = int(NOW) + 1000


def run_admission() -> RunAdmission:
    return RunAdmission(RUN, ORGANISER.peer_id, [ARCHIVE.peer_id])


def is_admitted(admission: RunAdmission, peer: Identity, wall: float) -> bool:
    try:
        admission.check(peer.peer_id, wall)
    except AdmissionError:
        return False
    return True


def own_ticket(peer: Identity, expires: int = LATER) -> bytes:
    return Ticket.give(RUN, ORGANISER, expires, to=peer.peer_id).shown_by(peer.peer_id)


class TestTickets:
    def test_a_good_one(self) -> None:
        admission = run_admission()
        assert admission.admit(FRIEND.peer_id, own_ticket(FRIEND), NOW) == ""
        assert is_admitted(admission, FRIEND, NOW + PRESENT - 1)
        assert not is_admitted(admission, FRIEND, NOW + PRESENT), "it may be gone"

    @pytest.mark.parametrize("named", [ORGANISER, ARCHIVE], ids=["organiser", "archive"])
    def test_the_peers_that_the_manifest_names_need_none(self, named: Identity) -> None:
        assert run_admission().admit(named.peer_id, b"", NOW) == ""
        assert is_admitted(run_admission(), named, NOW)

    @pytest.mark.parametrize(
        ("ticket", "reason"),
        [
            (b"", "it shows no ticket"),
            (b"junk", "is not valid: it cannot be read"),
            (own_ticket(FRIEND), f"it is for the peer {FRIEND.peer_id}"),
            (Ticket.give(RUN, STRANGER, LATER, to=STRANGER.peer_id).shown_by(STRANGER.peer_id), "not signed by"),
            (own_ticket(STRANGER, int(NOW - GRACE) - 1), "its ticket is expired"),
        ],
        ids=["none", "junk", "another's", "forged", "expired"],
    )
    def test_bad_ones(self, ticket: bytes, reason: str) -> None:
        admission = run_admission()
        assert reason in admission.admit(STRANGER.peer_id, ticket, NOW)
        with pytest.raises(AdmissionError, match="by invitation") as caught:
            admission.check(STRANGER.peer_id, NOW)
        assert "Ask the person who gave you the ticket" in caught.value.remedy

    def test_clocks_may_differ_by_minutes(self) -> None:
        admission = run_admission()
        assert admission.admit(FRIEND.peer_id, own_ticket(FRIEND), LATER + GRACE - 1) == ""
        assert not is_admitted(admission, FRIEND, LATER + GRACE + 1)

    def test_revoked_ones(self) -> None:
        admission, ticket = run_admission(), Ticket.give(RUN, ORGANISER, LATER, to=FRIEND.peer_id)
        shown = ticket.shown_by(FRIEND.peer_id)
        admission.admit(FRIEND.peer_id, shown, NOW)
        assert admission.number == 0
        assert admission.revoke(pack(Revocations.sign(RUN, 2, (ticket.id,), ORGANISER)))
        assert admission.number == 2
        assert not is_admitted(admission, FRIEND, NOW)
        assert admission.admit(FRIEND.peer_id, shown, NOW) == "its ticket was revoked"
        assert admission.admit(FRIEND.peer_id, own_ticket(FRIEND, LATER + 1), NOW) == "", "another one is good"
        assert not admission.revoke(pack(Revocations.sign(RUN, 1, (), ORGANISER))), "an older list changes nothing"

    def test_with_a_bearer_ticket_all_that_used_it_are_shown_out(self) -> None:
        admission, ticket = run_admission(), Ticket.give(RUN, ORGANISER, LATER)
        for peer in (FRIEND, STRANGER, THIRD):
            assert admission.admit(peer.peer_id, ticket.shown_by(peer.peer_id), NOW) == ""
        admission.revoke(pack(Revocations.sign(RUN, 1, (ticket.id,), ORGANISER)))
        for peer in (FRIEND, STRANGER, THIRD):
            assert not is_admitted(admission, peer, NOW)

    def test_of_many_peers_the_newest_are_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("peers.presence.admission.SEEN_LIMIT", 2)
        admission, ticket = run_admission(), Ticket.give(RUN, ORGANISER, LATER)
        for peer in (FRIEND, STRANGER, FRIEND, THIRD):
            admission.admit(peer.peer_id, ticket.shown_by(peer.peer_id), NOW)
        assert [is_admitted(admission, peer, NOW) for peer in (FRIEND, STRANGER, THIRD)] == [True, False, True]


class TestBeats:
    """Peers hear, and answer, only who is admitted."""

    def party(self, *tickets: bytes | None) -> tuple[Clock, list[Beater]]:
        clock = Clock()
        peers = [Beater(clock, one) for one in (FRIEND, STRANGER, THIRD)[: len(tickets)]]
        for peer, ticket in zip(peers, tickets, strict=True):
            peer.beats.admission = run_admission()
            peer.say(ticket=ticket or b"")
        return clock, peers

    def test_guests_hear_each_other(self) -> None:
        _, (friend, other) = self.party(own_ticket(FRIEND), own_ticket(STRANGER))
        friend.tells(other)
        assert (set(friend.knows()), set(other.knows())) == ({other.name}, {friend.name})

    @pytest.mark.parametrize("ticket", [None, own_ticket(FRIEND)], ids=["none", "another's"])
    def test_a_stranger_gets_no_answer(self, ticket: bytes | None) -> None:
        _, (friend, stranger) = self.party(own_ticket(FRIEND), ticket)
        with pytest.raises(AdmissionError, match=f"{stranger.name} is not admitted to {RUN}"):
            stranger.tells(friend)
        friend.finds(stranger)
        assert set(friend.knows()) == set()

    def test_whoever_only_looks_is_a_stranger_but_for_those_that_the_manifest_names(self) -> None:
        clock, (friend,) = self.party(own_ticket(FRIEND))
        with pytest.raises(AdmissionError):
            Beater(clock).asks(friend)
        for named in (ORGANISER, ARCHIVE):
            assert Beater(clock, named).asks(friend) == {friend.name}

    def test_a_stranger_that_a_guest_hands_out_is_passed_over(self) -> None:
        _, (friend, other, stranger) = self.party(own_ticket(FRIEND), own_ticket(STRANGER), None)
        other.beats.admission = None  # it does not know, or does not care
        other.finds(stranger)
        friend.tells(other)
        assert friend.asks(other) == {friend.name, other.name, stranger.name}
        assert set(friend.knows()) == {other.name}

    def test_who_loses_the_ticket_is_seen_out(self) -> None:
        given = Ticket.give(RUN, ORGANISER, LATER, to=STRANGER.peer_id)
        clock, (friend, other) = self.party(own_ticket(FRIEND), given.shown_by(STRANGER.peer_id))
        friend.tells(other)
        other.tells(friend)
        admission = friend.beats.admission
        assert admission is not None
        admission.revoke(pack(Revocations.sign(RUN, 1, (given.id,), ORGANISER)))
        friend.beats.see_out(clock.wall)
        assert set(friend.knows()) == set()
        clock.now += 1.0
        other.say(state=PeerState.READY, ticket=given.shown_by(STRANGER.peer_id))
        with pytest.raises(AdmissionError, match="revoked"):
            other.tells(friend)
