"""Tickets: signatures of a run's organiser that admit peers to a run by invitation.

The organiser signs a key and a time of expiry. The key is that of one peer, and admits this peer; or it is a *bearer
key*, made for the ticket, and admits every peer whose id it has signed. The text of such a ticket contains the bearer
key's secret, so that each machine with the text can sign its own id. Heartbeats show the signatures but not the secret,
so that a ticket seen in a heartbeat is of no use to others.
"""

from __future__ import annotations

import base64
import binascii
from functools import lru_cache
from typing import Annotated, NamedTuple, Self

from pydantic import Field

from peers.errors import AdmissionError, quoted
from peers.values.identity import KEY_BYTES, Identity, Signature, key_of_peer, peer_id_of_bytes, verify
from peers.values.wire import Count, RunId, Value, WireError, digest_of, pack, pack_plain, unpack

TICKET_PREFIX = "diloco-ticket:"
SHOWN_BYTES = 256  # maximum bytes of a ticket as heartbeats show it
TICKET_BYTES = 1024  # maximum bytes of a packed ticket; usual ones have about 200
ID_BYTES = 8  # bytes of a ticket's id, a digest: so many that no two tickets of a run have the same id by chance
GRANT_CONTEXT = b"diloco-peer grant\0"  # prefix of the signed bytes, so that no other signature is valid as a ticket
BEARER_CONTEXT = b"diloco-peer bearer\0"
REVOKED_LIMIT = 2000  # maximum number of tickets on one list of revoked tickets, which is sent whole: 20 KB
LIST_BYTES = 64 * 1024  # maximum bytes of a packed list of revoked tickets
REVOCATION_CONTEXT = b"diloco-peer revocations\0"
GRACE = 600.0
"""Seconds after a ticket's expiry for which other peers still accept it: more than honest clocks differ. Its holder
leaves by its own clock, so the difference does no harm."""
ANOTHER_TICKET = "Ask the person who gave you the ticket for another one."

Key = Annotated[bytes, Field(strict=True, min_length=KEY_BYTES, max_length=KEY_BYTES)]
TicketId = Annotated[bytes, Field(strict=True, min_length=ID_BYTES, max_length=ID_BYTES)]


class TicketError(ValueError):
    """Error: a ticket, or a list of revoked tickets, is not valid. The message gives the reason, as the end of a
    sentence."""


def _grant(run: str, key: bytes, is_for_bearers: bool, expires: int) -> bytes:
    """Return the bytes that the organiser signs for a ticket. `expires` is in seconds since the epoch."""
    return GRANT_CONTEXT + pack_plain([run, key, is_for_bearers, expires])


class ShownTicket(Value):
    """A ticket as one peer's heartbeats show it. A ticket for all bearers also has its bearer key's signature of the
    peer's id."""

    key: Key
    expires: Count
    signature: Signature
    bearer_signature: Signature | None


class _CheckedTicket(NamedTuple):
    """The id and expiry of a ticket with valid signatures. `expires` is in seconds since the epoch."""

    id: bytes
    expires: int


@lru_cache(maxsize=4096)  # a peer's heartbeats repeat the same bytes, and a signature takes 0.1 ms to check
def check_ticket(shown: bytes, peer: str, run: str, organiser: str) -> _CheckedTicket:
    """Check that a packed ShownTicket admits a peer to a run, and return the ticket's id and expiry. The caller must
    check the expiry. Raises: TicketError."""
    try:
        ticket = unpack(ShownTicket, shown, SHOWN_BYTES)
    except WireError as error:
        raise TicketError(f"it cannot be read ({error})") from error
    grant = _grant(run, ticket.key, ticket.bearer_signature is not None, ticket.expires)
    if not verify(organiser, grant, ticket.signature):
        raise TicketError("it is for another run, or not signed by the run's organiser")
    holder = peer_id_of_bytes(ticket.key)
    if ticket.bearer_signature is None:
        if holder != peer:
            raise TicketError(f"it is for the peer {holder}")
    elif not verify(holder, BEARER_CONTEXT + peer.encode(), ticket.bearer_signature):
        raise TicketError("its bearer has not signed the id of this peer")
    return _CheckedTicket(digest_of(grant)[:ID_BYTES], ticket.expires)


