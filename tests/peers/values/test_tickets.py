"""Tickets: the organiser's signature admits a peer or bearers, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.errors import AdmissionError
from peers.values.identity import Identity
from peers.values.tickets import (
    LIST_BYTES,
    REVOKED_LIMIT,
    SHOWN_BYTES,
    Revocations,
    ShownTicket,
    Ticket,
    TicketError,
    _CheckedTicket,
    check_ticket,
)
from peers.values.wire import pack, unpack

RUN, OTHER_RUN = "tiny-" + "a" * 32, "tiny-" + "b" * 32
ORGANISER, FRIEND, STRANGER = (Identity.generate() for _ in range(3))
LATER = 2_000_000_000
FOR_FRIEND, FOR_ANYBODY = Ticket.give(RUN, ORGANISER, LATER, FRIEND.peer_id), Ticket.give(RUN, ORGANISER, LATER)


def check(shown: bytes, peer: Identity, run: str = RUN) -> _CheckedTicket:
    return check_ticket(shown, peer.peer_id, run, ORGANISER.peer_id)


def test_a_ticket_for_one_peer_admits_that_peer() -> None:
    shown = FOR_FRIEND.shown_by(FRIEND.peer_id)
    assert check(shown, FRIEND) == (FOR_FRIEND.id, LATER)
    assert FOR_FRIEND.peer == FRIEND.peer_id
    with pytest.raises(TicketError, match=f"it is for the peer {FRIEND.peer_id}"):
        check(shown, STRANGER)
    with pytest.raises(AdmissionError, match=f"for the peer {FRIEND.peer_id}; this machine is {STRANGER.peer_id}"):
        FOR_FRIEND.shown_by(STRANGER.peer_id)


def test_a_bearer_ticket_admits_everybody_who_has_its_text() -> None:
    assert FOR_ANYBODY.peer is None
    for peer in (FRIEND, STRANGER):
        assert check(FOR_ANYBODY.shown_by(peer.peer_id), peer) == (FOR_ANYBODY.id, LATER)


def test_a_bearer_ticket_that_was_seen_in_a_heartbeat_is_of_no_use() -> None:
    with pytest.raises(TicketError, match="its bearer has not signed the id of this peer"):
        check(FOR_ANYBODY.shown_by(FRIEND.peer_id), STRANGER)


def test_nobody_signs_on_what_was_given_to_one_peer() -> None:
    as_bearer = FOR_FRIEND.model_copy(update={"secret": FRIEND.seed})
    with pytest.raises(TicketError, match="not signed by the run's organiser"):
        check(as_bearer.shown_by(STRANGER.peer_id), STRANGER)


@pytest.mark.parametrize("to", [None, FRIEND.peer_id], ids=["bearer", "peer"])
@pytest.mark.parametrize(("run", "giver"), [(RUN, STRANGER), (RUN, FRIEND), (OTHER_RUN, ORGANISER)])
def test_only_the_runs_organiser_gives_tickets(run: str, giver: Identity, to: str | None) -> None:
    with pytest.raises(TicketError, match="for another run, or not signed by the run's organiser"):
        check(Ticket.give(run, giver, LATER, to).shown_by(FRIEND.peer_id), FRIEND)


@pytest.mark.parametrize("ticket", [FOR_FRIEND, FOR_ANYBODY], ids=["peer", "bearer"])
@pytest.mark.parametrize(
    "change",
    [{"expires": LATER + 1}, {"key": STRANGER.public_bytes}, {"bearer_signature": bytes(64)}],
    ids=["expires", "key", "bearer"],
)
def test_what_is_signed_cannot_be_changed(ticket: Ticket, change: dict[str, Any]) -> None:
    shown = unpack(ShownTicket, ticket.shown_by(FRIEND.peer_id))
    with pytest.raises(TicketError):
        check(pack(shown.model_copy(update=change)), FRIEND)


@given(st.binary(max_size=SHOWN_BYTES + 20))
def test_arbitrary_bytes_prove_nothing(data: bytes) -> None:
    with pytest.raises(TicketError, match="cannot be read"):
        check(data, FRIEND)


def test_the_longest_ticket_fits_into_a_heartbeat() -> None:
    assert len(Ticket.give(RUN, ORGANISER, 2**61).shown_by(FRIEND.peer_id)) < SHOWN_BYTES


def test_tickets_as_text() -> None:
    ticket = Ticket.give(RUN, ORGANISER, LATER)
    text = str(ticket)
    assert Ticket.parse(text) == ticket
    assert Ticket.parse(f" {text[:100]}\n{text[100:]}\n") == ticket, "mail programs break lines"
    assert Ticket.parse(text.partition(":")[2]) == ticket
    for wrong in ("", "x", text[:-10], text + "AAAA", "diloco-ticket:ü", text[: len(text) // 2]):
        with pytest.raises(AdmissionError, match="is not a ticket") as caught:
            Ticket.parse(wrong)
        assert caught.value.exit_code == 13
        assert "Copy the whole" in caught.value.remedy


def test_of_a_damaged_ticket_the_beginning_is_quoted() -> None:
    """Regression: the quote was cut off before its end."""
    with pytest.raises(AdmissionError, match=f"^'{'a' * 40}…' is not a ticket") as caught:
        Ticket.parse("a" * 100)
    assert caught.value.message.count("'") == 2


def test_lists_of_revoked_tickets_are_the_organisers() -> None:
    revoked = (bytes(8), bytes(range(8)))
    signed = Revocations.sign(RUN, 3, revoked, ORGANISER)
    assert Revocations.unpack(pack(signed), RUN, ORGANISER.peer_id) == signed
    for wrong in (
        Revocations.sign(RUN, 3, revoked, STRANGER),
        Revocations.sign(OTHER_RUN, 3, revoked, ORGANISER),
        signed.model_copy(update={"number": 4}),
        signed.model_copy(update={"revoked": ()}),
    ):
        with pytest.raises(TicketError, match="not signed by its organiser"):
            Revocations.unpack(pack(wrong), RUN, ORGANISER.peer_id)
    with pytest.raises(TicketError):
        Revocations.unpack(b"x", RUN, ORGANISER.peer_id)


def test_the_longest_list_fits() -> None:
    ids = tuple(number.to_bytes(8, "big") for number in range(REVOKED_LIMIT))
    longest = Revocations.sign(RUN, 2**61, ids, ORGANISER)
    assert len(pack(longest)) < LIST_BYTES
