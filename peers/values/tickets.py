"""Tickets: who may join a run by invitation.

A ticket is a chain of *grants*. Each gives the holder of one key some *places* in the run, out of those of the grant
before; the first is signed by the organiser, each other one by the holder of the one before. Whoever has a grant of
several places may sign them on to others. A peer shows a chain that ends in its own key: it has the first place of the
last grant. So one rule counts everything: a place of one first grant is one peer's.

A ticket for nobody in particular has the key of its last grant with it: whoever holds the text signs itself a place.
"""

from __future__ import annotations

import base64
import binascii
from functools import lru_cache
from typing import Annotated, NamedTuple, Self

from pydantic import Field

from peers.errors import AdmissionError, quoted
from peers.values.identity import KEY_BYTES, Identity, key_of_peer, peer_id_of_bytes, verify
from peers.values.signing import Signature
from peers.values.wire import Count, RunId, Value, WireError, digest_of, pack, unpack

TICKET_PREFIX = "diloco-ticket:"
GRANTS_LIMIT = 3  # in one chain: the organiser's, that of who has a quota, and the place that is signed with a ticket
PLACES_LIMIT = 10_000
CHAIN_BYTES = 512  # of a chain, as heartbeats carry it
TICKET_BYTES = 1024
ID_BYTES = 8
GRANT_CONTEXT = b"diloco-peer grant\0"  # a signature made for anything else is worth nothing here
REVOKED_LIMIT = 2000
LIST_BYTES = 64 * 1024
REVOCATION_CONTEXT = b"diloco-peer revocations\0"
GRACE = 600.0
"""Seconds past the expiry of a ticket for which peers still take it: longer than honest clocks differ. Its holder goes
when its own clock says so, and nobody meets the difference."""
ANOTHER_TICKET = "Ask whoever gave you the ticket for another one."

Key = Annotated[bytes, Field(strict=True, min_length=KEY_BYTES, max_length=KEY_BYTES)]
TicketId = Annotated[bytes, Field(strict=True, min_length=ID_BYTES, max_length=ID_BYTES)]


class TicketError(ValueError):
    """A ticket that proves nothing. The message says why, as the end of a sentence about the ticket."""


class GrantText(Value):
    """What the giver of a grant signs. `parent` is the id of the grant before; empty: there is none."""

    run: RunId
    parent: bytes
    holder: Key
    first: Count
    count: Count
    expires: Count


class Grant(Value):
    """Places [first, first + count) of the grant before, for the holder of a key, until `expires` (seconds since the
    epoch)."""

    holder: Key
    first: Annotated[int, Field(strict=True, ge=0, lt=PLACES_LIMIT)]
    count: Annotated[int, Field(strict=True, ge=1, le=PLACES_LIMIT)]
    expires: Count
    signature: Signature

    def text(self, run: str, parent: bytes) -> bytes:
        """What its signature is of."""
        return _text(run, parent, self.holder, self.first, self.count, self.expires)


class Chain(Value):
    """Grants that lead from the organiser to some key."""

    grants: Annotated[tuple[Grant, ...], Field(min_length=1, max_length=GRANTS_LIMIT)]


class Place(NamedTuple):
    """What a chain proves: place `number` of the first grant, which is called `root`, is `holder`'s (a peer id) until
    `expires`. `ids` are those of all its grants; the holder has `size` places from there on."""

    root: bytes
    number: int
    size: int
    holder: str
    expires: int
    ids: tuple[bytes, ...]


def prove_place(chain: Chain, run: str, organiser: str) -> Place:
    """Check a chain of grants back to the organiser, all but its age. Raises: TicketError."""
    issuer, parent, ids = organiser, b"", list[bytes]()
    number, count, expires = 0, PLACES_LIMIT, 2**62
    for grant in chain.grants:
        text = grant.text(run, parent)
        if not verify(issuer, text, grant.signature):
            whose = "the run's organiser" if issuer == organiser else "whoever was given its places"
            raise TicketError(f"it is for another run, or not signed by {whose}")
        if grant.first + grant.count > count:
            raise TicketError(f"it gives places up to {grant.first + grant.count} of {count}")
        parent = digest_of(text)[:ID_BYTES]
        ids.append(parent)
        number, count, expires = number + grant.first, grant.count, min(expires, grant.expires)
        issuer = peer_id_of_bytes(grant.holder)
    return Place(ids[0], number, count, issuer, expires, tuple(ids))


@lru_cache(maxsize=4096)  # each heartbeat of a peer brings the same chain; a signature costs 0.1 ms to check
def place_of(packed: bytes, run: str, organiser: str) -> Place:
    """Return what a packed chain proves. Raises: TicketError."""
    try:
        chain = unpack(Chain, packed, CHAIN_BYTES)
    except WireError as error:
        raise TicketError(f"it cannot be read ({error})") from error
    return prove_place(chain, run, organiser)