class Ticket(Value):
    """A ticket as people pass it on. `secret` is the seed of its bearer key; None if the ticket is for one peer."""

    run: RunId
    key: Key
    expires: Count
    signature: Signature
    secret: Key | None

    @classmethod
    def give(cls, run: str, organiser: Identity, expires: int, to: str | None = None) -> Self:
        """Return a ticket that the organiser signs, for the peer `to`. If `to` is None, the ticket is for every peer
        that has it."""
        bearer = Identity.generate()
        secret, key = (bearer.seed, bearer.public_bytes) if to is None else (None, key_of_peer(to))
        signature = organiser.sign(_grant(run, key, to is None, expires))
        return cls(run=run, key=key, expires=expires, signature=signature, secret=secret)

    @property
    def id(self) -> bytes:
        """The id of this ticket in lists of revoked tickets."""
        return digest_of(_grant(self.run, self.key, self.secret is not None, self.expires))[:ID_BYTES]

    @property
    def peer(self) -> str | None:
        """The id of the only peer that this ticket admits; None if it admits every peer that has it."""
        return peer_id_of_bytes(self.key) if self.secret is None else None

    def shown_by(self, peer: str) -> bytes:
        """Return the packed ShownTicket for `peer`'s heartbeats. Raises: AdmissionError for another peer's ticket."""
        if self.peer not in (None, peer):
            raise AdmissionError(
                f"the ticket is for the peer {self.peer}; this machine is {peer}.",
                "Join with --identity and the key file of that peer, or ask for a ticket for this one.",
            )
        signed = None if self.secret is None else Identity.of_seed(self.secret).sign(BEARER_CONTEXT + peer.encode())
        shown = ShownTicket(key=self.key, expires=self.expires, signature=self.signature, bearer_signature=signed)
        return pack(shown)

    def __str__(self) -> str:
        return TICKET_PREFIX + base64.urlsafe_b64encode(pack(self)).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the ticket that a text contains. Raises: AdmissionError when the text is no ticket."""
        plain = "".join(text.split()).removeprefix(TICKET_PREFIX)
        try:
            packed = base64.b64decode(plain + "=" * (-len(plain) % 4), altchars=b"-_", validate=True)
            return unpack(cls, packed, TICKET_BYTES)
        except (binascii.Error, ValueError) as error:  # a WireError is a ValueError
            raise AdmissionError(
                f"{quoted(plain, 40)} is not a ticket: it cannot be read.",
                "Copy the whole text of the ticket, or name a file that has it.",
            ) from error


class Revocations(Value):
    """A list of the run's revoked tickets, signed by its organiser. The list with the highest number counts."""

    run: RunId
    number: Count
    revoked: Annotated[tuple[TicketId, ...], Field(max_length=REVOKED_LIMIT)]
    signature: Signature

    @classmethod
    def sign(cls, run: str, number: int, revoked: tuple[bytes, ...], organiser: Identity) -> Self:
        signature = organiser.sign(_revocation(run, number, revoked))
        return cls(run=run, number=number, revoked=revoked, signature=signature)

    @classmethod
    def unpack(cls, packed: bytes, run: str, organiser: str) -> Self:
        """Return the list of revoked tickets in untrusted bytes, once its signature is checked. Raises: TicketError."""
        try:
            found = unpack(cls, packed, LIST_BYTES)
        except WireError as error:
            raise TicketError(str(error)) from error
        if found.run != run or not verify(organiser, _revocation(run, found.number, found.revoked), found.signature):
            raise TicketError("it is for another run, or not signed by its organiser")
        return found


def _revocation(run: str, number: int, revoked: tuple[bytes, ...]) -> bytes:
    return REVOCATION_CONTEXT + pack_plain([run, number, revoked])
