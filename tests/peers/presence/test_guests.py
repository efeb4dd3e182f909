"""Who is admitted to a run by invitation: tickets, places, and what becomes of those that are not good any more."""

from __future__ import annotations

import pytest

from peers.errors import AdmissionError
from peers.presence.guests import PLACE_KEPT, PRESENT, GuestList
from peers.presence.heartbeat import PeerState
from peers.values.identity import Identity
from peers.values.tickets import GRACE, Revocations, Ticket
from peers.values.wire import pack
from tests.peers.presence.whispers import RUN, Clock, Whisperer

ORGANISER, SPONSOR, FRIEND, STRANGER, THIRD = (Identity.generate() for _ in range(5))
NOW = 1_800_000_000.0
LATER = int(NOW) + 1000


def guest_list() -> GuestList:
    return GuestList(RUN, ORGANISER.peer_id)


def own_ticket(peer: Identity, expires: int = LATER) -> bytes:
    return Ticket.give(RUN, ORGANISER, expires, to=peer.peer_id).chain_for(peer.peer_id)


class TestTickets:
    def test_a_good_one(self) -> None:
        guests = guest_list()
        assert guests.admit(FRIEND.peer_id, own_ticket(FRIEND), NOW) == ""
        assert guests.is_admitted(FRIEND.peer_id, NOW + PRESENT - 1)
        assert not guests.is_admitted(FRIEND.peer_id, NOW + PRESENT), "it may be gone"
        guests.check(FRIEND.peer_id, NOW)

    def test_the_organiser_needs_none(self) -> None:
        assert guest_list().admit(ORGANISER.peer_id, b"", NOW) == ""
        assert guest_list().is_admitted(ORGANISER.peer_id, NOW)

    @pytest.mark.parametrize(
        ("ticket", "reason"),
        [
            (b"", "it shows no ticket"),
            (b"junk", "proves nothing: it cannot be read"),
            (own_ticket(FRIEND), f"its ticket is for {FRIEND.peer_id}"),
            (Ticket.give(RUN, STRANGER, LATER, to=STRANGER.peer_id).chain_for(STRANGER.peer_id), "not signed by"),
            (own_ticket(STRANGER, int(NOW - GRACE) - 1), "its ticket is expired"),
        ],
        ids=["none", "junk", "another's", "forged", "expired"],
    )
    def test_bad_ones(self, ticket: bytes, reason: str) -> None:
        guests = guest_list()
        assert reason in guests.admit(STRANGER.peer_id, ticket, NOW)
        with pytest.raises(AdmissionError, match="by invitation") as caught:
            guests.check(STRANGER.peer_id, NOW)
        assert "Ask whoever gave you the ticket" in caught.value.remedy

    def test_clocks_may_differ_by_minutes(self) -> None:
        guests = guest_list()
        assert guests.admit(FRIEND.peer_id, own_ticket(FRIEND), LATER + GRACE - 1) == ""
        assert not guests.is_admitted(FRIEND.peer_id, LATER + GRACE + 1)

    def test_revoked_ones(self) -> None:
        guests, ticket = guest_list(), Ticket.give(RUN, ORGANISER, LATER, to=FRIEND.peer_id)
        chain = ticket.chain_for(FRIEND.peer_id)
        guests.admit(FRIEND.peer_id, chain, NOW)
        assert guests.number == 0
        assert guests.revoke(pack(Revocations.sign(RUN, 2, (ticket.id,), ORGANISER)))
        assert guests.number == 2
        assert not guests.is_admitted(FRIEND.peer_id, NOW)
        assert guests.admit(FRIEND.peer_id, chain, NOW) == "its ticket was revoked"
        assert guests.admit(FRIEND.peer_id, own_ticket(FRIEND, LATER + 1), NOW) == "", "another one is good"
        assert not guests.revoke(pack(Revocations.sign(RUN, 1, (), ORGANISER))), "an older list changes nothing"

    def test_with_a_quota_all_that_was_signed_with_it_is_revoked(self) -> None:
        guests, quota = guest_list(), Ticket.give(RUN, ORGANISER, LATER, 9, SPONSOR.peer_id)
        chain = quota.give_on(SPONSOR, LATER, 1, 3).chain_for(FRIEND.peer_id, 1)
        assert guests.admit(FRIEND.peer_id, chain, NOW) == ""
        guests.revoke(pack(Revocations.sign(RUN, 1, (quota.id,), ORGANISER)))
        assert guests.admit(FRIEND.peer_id, chain, NOW) == "its ticket was revoked"


