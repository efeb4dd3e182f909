"""How a volunteer gets into a run by invitation, stays there, and is shown out; and what an organiser has given."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from opendiloco.errors import SettingsError
from opendiloco.volunteer import admission as module
from opendiloco.volunteer.admission import TICKET_FILE, IssuedTickets, _show_ticket, read_ticket, wait_for_refusal
from peers.errors import AdmissionError
from peers.presence.admission import RunAdmission
from peers.values.identity import Identity
from peers.values.tickets import Revocations, Ticket
from peers.values.wire import pack

RUN = "tiny-" + "a" * 32
ORGANISER, ARCHIVE, ME, OTHER = (Identity.generate() for _ in range(4))
LATER = int(time.time()) + 10**6  # also where all tests take longer than usual


def run_admission(revoked: tuple[bytes, ...] = ()) -> RunAdmission:
    admission = RunAdmission(RUN, ORGANISER.peer_id, [ARCHIVE.peer_id])
    if revoked:
        admission.revoke(pack(Revocations.sign(RUN, 1, revoked, ORGANISER)))
    return admission


def enter(ticket: Ticket | None, kept: Path | None = None, key: Identity = ME) -> RunAdmission:
    admission = run_admission()
    _show_ticket(admission, key.peer_id, kept, ticket)
    return admission


@pytest.mark.parametrize("to", [None, ME.peer_id], ids=["bearer", "peer"])
def test_with_a_ticket(to: str | None) -> None:
    shown = enter(Ticket.give(RUN, ORGANISER, LATER, to)).ticket
    assert run_admission().admit(ME.peer_id, shown, time.time()) == "", "as others see it"


@pytest.mark.parametrize("named", [ORGANISER, ARCHIVE], ids=["organiser", "archive"])
def test_the_peers_that_the_manifest_names_need_none(named: Identity) -> None:
    for given in (None, Ticket.give(RUN, ORGANISER, LATER, OTHER.peer_id)):
        assert enter(given, key=named).ticket == b""


@pytest.mark.parametrize(
    ("ticket", "reason"),
    [
        (None, f"is by invitation, and this machine ({ME.peer_id}) has no ticket"),
        (Ticket.give("other-" + "a" * 32, ORGANISER, LATER), f"not for {RUN}"),
        (Ticket.give(RUN, ORGANISER, LATER, OTHER.peer_id), "this machine is"),
        (Ticket.give(RUN, OTHER, LATER, ME.peer_id), "not signed by the run's organiser"),
        (Ticket.give(RUN, OTHER, LATER), "not signed by the run's organiser"),
        (Ticket.give(RUN, ORGANISER, int(time.time()) - 5, ME.peer_id), "its ticket is expired"),
    ],
    ids=["none", "another run", "another peer", "forged", "forged for anybody", "expired"],
)
def test_without_a_good_one(ticket: Ticket | None, reason: str) -> None:
    with pytest.raises(AdmissionError) as caught:
        enter(ticket)
    assert reason in str(caught.value)
    assert caught.value.exit_code == 13


def test_a_revoked_one() -> None:
    ticket = Ticket.give(RUN, ORGANISER, LATER)
    with pytest.raises(AdmissionError, match="its ticket was revoked"):
        _show_ticket(run_admission((ticket.id,)), ME.peer_id, None, ticket)


def test_the_ticket_is_needed_once(tmp_path: Path) -> None:
    kept, ticket = tmp_path / TICKET_FILE, Ticket.give(RUN, ORGANISER, LATER)
    before = enter(ticket, kept).ticket
    assert enter(None, kept).ticket == before
    with pytest.raises(AdmissionError, match="its ticket was revoked"):
        _show_ticket(run_admission((ticket.id,)), ME.peer_id, kept, None)
    another = Ticket.give(RUN, ORGANISER, LATER, ME.peer_id)
    enter(another, kept)
    assert enter(None, kept).ticket == another.shown_by(ME.peer_id), "a newer one takes its place"
    kept.write_bytes(b"junk")
    with pytest.raises(AdmissionError, match="its ticket is not valid"):
        enter(None, kept)


def test_tickets_as_text_and_as_files(tmp_path: Path) -> None:
    ticket, file = Ticket.give(RUN, ORGANISER, LATER), tmp_path / "ticket.txt"
    file.write_text(f"{ticket}\n")
    assert read_ticket(str(ticket)) == read_ticket(str(file)) == ticket
    for wrong in ("nowhere.txt", str(ticket)[:-20], str(tmp_path)):
        with pytest.raises(AdmissionError, match="is not a ticket"):
            read_ticket(wrong)


class TestStaying:
    def stay(self, admission: RunAdmission, monkeypatch: pytest.MonkeyPatch, seconds: float = 5.0) -> str:
        monkeypatch.setattr(module, "LOOK", 0.0)

        async def scenario() -> str:
            async with asyncio.timeout(seconds):
                return str(await wait_for_refusal(admission, ME.peer_id))

        return asyncio.run(scenario())

    def test_as_long_as_the_ticket_is_good(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(TimeoutError):
            self.stay(enter(Ticket.give(RUN, ORGANISER, LATER)), monkeypatch, 0.05)

    def test_until_the_ticket_is_revoked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ticket = Ticket.give(RUN, ORGANISER, LATER)
        admission = enter(ticket)
        admission.revoke(pack(Revocations.sign(RUN, 1, (ticket.id,), ORGANISER)))
        assert "its ticket was revoked" in self.stay(admission, monkeypatch)

    def test_until_it_is_expired_by_our_own_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        admission = enter(Ticket.give(RUN, ORGANISER, LATER))
        monkeypatch.setattr("opendiloco.volunteer.admission.time.time", lambda: LATER + 1.0)
        assert "its ticket is expired" in self.stay(admission, monkeypatch)


class TestGivenTickets:
    def test_they_are_remembered(self, tmp_path: Path) -> None:
        given, tickets = IssuedTickets(RUN, ORGANISER.peer_id, tmp_path), [Ticket.give(RUN, ORGANISER, LATER)] * 2
        assert given.tickets == []
        for ticket in tickets:
            given.add(ticket)
        assert given.tickets == tickets

    def test_lists_of_revoked_ones_grow(self, tmp_path: Path) -> None:
        given = IssuedTickets(RUN, ORGANISER.peer_id, tmp_path)
        assert given.revocations is None
        given.revoke(["01" * 8], ORGANISER)
        told = Revocations.sign(RUN, 7, (b"\2" * 8,), ORGANISER)
        newest = given.revoke(["03" * 8, "01" * 8], ORGANISER, told)
        assert (newest.number, newest.revoked) == (8, (b"\1" * 8, b"\2" * 8, b"\3" * 8))
        assert given.revocations == newest

    @pytest.mark.parametrize("text", ["zzzz", "35b9", "00" * 9, ""])
    def test_what_is_no_tickets_id_is_not_revoked(self, tmp_path: Path, text: str) -> None:
        """Regression: a part of one was signed, and then seemed to be a bug."""
        with pytest.raises(SettingsError, match="is not the id of a ticket"):
            IssuedTickets(RUN, ORGANISER.peer_id, tmp_path).revoke([text], ORGANISER)
