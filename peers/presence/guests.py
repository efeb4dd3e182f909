"""Who may take part in a run by invitation, as one node knows: whose tickets are good, and who has which place."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, TypeAlias

from peers.errors import AdmissionError
from peers.values.tickets import ANOTHER_TICKET, GRACE, PLACES_LIMIT, Place, Revocations, TicketError, place_of

PLACE_KEPT = 86400.0  # seconds for which the place of a peer that is silent is its own
PRESENT = 120.0  # seconds for which a peer is admitted that was seen with its ticket
PlaceName: TypeAlias = tuple[bytes, int]
"""The first grant of a chain, and the number of the place there."""


class Guest(NamedTuple):
    """A peer that has a place, and when it was seen last, in seconds since the epoch."""

    peer: str
    chain: bytes
    seen: float


class GuestList:
    """The guests of one run. Times are those of this machine's wall clock, in seconds since the epoch.

    Whose place is whose: a place is the first peer's that is heard of with it here, until that has been silent for a
    day. A peer in the log's last roster comes before one that is not, so that all agree once an entry has decided.
    """

    def __init__(self, run: str, organiser: str) -> None:
        self.run = run
        self.organiser = organiser
        self.revocations: Revocations | None = None
        self.incumbents = frozenset[str]()
        """The peers of the log's last roster, as far as this node knows the log."""
        self.me, self.chain = "", b""
        """Our own peer id, and the chain that our heartbeats show."""
        self.rival: str | None = None
        """A peer with a good ticket that claims the place which we claim."""
        self._guests: OrderedDict[PlaceName, Guest] = OrderedDict()
        self._places: dict[str, PlaceName] = {}

    # Tickets --------------------------------------------------------------------------------------------------
    def refusal(self, peer: str, chain: bytes, wall: float) -> str:
        """Return why a peer's ticket does not admit it, whoever else has its place; empty: it does."""
        if peer == self.organiser:
            return ""
        if not chain:
            return "it shows no ticket"
        try:
            place = place_of(chain, self.run, self.organiser)
        except TicketError as error:
            return f"its ticket proves nothing: {error}"
        if place.holder != peer:
            return f"its ticket is for {place.holder}"
        if wall > place.expires + GRACE:
            return "its ticket is expired"
        if self.revocations and not set(place.ids).isdisjoint(self.revocations.revoked):
            return "its ticket was revoked"
        return ""

    def revoke(self, packed: bytes) -> bool:
        """Take in a list of revoked tickets. Returns whether it is newer than ours. Raises: TicketError."""
        found = Revocations.unpack(packed, self.run, self.organiser)
        if self.revocations is not None and found.number <= self.revocations.number:
            return False
        self.revocations = found
        return True

    @property
    def number(self) -> int:
        """Return the number of our list of revoked tickets; 0: we have none."""
        return self.revocations.number if self.revocations else 0

    # Places ---------------------------------------------------------------------------------------------------
    def admit(self, peer: str, chain: bytes, wall: float) -> str:
        """Note that a peer is there with its ticket. Returns why it is not admitted; empty: it is."""
        reason = self.refusal(peer, chain, wall)
        if reason:
            self._drop(peer)
            return reason
        if peer == self.organiser:
            return ""
        name = self._name(place_of(chain, self.run, self.organiser))
        if peer != self.me and self.chain and name == self._our_place:
            self.rival = peer
        elif peer == self.rival:
            self.rival = None  # it has taken another place
        holder = self._guests.get(name)
        if holder is not None and holder.peer != peer and not self._gives_way(holder, peer, wall):
            return f"place {name[1]} of its ticket is taken by {holder.peer}"
        self._drop(peer)
        if holder is not None:
            self._drop(holder.peer)
        self._guests[name] = Guest(peer, chain, wall)
        self._places[peer] = name
        while len(self._guests) > PLACES_LIMIT:
            self._drop(next(iter(self._guests.values())).peer)
        return ""

    def is_admitted(self, peer: str, wall: float) -> bool:
        """Whether a peer was seen with a ticket a short while ago, and the ticket is still good."""
        if peer == self.organiser:
            return True
        guest = self._guest(peer)
        return guest is not None and abs(wall - guest.seen) < PRESENT and not self.refusal(peer, guest.chain, wall)

    def taken(self, root: bytes, wall: float) -> set[int]:
        """Return the places of a first grant that somebody has, other than we."""
        return {
            number
            for (name, number), guest in self._guests.items()
            if name == root and guest.peer != self.me and wall - guest.seen < PLACE_KEPT
        }

    def show(self, me: str, chain: bytes) -> None:
        """Show this chain in our heartbeats from now on."""
        self.me, self.chain, self.rival = me, chain, None

    def check(self, peer: str, wall: float) -> None:
        """Raises: AdmissionError unless the peer is admitted."""
        if not self.is_admitted(peer, wall):
            guest = self._guest(peer)
            reason = self.refusal(peer, guest.chain, wall) if guest else "it has shown no ticket here"
            raise refused(peer, self.run, reason or "it has shown no ticket for a while")

    @property
    def _our_place(self) -> PlaceName | None:
        return self._name(place_of(self.chain, self.run, self.organiser)) if self.chain else None

    def _name(self, place: Place) -> PlaceName:
        return place.root, place.number

    def _guest(self, peer: str) -> Guest | None:
        name = self._places.get(peer)
        return self._guests.get(name) if name is not None else None

    def _gives_way(self, holder: Guest, claimant: str, wall: float) -> bool:
        if holder.peer not in self.incumbents and claimant in self.incumbents:
            return True
        is_over = bool(self.refusal(holder.peer, holder.chain, wall)) or wall - holder.seen >= PLACE_KEPT
        return is_over and holder.peer not in self.incumbents

    def _drop(self, peer: str) -> None:
        name = self._places.pop(peer, None)
        if name is not None:
            del self._guests[name]


def refused(peer: str, run: str, reason: str) -> AdmissionError:
    """Return what a peer is told that is not admitted."""
    return AdmissionError(f"{peer} is not admitted to {run}, which is by invitation: {reason}.", ANOTHER_TICKET)