class TestPlaces:
    def test_no_more_peers_than_a_ticket_has_places(self) -> None:
        guests, ticket = guest_list(), Ticket.give(RUN, ORGANISER, LATER, 2)
        first, second = ticket.chain_for(FRIEND.peer_id, 0), ticket.chain_for(STRANGER.peer_id, 1)
        assert guests.admit(FRIEND.peer_id, first, NOW) == guests.admit(STRANGER.peer_id, second, NOW) == ""
        for number, holder in ((0, FRIEND), (1, STRANGER)):
            reason = guests.admit(THIRD.peer_id, ticket.chain_for(THIRD.peer_id, number), NOW + 1)
            assert reason == f"place {number} of its ticket is taken by {holder.peer_id}"
        assert "places up to 3 of 2" in guests.admit(THIRD.peer_id, ticket.chain_for(THIRD.peer_id, 2), NOW)
        assert not guests.is_admitted(THIRD.peer_id, NOW)
        assert guests.taken(ticket.id, NOW) == {0, 1}

    def test_who_overspends_a_quota_gets_no_more_peers_in(self) -> None:
        guests, quota = guest_list(), Ticket.give(RUN, ORGANISER, LATER, 2, SPONSOR.peer_id)
        for friend in (FRIEND, STRANGER, THIRD):
            chain = quota.give_on(SPONSOR, LATER, 1, to=friend.peer_id).chain_for(friend.peer_id)
            guests.admit(friend.peer_id, chain, NOW)
        admitted = [guests.is_admitted(friend.peer_id, NOW) for friend in (FRIEND, STRANGER, THIRD)]
        assert admitted == [True, False, False]

    def test_a_peer_has_one_place_and_may_change_it(self) -> None:
        guests, ticket = guest_list(), Ticket.give(RUN, ORGANISER, LATER, 2)
        for number in (0, 1):
            assert guests.admit(FRIEND.peer_id, ticket.chain_for(FRIEND.peer_id, number), NOW) == ""
        assert guests.taken(ticket.id, NOW) == {1}
        assert guests.admit(STRANGER.peer_id, ticket.chain_for(STRANGER.peer_id, 0), NOW) == ""

    def test_a_place_is_kept_for_a_day(self) -> None:
        guests, ticket = guest_list(), Ticket.give(RUN, ORGANISER, LATER + 10**6)
        guests.admit(FRIEND.peer_id, ticket.chain_for(FRIEND.peer_id), NOW)
        another = ticket.chain_for(STRANGER.peer_id)
        assert "taken" in guests.admit(STRANGER.peer_id, another, NOW + PLACE_KEPT - 1)
        assert guests.admit(STRANGER.peer_id, another, NOW + PLACE_KEPT) == ""
        assert not guests.is_admitted(FRIEND.peer_id, NOW + PLACE_KEPT)

    def test_the_log_decides_whose_place_it_is(self) -> None:
        """Two of a ticket's peers may be heard of in another order elsewhere: whoever got into an entry is the one."""
        guests, ticket = guest_list(), Ticket.give(RUN, ORGANISER, LATER)
        mine, others = ticket.chain_for(FRIEND.peer_id), ticket.chain_for(STRANGER.peer_id)
        guests.admit(FRIEND.peer_id, mine, NOW)
        guests.incumbents = frozenset({STRANGER.peer_id})
        assert guests.admit(STRANGER.peer_id, others, NOW) == ""
        assert "taken" in guests.admit(FRIEND.peer_id, mine, NOW)
        guests.incumbents = frozenset({STRANGER.peer_id, FRIEND.peer_id})
        assert "taken" in guests.admit(FRIEND.peer_id, mine, NOW)

    def test_who_claims_our_place_is_known(self) -> None:
        guests, ticket = guest_list(), Ticket.give(RUN, ORGANISER, LATER, 2)
        guests.show(FRIEND.peer_id, ticket.chain_for(FRIEND.peer_id))
        guests.admit(STRANGER.peer_id, ticket.chain_for(STRANGER.peer_id, 1), NOW)
        assert guests.rival is None
        guests.admit(THIRD.peer_id, ticket.chain_for(THIRD.peer_id, 0), NOW)
        assert guests.rival == THIRD.peer_id
        guests.admit(THIRD.peer_id, ticket.chain_for(THIRD.peer_id, 1), NOW)
        assert guests.rival is None, "it claims another place now"


