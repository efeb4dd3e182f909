"""Admission to a run by invitation, as one node knows it: the peers that have shown a valid ticket."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from peers.errors import AdmissionError
from peers.values.tickets import ANOTHER_TICKET, GRACE, Revocations, TicketError, check_ticket

PRESENT = 120.0  # seconds for which a peer stays admitted after it has shown its ticket
SEEN_LIMIT = 10_000  # maximum number of peers whose tickets are remembered


class TicketSighting(NamedTuple):
    """The ticket that a peer has shown, and the time at which it was last shown, in seconds since the epoch."""

    ticket: bytes
    at: float


class RunAdmission:
    """Admission to one run by the tickets that peers show. Times are seconds since the epoch on our wall clock."""

    def __init__(self, run: str, organiser: str, archives: Iterable[str] = ()) -> None:
        self.run = run
        self.organiser = organiser
        self.named = {organiser, *archives}
        """The peers that the signed manifest names. They need no ticket."""
        self.revocations: Revocations | None = None
        self.ticket = b""
        """Our own ticket, as our heartbeats show it."""
        self._seen: OrderedDict[str, TicketSighting] = OrderedDict()

    def refusal(self, peer: str, ticket: bytes, wall: float) -> str:
        """Return the reason why a ticket does not admit its peer; empty if the peer is admitted."""
        if peer in self.named:
            return ""
        if not ticket:
            return "it shows no ticket"
        try:
            checked = check_ticket(ticket, peer, self.run, self.organiser)
        except TicketError as error:
            return f"its ticket is not valid: {error}"
        if wall > checked.expires + GRACE:
            return "its ticket is expired"
        if self.revocations and checked.id in self.revocations.revoked:
            return "its ticket was revoked"
        return ""

    def admit(self, peer: str, ticket: bytes, wall: float) -> str:
        """Check a peer's ticket, and record it if valid. Return the reason why the peer is not admitted, or ""."""
        reason = self.refusal(peer, ticket, wall)
        if not reason:
            self._seen[peer] = TicketSighting(ticket, wall)
            self._seen.move_to_end(peer)
            if len(self._seen) > SEEN_LIMIT:
                self._seen.popitem(last=False)
        return reason

    def check(self, peer: str, wall: float) -> None:
        """Raise AdmissionError unless a peer needs no ticket, or showed a valid one in the last PRESENT seconds."""
        if peer in self.named:
            return
        seen = self._seen.get(peer)
        if seen is None:
            raise refused(peer, self.run, "it has shown no ticket here")
        if reason := self.refusal(peer, seen.ticket, wall):
            raise refused(peer, self.run, reason)
        if abs(wall - seen.at) >= PRESENT:
            raise refused(peer, self.run, "it has shown no ticket for a while")

    def revoke(self, packed: bytes) -> bool:
        """Store a packed list of revoked tickets if it is newer than ours; if so, return True. Raises: TicketError."""
        found = Revocations.unpack(packed, self.run, self.organiser)
        if found.number <= self.number:
            return False
        self.revocations = found
        return True

    @property
    def number(self) -> int:
        """The version number of our list of revoked tickets (the highest number counts); 0 without a list."""
        return self.revocations.number if self.revocations else 0


def refused(peer: str, run: str, reason: str) -> AdmissionError:
    """Return the AdmissionError for a peer that `run` does not admit, with the reason and a remedy."""
    return AdmissionError(f"{peer} is not admitted to {run}, which is by invitation: {reason}.", ANOTHER_TICKET)
