"""The tickets that one key has given for one run: a file beside what else this machine keeps of the run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from opendiloco.checkpoints.run_folder import RunFolder
from opendiloco.errors import MachineError
from peers.errors import AdmissionError, quoted
from peers.values.private_folders import make_private_folder, open_private
from peers.values.tickets import ID_BYTES, REVOKED_LIMIT, Revocations, Ticket
from peers.values.whole_files import write_whole
from peers.values.wire import pack

TICKETS, REVOKED = "issued.jsonl", "issued.revocations"


@dataclass(frozen=True)
class IssuedTicket:
    """`first`: where its places begin among those of the ticket that it was signed with."""

    id: str
    places: int
    first: int
    expires: int
    peer: str | None
    text: str


class Issued:
    """What the key `giver` has given away of the run's places."""

    def __init__(self, run: str, giver: str, base: Path | None = None) -> None:
        self.run = run
        self._folder = RunFolder.at(run, giver, base).path

    @property
    def tickets(self) -> list[IssuedTicket]:
        """Return all of them, in the order in which they were given. Raises: MachineError."""
        try:
            lines = (self._folder / TICKETS).read_text().splitlines()
            return [IssuedTicket(**json.loads(line)) for line in lines]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError) as error:
            raise MachineError(
                f"{self._folder / TICKETS} cannot be read: {error}.", "Restore it from a copy, or move it away."
            ) from error

    def add(self, ticket: Ticket, first: int) -> IssuedTicket:
        """Raises: MachineError when it cannot be written down."""
        peer = None if ticket.is_for_anybody else ticket.is_for
        issued = IssuedTicket(ticket.id.hex(), ticket.count, first, ticket.expires, peer, str(ticket))
        try:
            make_private_folder(self._folder)
            with open(self._folder / TICKETS, "a", opener=open_private) as file:
                file.write(json.dumps(asdict(issued)) + "\n")
        except OSError as error:
            raise self._unusable(error) from error
        return issued

    def next_place(self, given: Ticket) -> int:
        """Return the first place of a ticket that is not given on yet; the very first is its holder's own."""
        ours = [issued for issued in self.tickets if Ticket.parse(issued.text).parent == given.id]
        return max((issued.first + issued.places for issued in ours), default=1)

    @property
    def revoked(self) -> tuple[bytes, ...]:
        """Return the ids of the tickets that were revoked."""
        return self.revocations.revoked if self.revocations else ()

    @property
    def revocations(self) -> Revocations | None:
        """Return the newest list that this machine has signed. Raises: MachineError."""
        path = self._folder / REVOKED
        try:
            return Revocations.unpack(path.read_bytes(), self.run, self._folder.name)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise MachineError(
                f"{path} cannot be read: {error}.", "Restore it from a copy, or move it away."
            ) from error

    def save(self, revocations: Revocations) -> None:
        """Keep a list as the newest one. Raises: MachineError."""
        try:
            make_private_folder(self._folder)
            write_whole(self._folder / REVOKED, [pack(revocations)])
        except OSError as error:
            raise self._unusable(error) from error

    def all_revoked(self, ids: tuple[str, ...], known: tuple[bytes, ...] = ()) -> tuple[bytes, ...]:
        """Return those revoked before, those `known` to others, and these. Raises: AdmissionError."""
        found = dict.fromkeys((*self.revoked, *known))
        for one in ids:
            try:
                found[_id(one)] = None
            except ValueError:
                raise AdmissionError(
                    f"{quoted(one, 40)} is not the id of a ticket.", "`invite list` shows them."
                ) from None
        if len(found) > REVOKED_LIMIT:
            raise AdmissionError(
                f"{len(found)} tickets are more than the {REVOKED_LIMIT} that can be revoked.", "Begin a new run."
            )
        return tuple(found)

    def _unusable(self, error: OSError) -> MachineError:
        return MachineError(
            f"the folder {self._folder} cannot be written to: {error.strerror}.", "Name another one with --state."
        )


def _id(text: str) -> bytes:
    """Raises: ValueError."""
    found = bytes.fromhex(text)
    if len(found) != ID_BYTES:
        raise ValueError(f"{len(found)} bytes")
    return found
