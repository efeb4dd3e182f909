"""What the peer process and another machine of its volunteer say to each other, over one TCP connection.

A frame is a header of fixed size (its kind, a number, an offset, the body's length) and a body. What a frame may hold
follows from its kind, and is checked before anything is made of it; nothing is pickled.
"""

from __future__ import annotations

import asyncio
from enum import IntEnum
from struct import Struct
from typing import Annotated, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opendiloco.errors import IslandError
from opendiloco.workers.control import LINE_LIMIT
from peers.errors import DilocoPeerError
from peers.values.wire import printable

HEADER = Struct(">BIQI")
PIECE = 1 << 22
"""Bytes of a memory file in one frame."""
BUFFER = 2 * PIECE
"""Bytes that are read ahead of whoever waits for them."""
WORDS_LIMIT = 1 << 16
WORTH_READING = 5_000
"""Characters."""
PARTS_LIMIT = 1 << 24
REMEDY = "Check the network between the machines; torchrun --max-restarts N starts all of them again."


class Kind(IntEnum):
    """What a frame is. `number` is that of a worker or of a memory file."""

    CHALLENGE = 1  # first machine: 32 random bytes
    HELLO = 2  # node: a Hello
    WELCOME = 3  # first machine: its own proof
    REFUSED = 4  # both: a Reason
    START = 5  # first machine: start worker `number` with `offset` threads
    KILL = 6  # first machine: end worker `number`
    LINE = 7  # both: a line of worker `number`'s control channel
    DIED = 8  # node: worker `number` is dead; a Reason
    RESIZE = 9  # first machine: memory file `number` is to have `offset` bytes
    PUT = 10  # both: bytes of memory file `number` from `offset` on
    GET = 11  # first machine: send these parts of memory file `number`; Wanted
    LEAVE = 12  # node: somebody has asked this machine to leave
    BYE = 13  # first machine: this volunteer has left


LIMITS = {
    Kind.CHALLENGE: 32,
    Kind.HELLO: WORDS_LIMIT,
    Kind.WELCOME: 64,
    Kind.REFUSED: WORDS_LIMIT,
    Kind.START: 0,
    Kind.KILL: 0,
    Kind.LINE: LINE_LIMIT,
    Kind.DIED: WORDS_LIMIT,
    Kind.RESIZE: 0,
    Kind.PUT: PIECE,
    Kind.GET: PARTS_LIMIT,
    Kind.LEAVE: 0,
    Kind.BYE: 0,
}
"""Bytes that a body may have at most."""

Word = Annotated[str, Field(max_length=200)]
Sentence = Annotated[str, Field(max_length=20_000)]
Offset = Annotated[int, Field(ge=0, lt=2**62)]


class Frame(NamedTuple):
    """One frame; see `Kind` for what its fields mean."""

    kind: Kind
    number: int = 0
    offset: int = 0
    body: bytes | memoryview = b""


class Body(BaseModel):
    """A body in JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def packed(self) -> bytes:
        """Return it as bytes."""
        return self.model_dump_json().encode()


class Hello(Body):
    """Which node this is, of which run, in which versions. `proof` shows that it knows the secret, and `challenge` has
    the first machine show that it does. `kept` says after how many outer steps each peer that was on this machine has
    kept its newest checkpoint of the run."""

    proof: Word
    challenge: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    rank: Annotated[int, Field(ge=1, le=1 << 16)]
    run: Word
    versions: dict[Word, Word]
    kept: dict[Word, Offset] = {}
    cores: Annotated[int, Field(ge=1, le=1 << 16)]


class Place(Body):
    """What torchrun's store says of the first machine: where it listens, and what shows that somebody has read it."""

    port: Annotated[int, Field(ge=1, le=65535)]
    secret: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Reason(Body):
    """An error in words."""

    message: Sentence
    remedy: Sentence = ""

    @classmethod
    def of(cls, error: DilocoPeerError) -> Reason:
        """Return an error's, cut off where it is too long to be read."""
        return cls(message=error.message[:WORTH_READING], remedy=error.remedy[:WORTH_READING])

    @property
    def said(self) -> tuple[str, str]:
        """The message and the remedy, fit for a terminal."""
        return printable(self.message), printable(self.remedy)


class Ended(Body):
    """That the machines of a start will not come together: why, or that somebody on the machine `by` asked to leave."""

    by: Word
    reason: Reason | None = None


class Wanted(Body):
    """Ranges of bytes."""

    parts: tuple[tuple[Offset, Offset], ...]


Parsed = TypeVar("Parsed", bound=Body)


def parse(kind: type[Parsed], body: bytes | memoryview) -> Parsed:
    """Return a body in JSON, checked. Raises: IslandError."""
    try:
        return kind.model_validate_json(bytes(body))
    except ValidationError as error:
        raise IslandError(f"another machine of this volunteer sent no {kind.__name__}.", REMEDY) from error


def header(frame: Frame) -> bytes:
    """Return what comes before a frame's body."""
    assert len(frame.body) <= LIMITS[frame.kind]
    return HEADER.pack(frame.kind, frame.number, frame.offset, len(frame.body))


def write_frame(writer: asyncio.StreamWriter, frame: Frame) -> None:
    """Have a frame sent. What is written to a connection that is gone is lost without an error."""
    if not writer.is_closing():
        writer.write(header(frame))
        if frame.body:
            writer.write(frame.body)


async def read_frame(reader: asyncio.StreamReader, *kinds: Kind) -> Frame:
    """Return the next frame. Raises: IslandError when it is none of these kinds, or the connection ends."""
    try:
        kind, number, offset, length = HEADER.unpack(await reader.readexactly(HEADER.size))
        if kind not in kinds or length > LIMITS[Kind(kind)]:
            said = f"a frame of kind {kind} and {length} bytes"
            raise IslandError(f"another machine of this volunteer sent {said}.", REMEDY)
        return Frame(Kind(kind), number, offset, await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError) as error:
        raise IslandError("the connection to another machine of this volunteer is lost.", REMEDY) from error
