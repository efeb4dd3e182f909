"""Admission to a run: this machine's ticket, the signed heads that it knows, and the tickets that an organiser has
given."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from opendiloco.errors import MachineError
from opendiloco.run import Run
from opendiloco.storage.run_folder import RunFolder
from peers.errors import AdmissionError, RemoteProtocolError, quoted
from peers.network.channel import PeerUnreachableError
from peers.network.daemon import peer_id_of
from peers.presence.admission import RunAdmission, refused
from peers.values.identity import Identity
from peers.values.signed_heads import SignedHeadsError, unpack_heads
from peers.values.system import make_private_folder, open_private, write_whole
from peers.values.tickets import (
    ANOTHER_TICKET,
    GRACE,
    ID_BYTES,
    REVOKED_LIMIT,
    SHOWN_BYTES,
    Revocations,
    Ticket,
    TicketError,
)
from peers.values.wire import pack

if TYPE_CHECKING:
    from peers.network.transport import HivemindTransport

logger = logging.getLogger(__name__)

LOOK = 2.0  # seconds between two checks that the ticket is still valid
ASK_LIMIT = 5.0  # seconds that a start may wait for nodes that do not answer
TICKET_FILE, REVOCATIONS_FILE = "ticket", "revocations"
GIVEN, GIVEN_REVOCATIONS = "given.tickets", "given.revocations"
TEXT_LIMIT = 10_000  # characters of a file with a ticket


def read_ticket(text: str) -> Ticket:
    """Return a ticket from its text or from a file that contains it. Raises: AdmissionError."""
    try:
        return Ticket.parse(Path(text).read_text()[:TEXT_LIMIT] if os.path.isfile(text) else text)
    except (OSError, UnicodeDecodeError) as error:
        raise AdmissionError(
            f"the ticket's file {text} cannot be read.", "Check the path, or give the ticket itself."
        ) from error


# A volunteer's ticket -----------------------------------------------------------------------------------------
async def enter(
    transport: HivemindTransport,
    run: Run,
    key: Identity,
    addresses: Sequence[str] = (),
    folder: RunFolder | None = None,
    ticket: Ticket | None = None,
) -> RunAdmission | None:
    """Show this machine's ticket in its heartbeats from now on. Return the admission, or None if the run needs no
    ticket.

    Without a `ticket`, the one kept in the `folder` is used. Nodes at the `addresses` are asked for revoked tickets.

    Raises: AdmissionError.
    """
    transport.learn(run.manifest)
    admission = transport.runs.admissions.of(run.run_id)
    if admission is None:
        if ticket is not None:
            logger.info("the run %s is open to all, so the ticket is not needed", run.run_id)
        return None
    if folder is not None:
        path = folder.path / REVOCATIONS_FILE
        with suppress(OSError, TicketError):
            admission.revoke(path.read_bytes())
        transport.runs.admissions.on_revoked = partial(_keep, path, run.run_id)
    for address in addresses:
        with suppress(PeerUnreachableError, RemoteProtocolError):
            await transport.runs.admissions.exchange(transport.call, run.run_id, peer_id_of(address))
    _show_ticket(admission, key.peer_id, folder.path / TICKET_FILE if folder else None, ticket)
    return admission


def _show_ticket(admission: RunAdmission, me: str, kept: Path | None, ticket: Ticket | None) -> None:
    """Show the given ticket, or the `kept` one, in this machine's heartbeats. Raises: AdmissionError."""
    admission.ticket = _shown(admission, me, kept, ticket)
    if error := _refusal(admission, me):
        raise error
    if kept is not None and admission.ticket:
        # If the disk is full, the volunteer still has the ticket and can give it again.
        with suppress(OSError), open(kept, "wb", opener=open_private) as file:
            file.write(admission.ticket)


def _shown(admission: RunAdmission, me: str, kept: Path | None, ticket: Ticket | None) -> bytes:
    """Return the ticket for this machine's heartbeats; empty for the organiser. Raises: AdmissionError."""
    if me == admission.organiser:
        return b""
    if ticket is not None:
        if ticket.run != admission.run:
            raise AdmissionError(f"the ticket is for the run {ticket.run}, not for {admission.run}.", ANOTHER_TICKET)
        return ticket.shown_by(me)
    if kept is not None:
        with suppress(OSError):
            return kept.read_bytes()[: SHOWN_BYTES + 1]
    raise AdmissionError(
        f"the run {admission.run} is by invitation, and this machine ({me}) has no ticket.",
        f"Its organiser creates one, `invite create MANIFEST --for {me}`, to join with --ticket; the organiser's own "
        "commands need its key file, --identity.",
    )