class Ticket(Value):
    """What people hand to each other: a chain of grants, and the key of the last one if it is for nobody in particular
    (`secret`, a seed; empty: the holder has its key)."""

    run: RunId
    chain: Chain
    secret: Annotated[bytes, Field(strict=True, max_length=KEY_BYTES)]

    @classmethod
    def give(cls, run: str, organiser: Identity, expires: int, count: int = 1, to: str | None = None) -> Self:
        """Sign a ticket of `count` places as the organiser: for the peer `to`, or for whoever has the ticket."""
        secret, holder = _holder(to)
        return cls(run=run, chain=_signed_on(run, None, organiser, holder, 0, count, expires), secret=secret)

    def give_on(self, giver: Identity, expires: int, first: int, count: int = 1, to: str | None = None) -> Ticket:
        """Sign places [first, first + count) of this ticket on, as the peer that it is for."""
        secret, holder = _holder(to)
        chain = _signed_on(self.run, self, giver, holder, first, count, min(expires, self.expires))
        return Ticket(run=self.run, chain=chain, secret=secret)

    @property
    def count(self) -> int:
        """How many places it has."""
        return self.chain.grants[-1].count

    @property
    def expires(self) -> int:
        return min(grant.expires for grant in self.chain.grants)

    @property
    def id(self) -> bytes:
        """Return what names it, to be revoked by."""
        return _ids(self.run, self.chain)[-1]

    @property
    def parent(self) -> bytes:
        """Return the id of the ticket that it was signed with; empty: the organiser signed it."""
        return b"".join(_ids(self.run, self.chain)[-2:-1])

    @property
    def is_for_anybody(self) -> bool:
        """Whether it is for whoever has it."""
        return bool(self.secret)

    @property
    def is_for(self) -> str:
        """Return the peer id of the key that it ends in."""
        return peer_id_of_bytes(self.chain.grants[-1].holder)

    def chain_for(self, peer: str, number: int = 0) -> bytes:
        """Return the packed chain that shows that a peer has this place of the ticket's. Raises: AdmissionError when
        the ticket is for another peer."""
        if self.is_for == peer:
            return pack(self.chain)
        if not self.secret:
            raise AdmissionError(
                f"the ticket is for the peer {self.is_for}; this machine is {peer}.",
                "Join with --identity and the key file of that peer, or ask for a ticket for this one.",
            )
        giver = Identity.of_seed(self.secret)
        return pack(_signed_on(self.run, self, giver, key_of_peer(peer), number, 1, self.expires))

    def __str__(self) -> str:
        return TICKET_PREFIX + base64.urlsafe_b64encode(pack(self)).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises: AdmissionError."""
        plain = "".join(text.split()).removeprefix(TICKET_PREFIX)
        try:
            packed = base64.b64decode(plain + "=" * (-len(plain) % 4), altchars=b"-_", validate=True)
            ticket = unpack(cls, packed, TICKET_BYTES)
            ids = _ids(ticket.run, ticket.chain)
        except (binascii.Error, ValueError) as error:  # which a WireError is, too
            raise AdmissionError(
                f"{quoted(plain, 40)} is not a ticket: it cannot be read.",
                "Copy the whole of what you were sent, or name a file that has it.",
            ) from error
        if len(ids) == GRANTS_LIMIT and ticket.secret:
            raise AdmissionError("the ticket has been signed on too often.", ANOTHER_TICKET)
        return ticket


class RevokedText(Value):
    run: RunId
    number: Count
    revoked: tuple[TicketId, ...]


class Revocations(Value):
    """The tickets of a run that are worth nothing any more, signed by its organiser. The list with the highest number
    counts. Who revokes a ticket revokes all that was signed with it."""

    run: RunId
    number: Count
    revoked: Annotated[tuple[TicketId, ...], Field(max_length=REVOKED_LIMIT)]
    signature: Signature

    @classmethod
    def sign(cls, run: str, number: int, revoked: tuple[bytes, ...], organiser: Identity) -> Self:
        text = REVOCATION_CONTEXT + pack(RevokedText(run=run, number=number, revoked=revoked))
        return cls(run=run, number=number, revoked=revoked, signature=organiser.sign(text))

    @classmethod
    def unpack(cls, packed: bytes, run: str, organiser: str) -> Self:
        """The list in untrusted bytes. Raises: TicketError."""
        try:
            found = unpack(cls, packed, LIST_BYTES)
        except WireError as error:
            raise TicketError(str(error)) from error
        text = REVOCATION_CONTEXT + pack(RevokedText(run=found.run, number=found.number, revoked=found.revoked))
        if found.run != run or not verify(organiser, text, found.signature):
            raise TicketError("it is of another run, or not signed by its organiser")
        return found


def _holder(to: str | None) -> tuple[bytes, bytes]:
    """Return the secret of a ticket, and the key that its last grant is for."""
    if to is not None:
        return b"", key_of_peer(to)
    secret = Identity.generate().seed
    return secret, Identity.of_seed(secret).public_bytes


def _text(run: str, parent: bytes, holder: bytes, first: int, count: int, expires: int) -> bytes:
    said = GrantText(run=run, parent=parent, holder=holder, first=first, count=count, expires=expires)
    return GRANT_CONTEXT + pack(said)


def _ids(run: str, chain: Chain) -> list[bytes]:
    ids = [b""]
    for grant in chain.grants:
        ids.append(digest_of(grant.text(run, ids[-1]))[:ID_BYTES])
    return ids[1:]


def _signed_on(
    run: str, given: Ticket | None, giver: Identity, holder: bytes, first: int, count: int, expires: int
) -> Chain:
    before = given.chain.grants if given else ()
    parent = given.id if given else b""
    signature = giver.sign(_text(run, parent, holder, first, count, expires))
    grant = Grant(holder=holder, first=first, count=count, expires=expires, signature=signature)
    return Chain(grants=(*before, grant))
