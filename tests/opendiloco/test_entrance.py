"""How a volunteer gets into a run by invitation, stays there, and is shown out."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from opendiloco import entrance as module
from opendiloco.entrance import TICKET_FILE, Entrance, read_ticket
from peers.errors import AdmissionError
from peers.presence.guests import GuestList
from peers.values.identity import Identity
from peers.values.tickets import Revocations, Ticket, place_of
from peers.values.wire import pack

RUN = "tiny-" + "a" * 32
ORGANISER, ME, OTHER = (Identity.generate() for _ in range(3))
SMALLER, LARGER = sorted((ME, OTHER), key=lambda key: key.peer_id)
LATER, BEFORE = 4_000_000_000, 1_000_000_000


def guest_list() -> GuestList:
    return GuestList(RUN, ORGANISER.peer_id)


def enter(
    ticket: Ticket | None, guests: GuestList | None = None, key: Identity = ME, path: Path | None = None
) -> GuestList:
    guests = guests or guest_list()
    Entrance(guests, key, path, ticket).take_place()
    return guests


def test_with_a_ticket() -> None:
    for ticket in (Ticket.give(RUN, ORGANISER, LATER, to=ME.peer_id), Ticket.give(RUN, ORGANISER, LATER, 5)):
        guests = enter(ticket)
        assert guests.refusal(ME.peer_id, guests.chain, time.time()) == ""
        assert guest_list().admit(ME.peer_id, guests.chain, time.time()) == "", "as others see it"


def test_the_organiser_needs_none() -> None:
    assert enter(None, key=ORGANISER).chain == b""
    full, guests = Ticket.give(RUN, ORGANISER, LATER), guest_list()
    guests.admit(OTHER.peer_id, full.chain_for(OTHER.peer_id), time.time())
    assert enter(full, guests, key=ORGANISER).chain == b"", "it takes no place of a ticket that it is given by mistake"


@pytest.mark.parametrize(
    ("ticket", "reason"),
    [
        (None, "is by invitation. Ask its organiser for a ticket; join with --ticket"),
        (Ticket.give("other-" + "a" * 32, ORGANISER, LATER), f"not for {RUN}"),
        (Ticket.give(RUN, ORGANISER, LATER, to=OTHER.peer_id), "this machine is"),
        (Ticket.give(RUN, OTHER, LATER, to=ME.peer_id), "not signed by the run's organiser"),
        (Ticket.give(RUN, OTHER, LATER), "not signed by the run's organiser"),
        (Ticket.give(RUN, ORGANISER, BEFORE, to=ME.peer_id), "its ticket is expired"),
    ],
    ids=["none", "another run", "another peer", "forged", "forged for anybody", "expired"],
)
def test_without_a_good_one(ticket: Ticket | None, reason: str) -> None:
    with pytest.raises(AdmissionError) as caught:
        enter(ticket)
    assert reason in str(caught.value)
    assert caught.value.exit_code == 13


def test_a_revoked_one() -> None:
    guests, ticket = guest_list(), Ticket.give(RUN, ORGANISER, LATER)
    guests.revoke(pack(Revocations.sign(RUN, 1, (ticket.id,), ORGANISER)))
    with pytest.raises(AdmissionError, match="revoked"):
        enter(ticket, guests)


def test_the_ticket_is_needed_once(tmp_path: Path) -> None:
    path, ticket = tmp_path / TICKET_FILE, Ticket.give(RUN, ORGANISER, LATER, 100)
    before = enter(ticket, path=path).chain
    assert enter(None, path=path).chain == before
    assert enter(ticket, path=path).chain == before, "its place is still its own"
    path.write_bytes(b"junk")
    with pytest.raises(AdmissionError, match="by invitation"):
        enter(None, path=path)


def test_places_that_others_have_are_passed_over() -> None:
    guests, ticket = guest_list(), Ticket.give(RUN, ORGANISER, LATER, 3)
    for number in (0, 2):
        other = Identity.generate().peer_id
        assert guests.admit(other, ticket.chain_for(other, number), time.time()) == ""
    assert enter(ticket, guests).chain == ticket.chain_for(ME.peer_id, 1)
    with pytest.raises(AdmissionError, match="is taken by"):
        enter(ticket, guests, OTHER)


def test_tickets_as_text_and_as_files(tmp_path: Path) -> None:
    ticket, file = Ticket.give(RUN, ORGANISER, LATER), tmp_path / "ticket.txt"
    file.write_text(f"{ticket}\n")
    assert read_ticket(str(ticket)) == read_ticket(str(file)) == ticket
    for wrong in ("nowhere.txt", str(ticket)[:-20], str(tmp_path)):
        with pytest.raises(AdmissionError, match="is not a ticket"):
            read_ticket(wrong)


class TestStaying:
    """`failure` returns when there is nothing for it but to go."""

    def stay(self, entrance: Entrance, monkeypatch: pytest.MonkeyPatch, seconds: float = 5.0) -> str:
        monkeypatch.setattr(module, "LOOK", 0.0)

        async def scenario() -> str:
            async with asyncio.timeout(seconds):
                return str(await entrance.failure())

        return asyncio.run(scenario())

    def entered(self, ticket: Ticket, key: Identity = ME) -> tuple[Entrance, GuestList]:
        guests = guest_list()
        entrance = Entrance(guests, key, None, ticket)
        entrance.take_place()
        return entrance, guests

    def test_until_the_ticket_is_revoked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ticket = Ticket.give(RUN, ORGANISER, LATER)
        entrance, guests = self.entered(ticket)
        guests.revoke(pack(Revocations.sign(RUN, 1, (ticket.id,), ORGANISER)))
        assert "its ticket was revoked" in self.stay(entrance, monkeypatch)

    def test_until_it_is_expired_by_our_own_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entrance, _ = self.entered(Ticket.give(RUN, ORGANISER, LATER))
        monkeypatch.setattr("opendiloco.entrance.time.time", lambda: LATER + 1.0)
        assert "its ticket is expired" in self.stay(entrance, monkeypatch)

    def test_two_newcomers_with_one_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One of them goes, the same one as either sees it."""
        ticket = Ticket.give(RUN, ORGANISER, LATER)
        entrance, guests = self.entered(ticket, LARGER)
        guests.admit(SMALLER.peer_id, ticket.chain_for(SMALLER.peer_id), time.time())
        assert f"is taken by {SMALLER.peer_id}, and no other is free" in self.stay(entrance, monkeypatch)
        entrance, guests = self.entered(ticket, SMALLER)
        guests.admit(LARGER.peer_id, ticket.chain_for(LARGER.peer_id), time.time())
        with pytest.raises(TimeoutError):
            self.stay(entrance, monkeypatch, 0.05)

    def test_one_takes_another_place_if_there_is_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ticket = Ticket.give(RUN, ORGANISER, LATER, 2)
        entrance, guests = self.entered(ticket, LARGER)
        before = guests.chain
        [ours] = [number for number in (0, 1) if ticket.chain_for(LARGER.peer_id, number) == before]
        guests.admit(SMALLER.peer_id, ticket.chain_for(SMALLER.peer_id, ours), time.time())
        with pytest.raises(TimeoutError):
            self.stay(entrance, monkeypatch, 0.05)
        assert guests.chain == ticket.chain_for(LARGER.peer_id, 1 - ours)
        assert guests.rival is None

    @pytest.mark.parametrize("me", [SMALLER, LARGER], ids=["smaller", "larger"])
    def test_two_founders_with_one_place(self, me: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each is the only member of its own log, and it may be that only one of them hears of the other."""
        monkeypatch.setattr(module, "CONTESTED", 0.01)
        monkeypatch.setattr(module, "YOUNG", 0.0)
        entrance, guests, ours = self.contested(me, places=2, roster=(me.peer_id,))
        with pytest.raises(TimeoutError):
            self.stay(entrance, monkeypatch, 0.1)
        assert place_of(guests.chain, RUN, ORGANISER.peer_id).number == 1 - ours

    def test_two_founders_with_the_only_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A founder of today is not shown out by whoever comes with its ticket tomorrow."""
        monkeypatch.setattr(module, "CONTESTED", 0.0)
        entrance, _, _ = self.contested(LARGER, places=1, roster=(LARGER.peer_id,))
        assert "and no other is free" in self.stay(entrance, monkeypatch)
        monkeypatch.setattr(module, "YOUNG", 0.0)
        entrance, _, _ = self.contested(LARGER, places=1, roster=(LARGER.peer_id,))
        with pytest.raises(TimeoutError):
            self.stay(entrance, monkeypatch, 0.05)

    def test_a_member_among_others_keeps_its_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "CONTESTED", 0.0)
        entrance, guests, ours = self.contested(LARGER, places=2, roster=(LARGER.peer_id, ORGANISER.peer_id))
        with pytest.raises(TimeoutError):
            self.stay(entrance, monkeypatch, 0.05)
        assert place_of(guests.chain, RUN, ORGANISER.peer_id).number == ours

    def contested(self, me: Identity, places: int, roster: tuple[str, ...]) -> tuple[Entrance, GuestList, int]:
        """Return a peer in this roster whose place another one shows, and the place."""
        ticket = Ticket.give(RUN, ORGANISER, LATER, places)
        entrance, guests = self.entered(ticket, me)
        entrance.roster = lambda: roster
        ours = place_of(guests.chain, RUN, ORGANISER.peer_id).number
        rival = SMALLER if me is LARGER else LARGER
        guests.admit(rival.peer_id, ticket.chain_for(rival.peer_id, ours), time.time())
        assert guests.rival == rival.peer_id
        return entrance, guests, ours

    def test_the_log_decides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ticket = Ticket.give(RUN, ORGANISER, LATER)
        for roster, goes in (((LARGER.peer_id,), True), ((SMALLER.peer_id,), False)):
            entrance, guests = self.entered(ticket, SMALLER)
            entrance.roster = lambda roster=roster: roster  # type: ignore[misc]
            guests.admit(LARGER.peer_id, ticket.chain_for(LARGER.peer_id), time.time())
            if goes:
                assert "is taken by" in self.stay(entrance, monkeypatch)
            else:
                with pytest.raises(TimeoutError):
                    self.stay(entrance, monkeypatch, 0.05)
