"""A volunteer's way into a run by invitation: its ticket, the place that it takes, and what shows it out again."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from opendiloco.checkpoints.run_folder import RunFolder
from opendiloco.run import Run
from peers.errors import AdmissionError, DilocoPeerError, RemoteProtocolError
from peers.net.daemon import peer_id_of
from peers.net.transport import HivemindTransport
from peers.presence.guests import GuestList, refused
from peers.streams.channel import PeerUnreachableError
from peers.values.identity import Identity
from peers.values.private_folders import open_private
from peers.values.tickets import ANOTHER_TICKET, CHAIN_BYTES, Place, Ticket, TicketError, place_of

logger = logging.getLogger(__name__)

LOOK = 2.0  # seconds between two looks at whether we may stay
YOUNG = 60.0  # seconds after which a newcomer does not give way to another one any more
CONTESTED = 10.0  # seconds after which a peer that is alone gives up a place that another one shows, too
TICKET_FILE, REVOCATIONS_FILE = "ticket", "revocations"
TEXT_LIMIT = 10_000  # characters of a file with a ticket


def read_ticket(text: str) -> Ticket:
    """Return a ticket, given as its text or as a file that has it. Raises: AdmissionError."""
    try:
        return Ticket.parse(Path(text).read_text()[:TEXT_LIMIT] if os.path.isfile(text) else text)
    except (OSError, UnicodeDecodeError) as error:
        raise AdmissionError(
            f"the ticket's file {text} cannot be read.", "Check the path, or give the ticket itself."
        ) from error


class Entrance:
    """What lets one volunteer into a run by invitation, and for how long. Made by `enter`."""

    def __init__(self, guests: GuestList, key: Identity, path: Path | None, ticket: Ticket | None) -> None:
        self.roster: Callable[[], Collection[str]] = tuple
        """Return the peers of the log's last roster."""
        self._guests = guests
        self._me = key.peer_id
        self._path = path
        self._ticket = ticket
        self._began = time.monotonic()
        self._lost = set[int]()  # places that turned out to be others'
        self._contested: float | None = None  # since when another peer has shown our place

    def take_place(self) -> None:
        """Show the chain of a place that nobody else seems to have. Raises: AdmissionError when there is none."""
        chain = self._chain()
        self._guests.show(self._me, chain)
        self._check(chain)
        if chain:
            until = time.strftime("%Y-%m-%d %H:%M", time.gmtime(self._place(chain).expires))
            logger.info("the ticket admits this machine until %s UTC", until)
        if self._path is not None:
            # A volunteer whose disk is full has its ticket, and can give it again.
            with suppress(OSError), open(self._path, "wb", opener=open_private) as file:
                file.write(chain)

    def _chain(self) -> bytes:
        """Return the chain that is to admit us: that of the ticket, or the one of last time."""
        if self._me == self._guests.organiser:
            return b""  # it needs none, and takes nobody's place
        kept = self._kept()
        if self._ticket is None:
            if kept is not None:
                return kept
            raise AdmissionError(
                f"the run {self._guests.run} is by invitation.", "Ask its organiser for a ticket; join with --ticket."
            )
        if self._ticket.run != self._guests.run:
            raise AdmissionError(
                f"the ticket is for the run {self._ticket.run}, not for {self._guests.run}.", ANOTHER_TICKET
            )
        if not self._ticket.is_for_anybody or self._ticket.is_for == self._me:
            return self._ticket.chain_for(self._me)
        first = self._place(self._ticket.chain_for(self._me))
        free = self._free(first)
        before = self._place(kept).number - first.number if kept and self._place(kept).root == first.root else None
        if before in free or not free:
            return self._ticket.chain_for(self._me, before if before in free else 0)
        preferred = int.from_bytes(self._me.encode()[-8:], "big") % self._ticket.count
        return self._ticket.chain_for(self._me, min(free, key=lambda number: (number < preferred, number)))

    def _free(self, first: Place) -> set[int]:
        """Return the places of our ticket that nobody else seems to have; `first` is the first of them."""
        assert self._ticket is not None
        taken = self._guests.taken(first.root, time.time()) | self._lost
        return {number for number in range(self._ticket.count) if first.number + number not in taken}

    def _kept(self) -> bytes | None:
        """Return the chain that we showed last time, if it may still be good."""
        with suppress(OSError, AttributeError):
            kept = self._path.read_bytes()[: CHAIN_BYTES + 1] if self._path else b""
            if kept and not self._guests.refusal(self._me, kept, time.time()):
                return kept
        return None

    def _place(self, chain: bytes) -> Place:
        """Raises: AdmissionError."""
        try:
            return place_of(chain, self._guests.run, self._guests.organiser)
        except TicketError as error:
            raise self._refused(f"its ticket proves nothing: {error}") from error

    def _check(self, chain: bytes) -> None:
        """Raises: AdmissionError when we may not be here: by our own clock, to the second."""
        now = time.time()
        if reason := self._guests.refusal(self._me, chain, now):
            raise self._refused(reason)
        if chain and now > self._place(chain).expires:
            raise self._refused("its ticket is expired")
        if chain and (reason := self._guests.admit(self._me, chain, now)):
            raise self._refused(reason)

    def _refused(self, reason: str) -> AdmissionError:
        return refused(self._me, self._guests.run, reason)

    async def failure(self) -> DilocoPeerError:
        """Wait for as long as we may stay, and take another place where somebody was first; returns the error to end
        with."""
        while True:
            await asyncio.sleep(LOOK)
            self._guests.incumbents = frozenset(self.roster())
            try:
                if self._gives_way():
                    self._move()
                self._check(self._guests.chain)
            except AdmissionError as error:
                return error

    def _gives_way(self) -> bool:
        """Whether our place is another one's: it is in the log's last roster and we are not; or both are new, and by
        their names.

        That we are in a roster of our own proves nothing: another peer may have founded a log in the same second, and
        peers that show one place answer each other never. So a peer that is alone takes another place, if one is free.
        """
        rival, incumbents, now = self._guests.rival, self._guests.incumbents, time.monotonic()
        self._contested = None if rival is None else self._contested or now
        if rival is None or self._contested is None or (self._me in incumbents and len(incumbents) > 1):
            return False
        is_for_long = self._me in incumbents and now - self._contested >= CONTESTED and self._has_another_place()
        return rival in incumbents or is_for_long or (now - self._began < YOUNG and rival < self._me)

    def _has_another_place(self) -> bool:
        """Whether a place of our ticket is free besides the one that we show."""
        if self._ticket is None or not self._ticket.is_for_anybody:
            return False
        first = self._place(self._ticket.chain_for(self._me))
        return bool(self._free(first) - {self._place(self._guests.chain).number - first.number})

    def _move(self) -> None:
        """Raises: AdmissionError when no place is left."""
        rival, place = self._guests.rival, self._place(self._guests.chain)
        if not self._has_another_place():
            raise self._refused(f"place {place.number} of its ticket is taken by {rival}, and no other is free")
        self._lost.add(place.number)
        logger.info("place %d of the ticket is taken by %s; taking another", place.number, rival)
        self.take_place()