def _refusal(admission: RunAdmission, me: str) -> AdmissionError | None:
    """Return the error to end with if the ticket does not admit this machine. By this machine's own clock it has no
    grace."""
    reason = admission.refusal(me, admission.ticket, time.time() + GRACE)
    return refused(me, admission.run, reason) if reason else None


async def wait_for_refusal(admission: RunAdmission, me: str) -> AdmissionError:
    """Wait until this machine's ticket expires or is revoked. Return the error to end with."""
    while (error := _refusal(admission, me)) is None:
        await asyncio.sleep(LOOK)
    return error


async def ask_for_signed_heads(
    transport: HivemindTransport, run: Run, addresses: Sequence[str], folder: RunFolder | None = None
) -> None:
    """Load the heads that a run's archives have signed from the folder, and ask the nodes at the `addresses` for newer
    ones.

    Heads that arrive later are kept in the folder, too.
    """
    if folder is not None:
        path = folder.signed_heads
        try:
            transport.runs.take_heads(run.run_id, unpack_heads(path.read_bytes()))
        except FileNotFoundError:
            pass
        except (OSError, SignedHeadsError) as error:
            logger.warning("%s is ignored: %s", path, error)
        transport.runs.on_heads = partial(_keep, path, run.run_id)
    with suppress(TimeoutError):
        async with asyncio.timeout(ASK_LIMIT):
            await transport.runs.ask_for_heads(transport.call, run.run_id, map(peer_id_of, addresses))


def _keep(path: Path, run_id: str, run: str, packed: bytes) -> None:
    """Write the newest list of a run into a file, if it is the run with this id."""
    if run == run_id:
        with suppress(OSError):  # other nodes have it, too
            write_whole(path, [packed])


# An organiser's tickets ---------------------------------------------------------------------------------------
class GivenTickets:
    """An organiser's tickets for a run, and the newest list of revoked ones: two files in its folder."""

    def __init__(self, run: str, organiser: str, base: Path | None = None) -> None:
        self._run = run
        self._organiser = organiser
        self._folder = RunFolder.at(run, organiser, base).path

    @property
    def tickets(self) -> list[Ticket]:
        """All given tickets, oldest first. Raises: MachineError."""
        with _readable(self._folder / GIVEN) as kept:
            return [Ticket.parse(line) for line in (kept or b"").decode().splitlines()]

    def add(self, ticket: Ticket) -> None:
        """Write down a new ticket. Raises: MachineError when that fails."""
        with self._writable(), open(self._folder / GIVEN, "a", opener=open_private) as file:
            file.write(f"{ticket}\n")

    @property
    def revocations(self) -> Revocations | None:
        """The newest list that this machine has signed, or None. Raises: MachineError."""
        with _readable(self._folder / GIVEN_REVOCATIONS) as kept:
            return None if kept is None else Revocations.unpack(kept, self._run, self._organiser)

    def revoke(self, ids: Sequence[str], organiser: Identity, published: Revocations | None = None) -> Revocations:
        """Sign and keep a list with these tickets and those of the newest lists on this machine and in the run
        (`published`).

        Raises: AdmissionError, MachineError.
        """
        before = [one for one in (self.revocations, published) if one is not None]
        number = max((one.number for one in before), default=0) + 1
        revoked = tuple(dict.fromkeys([each for one in before for each in one.revoked] + list(map(_id, ids))))
        if len(revoked) > REVOKED_LIMIT:
            raise AdmissionError(
                f"{len(revoked)} tickets are more than the {REVOKED_LIMIT} that can be revoked.", "Begin a new run."
            )
        revocations = Revocations.sign(self._run, number, revoked, organiser)
        with self._writable():
            write_whole(self._folder / GIVEN_REVOCATIONS, [pack(revocations)])
        return revocations

    @contextmanager
    def _writable(self) -> Iterator[None]:
        """Make the folder for writing. Raises: MachineError, also for errors of the caller's writing."""
        try:
            make_private_folder(self._folder)
            yield
        except OSError as error:
            message = f"the folder {self._folder} cannot be written to: {error.strerror}."
            raise MachineError(message, "Name another one with --state.") from error


@contextmanager
def _readable(path: Path) -> Iterator[bytes | None]:
    """Yield a file's content, or None if there is no file. Raises: MachineError when the file or its content is
    unusable."""
    try:
        kept = None
        with suppress(FileNotFoundError):
            kept = path.read_bytes()
        yield kept
    except (OSError, ValueError, AdmissionError) as error:
        raise MachineError(f"{path} cannot be read: {error}.", "Restore it from a copy, or move it away.") from error


def _id(text: str) -> bytes:
    """Return the id of a ticket. Raises: AdmissionError."""
    with suppress(ValueError):
        if len(found := bytes.fromhex(text)) == ID_BYTES:
            return found
    raise AdmissionError(f"{quoted(text, 40)} is not the id of a ticket.", "`invite list` shows them.")
