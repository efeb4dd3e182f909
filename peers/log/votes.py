"""The file `votes` in the log's folder: a peer's record of its own votes, written whole before it sends a vote (R10).

A copy of the file is no reliable memory of this machine's votes: the machine that it came from may have voted since, or
this one, if the copy is a backup. So the file names the machine, and itself by its inode and the inode's generation,
because a restored file often gets the inode of the removed one. A disk image that is reset to an earlier state has all
of these; this code cannot recognize it.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from peers.errors import remedy_for
from peers.values.system import PARTIAL, open_private, sync_folder
from peers.values.wire import Digest, Value, WireError, digest_of, pack, unpack

VOTES = "votes"
MACHINE_ID = Path("/etc/machine-id")
RECORD_LIMIT = 1 << 24  # maximum bytes of a record; a locked header of 1,000 members has some 200 KB
ENVELOPE = 128  # maximum bytes in the file in addition to the record
GET_GENERATION = 0x80087601  # Linux's ioctl that reads a file's generation: it changes when the inode number is reused

REMEDY = "If the folder is gone, move it back; else start again with one that this user may write to."
"""The remedy for an error of writing into the log's folder, unless the disk is full."""


class VotesFileError(Exception):
    """Error: a file of votes cannot be read, used or written. The message gives the reason."""


class _Envelope(Value):
    """The contents of the file: the record of votes, and `place`, a digest that names the machine and the file."""

    place: Digest
    record: Annotated[bytes, Field(strict=True, max_length=RECORD_LIMIT)]


class VotesFile:
    """The file of one peer's votes. Only one process may use it."""

    def __init__(self, folder: Path, machine_id: Path = MACHINE_ID) -> None:
        self.path = folder / VOTES
        self._machine_id = machine_id

    def read(self) -> bytes | None:
        """Return the record of votes; None if the file does not exist. Raises: VotesFileError."""
        try:
            with self.path.open("rb") as file:
                packed, place = file.read(RECORD_LIMIT + ENVELOPE + 1), self._place(file.fileno())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise VotesFileError(f"{self.path} cannot be read: {error.strerror or error}") from error
        try:
            envelope = unpack(_Envelope, packed, RECORD_LIMIT + ENVELOPE)
        except WireError as error:
            raise VotesFileError(f"{self.path} is damaged: {error}") from error
        if envelope.place != place:
            raise VotesFileError(f"{self.path} was copied here, or the machine has another id")
        return envelope.record

    def write(self, record: bytes) -> None:
        """Replace the record of votes, and return once it is on the disk. Raises: VotesFileError."""
        partial = self.path.with_name(self.path.name + PARTIAL)
        try:
            with open(partial, "wb", opener=open_private) as file:
                file.write(pack(_Envelope(place=self._place(file.fileno()), record=record)))
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            reason = f"{self.path} cannot be written: {error.strerror or error}."
            raise VotesFileError(f"{reason} {remedy_for(error, REMEDY)}") from error

    def _place(self, descriptor: int) -> bytes:
        """Return a digest that names this machine and an open file. Raises: OSError."""
        try:
            machine = self._machine_id.read_bytes().strip()
        except OSError:  # some systems have no machine id
            machine = b""
        generation = bytearray(8)
        with suppress(OSError):  # some file systems have no inode generation, or never reuse an inode's number
            fcntl.ioctl(descriptor, GET_GENERATION, generation)
        return digest_of(b"%d %s %s" % (os.fstat(descriptor).st_ino, generation, machine))
