"""The entries that a peer applied, as JSON lines: what an audit, or the reference, needs to repeat the run.

A line holds the entry's index, its header (canonical bytes, in hexadecimal) and the state digest after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from opendiloco.errors import MachineError
from peers.log.header import Header
from peers.values.wire import DIGEST_BYTES, pack, unpack


class JournalLine(BaseModel):
    """One line of the file."""

    index: int
    header: str
    state_digest: Annotated[str, Field(min_length=2 * DIGEST_BYTES, max_length=2 * DIGEST_BYTES)]


@dataclass(frozen=True)
class Journal:
    """A file that is only ever appended to."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> Journal:
        """To append to. The file is made now, so that a wrong name is not found out later. Raises: MachineError."""
        journal = cls(path)
        journal._write("")
        return journal

    def append(self, header: Header, state_digest: bytes) -> None:
        """Raises: MachineError when the disk does not take it."""
        line = JournalLine(index=header.index, header=pack(header).hex(), state_digest=state_digest.hex())
        self._write(line.model_dump_json() + "\n")

    def _write(self, text: str) -> None:
        try:
            with self.path.open("a") as file:
                file.write(text)
        except OSError as error:
            raise MachineError(
                f"cannot write to the journal {self.path}: {error.strerror}.",
                "Name a file on a disk with space, or leave out --journal.",
            ) from error

    def __iter__(self) -> Iterator[tuple[Header, bytes]]:
        """Headers and state digests, in the order in which they were applied."""
        for text in self.path.read_text().splitlines():
            line = JournalLine.model_validate_json(text)
            yield unpack(Header, bytes.fromhex(line.header)), bytes.fromhex(line.state_digest)