class TestGossip:
    """Peers hear, and answer, only who is admitted."""

    def party(self, *tickets: bytes | None) -> tuple[Clock, list[Whisperer]]:
        clock = Clock()
        peers = [Whisperer(clock, one) for one in (FRIEND, STRANGER, THIRD)[: len(tickets)]]
        for peer, ticket in zip(peers, tickets, strict=True):
            peer.gossip.guests = GuestList(RUN, ORGANISER.peer_id)
            peer.say(ticket=ticket or b"")
        return clock, peers

    def test_guests_hear_of_each_other(self) -> None:
        _, (friend, other) = self.party(own_ticket(FRIEND), own_ticket(STRANGER))
        friend.tells(other)
        assert set(friend.knows()) == set(other.knows()) == {friend.name, other.name}

    @pytest.mark.parametrize("ticket", [None, own_ticket(FRIEND)], ids=["none", "another's"])
    def test_nobody_answers_a_stranger(self, ticket: bytes | None) -> None:
        _, (friend, stranger) = self.party(own_ticket(FRIEND), ticket)
        with pytest.raises(AdmissionError, match=f"{stranger.name} is not admitted to {RUN}"):
            stranger.tells(friend)
        friend.finds(stranger)
        assert set(friend.knows()) == {friend.name}

    def test_whoever_only_looks_is_a_stranger_but_for_the_organiser(self) -> None:
        clock, (friend,) = self.party(own_ticket(FRIEND))
        for looker in (Whisperer(clock), Whisperer(clock, ORGANISER)):
            looker.finds(friend)
            if looker.identity is ORGANISER:
                looker.tells(friend)
            else:
                with pytest.raises(AdmissionError):
                    looker.tells(friend)

    def test_what_a_guest_tells_of_strangers_is_passed_over(self) -> None:
        _, (friend, other, stranger) = self.party(own_ticket(FRIEND), own_ticket(STRANGER), None)
        other.gossip.guests = None  # it does not know, or does not care
        other.finds(stranger)
        other.tells(friend)
        assert set(friend.knows()) == {friend.name, other.name}

    def test_whose_place_is_taken_is_told_who_has_it(self) -> None:
        ticket = Ticket.give(RUN, ORGANISER, LATER, 2)
        chains = [ticket.chain_for(one.peer_id, 0) for one in (FRIEND, STRANGER)]
        _, (first, second) = self.party(*chains)
        assert second.gossip.guests is not None
        assert first.gossip.guests is not None
        first.gossip.guests.admit(first.name, chains[0], NOW)
        second.gossip.guests.show(second.name, chains[1])
        second.tells(first)
        assert set(first.knows()) == {first.name}
        assert second.gossip.guests.rival == first.name

    def test_who_loses_the_ticket_is_seen_out(self) -> None:
        given = Ticket.give(RUN, ORGANISER, LATER, to=STRANGER.peer_id)
        clock, (friend, other) = self.party(own_ticket(FRIEND), given.chain_for(STRANGER.peer_id))
        friend.tells(other)
        guests = friend.gossip.guests
        assert guests is not None
        guests.revoke(pack(Revocations.sign(RUN, 1, (given.id,), ORGANISER)))
        friend.gossip.see_out(clock.wall)
        assert set(friend.knows()) == {friend.name}
        clock.now += 1.0
        other.say(state=PeerState.READY, ticket=given.chain_for(STRANGER.peer_id))
        with pytest.raises(AdmissionError, match="revoked"):
            other.tells(friend)