async def enter(
    transport: HivemindTransport,
    run: Run,
    key: Identity,
    addresses: Sequence[str] = (),
    folder: RunFolder | None = None,
    ticket: Ticket | None = None,
) -> Entrance | None:
    """Take a place in a run, if it is by invitation. Nodes at the `addresses` are asked which tickets were revoked.

    Raises: AdmissionError.
    """
    transport.learn(run.manifest)
    guests = transport.doors.of(run.run_id)
    if guests is None:
        if ticket is not None:
            logger.info("the run %s is open to everybody: the ticket is not needed", run.run_id)
        return None
    if folder is not None:
        _keep_revocations(transport, guests, folder.path / REVOCATIONS_FILE)
    for address in addresses:
        with suppress(PeerUnreachableError, RemoteProtocolError):
            await transport.doors.exchange(transport, run.run_id, peer_id_of(address))
    await transport.heartbeats(run.run_id)  # who has which place
    entrance = Entrance(guests, key, folder.path / TICKET_FILE if folder else None, ticket)
    entrance.take_place()
    return entrance


def _keep_revocations(transport: HivemindTransport, guests: GuestList, path: Path) -> None:
    """Take in the list of last time, and write each newer one to the disk."""
    with suppress(OSError, TicketError):
        guests.revoke(path.read_bytes())

    def keep(run: str, packed: bytes) -> None:
        if run == guests.run:
            with suppress(OSError):  # others have it, too
                path.write_bytes(packed)

    transport.doors.on_revoked = keep
