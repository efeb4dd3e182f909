"""The file of a peer's voting record, beside its log: `votes`, written whole before each vote is sent (R10).

A copy of the file is no memory of this machine's votes: the machine that it was copied from may have voted since, or
this one, if it is a backup. So the file names the machine, and itself by its inode and the inode's generation: a file
that is restored often gets the inode of the one that was removed. A disk image that is set back to an earlier state has
all of them; nothing here tells it from the disk as it was.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from peers.values.system import PARTIAL, open_private, sync_folder
from peers.values.wire import Digest, Value, WireError, digest_of, pack, unpack

VOTES = "votes"
MACHINE_ID = Path("/etc/machine-id")
RECORD_LIMIT = 1 << 24  # bytes; a locked header of 1,000 members has some 200 KB
ENVELOPE = 128  # bytes beside the record, at most
GET_GENERATION = 0x80087601  # Linux's FS_IOC_GETVERSION, which ext4, XFS and Btrfs answer
REMEDY = "make room there, or name a folder that this user may write to"


class VotesFileError(Exception):
    """A file of votes that can't be read, used or written. The message says why."""


class _Envelope(Value):
    """The record as it is written: `place` names the machine and the file."""

    place: Digest
    record: Annotated[bytes, Field(strict=True, max_length=RECORD_LIMIT)]


class VotesFile:
    """One file, for one process at a time."""

    def __init__(self, folder: Path, machine_id: Path = MACHINE_ID) -> None:
        """`folder` is the log's."""
        self.path = folder / VOTES
        self._machine_id = machine_id

    def read(self) -> bytes | None:
        """Return the record; None: there is no file. Raises: VotesFileError."""
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
        """Put this record in place of the one before; it is on the disk then. Raises: VotesFileError."""
        partial = self.path.with_name(self.path.name + PARTIAL)
        try:
            with open(partial, "wb", opener=open_private) as file:
                file.write(pack(_Envelope(place=self._place(file.fileno()), record=record)))
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise VotesFileError(f"{self.path} cannot be written: {error.strerror or error}; {REMEDY}") from error

    def _place(self, descriptor: int) -> bytes:
        """Return what names this machine and a file. Raises: OSError."""
        try:
            machine = self._machine_id.read_bytes().strip()
        except OSError:  # some systems have none
            machine = b""
        generation = bytearray(8)
        with suppress(OSError):  # some file systems have none, or use no number of an inode twice
            fcntl.ioctl(descriptor, GET_GENERATION, generation)
        return digest_of(b"%d %s %s" % (os.fstat(descriptor).st_ino, generation, machine))
