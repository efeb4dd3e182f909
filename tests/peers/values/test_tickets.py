"""Tickets: a chain of grants proves a place, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.errors import AdmissionError
from peers.values.identity import Identity
from peers.values.tickets import (
    CHAIN_BYTES,
    LIST_BYTES,
    REVOKED_LIMIT,
    Chain,
    Revocations,
    Ticket,
    TicketError,
    place_of,
)
from peers.values.wire import pack, unpack

RUN, OTHER_RUN = "tiny-" + "a" * 32, "tiny-" + "b" * 32
ORGANISER, SPONSOR, FRIEND, STRANGER = (Identity.generate() for _ in range(4))
LATER = 2_000_000_000


def place(chain: bytes, run: str = RUN) -> tuple[int, str]:
    """The number and the holder of what a chain proves."""
    proven = place_of(chain, run, ORGANISER.peer_id)
    return proven.number, proven.holder


def test_a_ticket_for_one_peer_admits_that_peer() -> None:
    ticket = Ticket.give(RUN, ORGANISER, LATER, to=FRIEND.peer_id)
    chain = ticket.chain_for(FRIEND.peer_id)
    assert place(chain) == (0, FRIEND.peer_id)
    assert place_of(chain, RUN, ORGANISER.peer_id).expires == LATER
    assert not ticket.is_for_anybody
    with pytest.raises(AdmissionError, match=f"for the peer {FRIEND.peer_id}; this machine is {STRANGER.peer_id}"):
        ticket.chain_for(STRANGER.peer_id)


def test_whoever_has_a_ticket_for_anybody_signs_itself_a_place() -> None:
    ticket = Ticket.give(RUN, ORGANISER, LATER, 3)
    assert ticket.is_for_anybody
    assert [place(ticket.chain_for(one.peer_id, number)) for number, one in enumerate((FRIEND, STRANGER))] == [
        (0, FRIEND.peer_id),
        (1, STRANGER.peer_id),
    ]
    with pytest.raises(TicketError, match="places up to 4 of 3"):
        place(ticket.chain_for(FRIEND.peer_id, 3))


def test_a_quota_is_signed_on_and_counted_with_it() -> None:
    quota = Ticket.give(RUN, ORGANISER, LATER, 7, SPONSOR.peer_id)
    assert place(quota.chain_for(SPONSOR.peer_id)) == (0, SPONSOR.peer_id)
    for_friend = quota.give_on(SPONSOR, LATER, 1, to=FRIEND.peer_id)
    for_anybody = quota.give_on(SPONSOR, LATER + 1000, 2, 3)
    assert place(for_friend.chain_for(FRIEND.peer_id)) == (1, FRIEND.peer_id)
    longest = for_anybody.chain_for(STRANGER.peer_id, 2)
    assert place(longest) == (4, STRANGER.peer_id)
    proven = place_of(longest, RUN, ORGANISER.peer_id)
    assert proven.expires == LATER, "a ticket is good for no longer than the one that it was signed with"
    assert proven.root == quota.id
    assert (for_anybody.parent, quota.parent) == (quota.id, b"")
    assert set(proven.ids) > {quota.id, for_anybody.id}


def test_who_overspends_a_quota_proves_nothing() -> None:
    quota = Ticket.give(RUN, ORGANISER, LATER, 3, SPONSOR.peer_id)
    with pytest.raises(TicketError, match="places up to 5 of 3"):
        place(quota.give_on(SPONSOR, LATER, 1, 4, FRIEND.peer_id).chain_for(FRIEND.peer_id))


@pytest.mark.parametrize("forger", [STRANGER, FRIEND], ids=["stranger", "holder"])
def test_nobody_but_the_organiser_begins_a_chain(forger: Identity) -> None:
    forged = Ticket.give(RUN, forger, LATER, to=FRIEND.peer_id)
    with pytest.raises(TicketError, match="not signed by the run's organiser"):
        place(forged.chain_for(FRIEND.peer_id))


def test_nobody_signs_on_what_was_given_to_another() -> None:
    quota = Ticket.give(RUN, ORGANISER, LATER, 7, SPONSOR.peer_id)
    with pytest.raises(TicketError, match="not signed by whoever was given its places"):
        place(quota.give_on(STRANGER, LATER, 1, to=STRANGER.peer_id).chain_for(STRANGER.peer_id))


def test_a_ticket_of_another_run() -> None:
    with pytest.raises(TicketError, match="for another run"):
        place(Ticket.give(OTHER_RUN, ORGANISER, LATER, to=FRIEND.peer_id).chain_for(FRIEND.peer_id))


@pytest.mark.parametrize(
    "change",
    [{"first": 1}, {"count": 9}, {"expires": LATER + 1}, {"holder": STRANGER.public_bytes}],
    ids=["first", "count", "expires", "holder"],
)
def test_what_a_grant_says_cannot_be_changed(change: dict[str, Any]) -> None:
    for at in range(2):
        ticket = Ticket.give(RUN, ORGANISER, LATER, 8)
        grants = list(unpack(Chain, ticket.chain_for(FRIEND.peer_id, 2)).grants)
        grants[at] = grants[at].model_copy(update=change)
        with pytest.raises(TicketError):
            place(pack(Chain(grants=tuple(grants))))


def test_a_grant_counts_only_in_its_own_chain() -> None:
    """Else a place of an old ticket could be had again under a new one of the same holder."""
    one, other = (Ticket.give(RUN, ORGANISER, expires, 5, SPONSOR.peer_id) for expires in (LATER, LATER + 1))
    given = one.give_on(SPONSOR, LATER, 1, to=FRIEND.peer_id)
    moved = Chain(grants=(*other.chain.grants, given.chain.grants[-1]))
    with pytest.raises(TicketError, match="not signed by"):
        place(pack(moved))


@given(st.binary(max_size=CHAIN_BYTES + 20))
def test_arbitrary_chains_prove_nothing(data: bytes) -> None:
    with pytest.raises(TicketError):
        place(data)


def test_the_longest_chain_fits_into_a_heartbeat() -> None:
    quota = Ticket.give(RUN, ORGANISER, 2**61, 10_000, SPONSOR.peer_id)
    assert len(quota.give_on(SPONSOR, 2**61, 1, 9_999).chain_for(FRIEND.peer_id, 9_998)) < CHAIN_BYTES


def test_tickets_as_text() -> None:
    ticket = Ticket.give(RUN, ORGANISER, LATER, 3)
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
