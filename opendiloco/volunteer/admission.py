"""Admission to a run: this machine's ticket, the signed heads that this machine keeps, and the tickets that an
organiser has issued."""

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

from opendiloco.errors import MachineError, SettingsError
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
ASK_LIMIT = 5.0  # most seconds that a starting peer waits for signed heads from the nodes
TICKET_FILE, REVOCATIONS_FILE = "ticket", "revocations"
GIVEN, GIVEN_REVOCATIONS = "given.tickets", "given.revocations"
TEXT_LIMIT = 10_000  # most characters read from a ticket's file


def read_ticket(text: str) -> Ticket:
    """Return the ticket in `text`, or in the file whose path is `text`. Raises: AdmissionError if there is no valid
    ticket."""
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
    """Add this machine's ticket to all its later heartbeats. Return the run's admission, or None if the run needs no
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
    """Add the given ticket, or else the one in the file `kept`, to this machine's heartbeats. Raises: AdmissionError if
    the ticket does not admit the machine."""
    admission.ticket = _shown(admission, me, kept, ticket)
    if error := _refusal(admission, me):
        raise error
    if kept is not None and admission.ticket:
        # If writing fails, the volunteer still has the ticket, and can give it again at the next start.
        with suppress(OSError), open(kept, "wb", opener=open_private) as file:
            file.write(admission.ticket)


def _shown(admission: RunAdmission, me: str, kept: Path | None, ticket: Ticket | None) -> bytes:
    """Return the ticket, as bytes, to add to this machine's heartbeats; none for the organiser and the named archives,
    which need no ticket. Raises: AdmissionError if there is no ticket for this run."""
    if me in admission.named:
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
    """Return an error if the ticket does not admit this machine, else None. The machine gives its own ticket no grace
    for clocks that differ."""
    reason = admission.refusal(me, admission.ticket, time.time() + GRACE)
    return refused(me, admission.run, reason) if reason else None


async def wait_for_refusal(admission: RunAdmission, me: str) -> AdmissionError:
    """Wait until this machine's ticket expires or is revoked. Return the error with which the volunteer must end."""
    while (error := _refusal(admission, me)) is None:
        await asyncio.sleep(LOOK)
    return error


async def ask_for_signed_heads(
    transport: HivemindTransport, run: Run, addresses: Sequence[str], folder: RunFolder | None = None
) -> None:
    """Load, from the folder, the heads that the run's archives have signed, and ask the nodes at `addresses` for newer
    signed heads.

    Heads that arrive later are kept in the folder, too.
    """
    if folder is not None:
        path = folder.signed_heads
        try:
            transport.runs.take_heads(run.run_id, unpack_heads(path.read_bytes()))
        except FileNotFoundError:
            pass
        except (OSError, SignedHeadsError) as error:
            logger.warning("the file of signed heads %s is ignored: %s", path, error)
        transport.runs.on_heads = partial(_keep, path, run.run_id)
    with suppress(TimeoutError):
        async with asyncio.timeout(ASK_LIMIT):
            await transport.runs.ask_for_heads(transport.call, run.run_id, map(peer_id_of, addresses))


def _keep(path: Path, wanted: str, run_id: str, packed: bytes) -> None:
    """Write `packed`, the newest list of signed heads or of revocations of the run `run_id`, to a file, if `wanted` is
    the same run id. Otherwise do nothing."""
    if run_id == wanted:
        with suppress(OSError):  # if `packed` cannot be written, other nodes still have it
            write_whole(path, [packed])


# An organiser's tickets ---------------------------------------------------------------------------------------
class IssuedTickets:
    """An organiser's record of a run, in two files of a folder: all tickets issued, and the newest list of revoked
    tickets."""

    def __init__(self, run: str, organiser: str, base: Path | None = None) -> None:
        self._run = run
        self._organiser = organiser
        self._folder = RunFolder.at(run, organiser, base).path

    @property
    def tickets(self) -> list[Ticket]:
        """All tickets issued, oldest first. Raises: MachineError if their file cannot be read."""
        with _readable(self._folder / GIVEN) as kept:
            return [Ticket.parse(line) for line in (kept or b"").decode().splitlines()]

    def add(self, ticket: Ticket) -> None:
        """Append a new ticket to the file of tickets. Raises: MachineError if the file cannot be written."""
        with self._writable(), open(self._folder / GIVEN, "a", opener=open_private) as file:
            file.write(f"{ticket}\n")

    @property
    def revocations(self) -> Revocations | None:
        """The newest list of revoked tickets that this machine has signed, or None. Raises: MachineError if its file
        cannot be read."""
        with _readable(self._folder / GIVEN_REVOCATIONS) as kept:
            return None if kept is None else Revocations.unpack(kept, self._run, self._organiser)

    def revoke(self, ids: Sequence[str], organiser: Identity, published: Revocations | None = None) -> Revocations:
        """Sign, store and return a list of revoked tickets: those with these `ids`, those in this machine's newest
        list, and those in the list that the run has `published`.

        Raises: AdmissionError, SettingsError, MachineError.
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
        """Create the folder, and run the `with` block. Raises: MachineError if either raises an OSError."""
        try:
            make_private_folder(self._folder)
            yield
        except OSError as error:
            message = f"the folder {self._folder} cannot be written to: {error.strerror}."
            raise MachineError(message, "Name another one with --state.") from error


@contextmanager
def _readable(path: Path) -> Iterator[bytes | None]:
    """Yield a file's content, or None if the file does not exist. Raises: MachineError if the file cannot be read, or
    the `with` block finds its content invalid."""
    try:
        kept = None
        with suppress(FileNotFoundError):
            kept = path.read_bytes()
        yield kept
    except (OSError, ValueError, AdmissionError) as error:
        raise MachineError(f"{path} cannot be read: {error}.", "Restore it from a copy, or move it away.") from error


def _id(text: str) -> bytes:
    """Return a ticket's id as bytes. Raises: SettingsError if `text` is no such id in hexadecimal."""
    with suppress(ValueError):
        if len(found := bytes.fromhex(text)) == ID_BYTES:
            return found
    raise SettingsError(f"{quoted(text, 40)} is not the id of a ticket.", "`invite list` shows them.")
