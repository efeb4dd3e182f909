"""Statements about averages of chunks, which the reducers sign."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from peers.log.header import MEMBER_LIMIT
from peers.messages.rounds import Round, RoundName
from peers.values.identity import Signature
from peers.values.wire import MESSAGE_LIMIT, Count, Digest, PeerId, Value, digest_of, pack

AVERAGE_CONTEXT = b"diloco-peer average\0"
MARK_BYTES = 16
"""Length of a mark. With half of it a reducer would need only 2³² tries, during the round, to find two averages with
the same mark."""
MARKED = MESSAGE_LIMIT // 2 // MARK_BYTES
"""Number of chunks that have a mark, so that the marks fill at most half a message. That is a payload of 16 GiB."""
Marks = Annotated[bytes, Field(strict=True, max_length=MARKED * MARK_BYTES)]
"""A mark of a few bytes for each chunk, in order, that distinguishes its average from others."""
Absent = Annotated[tuple[PeerId, ...], Field(max_length=MEMBER_LIMIT)]
"""Contributors whose blocks are not in an average, in roster order."""


class Origin(Value):
    """The origin of an average: the member that averaged the chunk, and that member's signature."""

    reducer: PeerId
    signature: Signature


class Averaged(Value):
    """A reducer's signed statement about one chunk: the digest of the chunk's average, and the members whose blocks are
    absent from the average."""

    chunk: Count
    digest: Digest
    absent: Absent
    origin: Origin

    @property
    def reducer(self) -> str:
        return self.origin.reducer


class Statement(Value):
    """The text that a reducer signs about an average. `terms` is a digest of all facts about the round that its members
    must agree on. In one incarnation a reducer signs only one statement about a chunk of a round."""

    round_name: RoundName
    terms: Digest
    reducer: PeerId
    incarnation: Count
    chunk: Count
    digest: Digest
    absent: Absent

    @property
    def text(self) -> bytes:
        return AVERAGE_CONTEXT + pack(self)

    @property
    def mark(self) -> bytes:
        return digest_of(self.text)[:MARK_BYTES]


def statement(round: Round, reducer: str, chunk: int, digest: bytes, absent: tuple[str, ...]) -> Statement:
    """Return the statement that the member `reducer` of a round signs about its average of a chunk."""
    return Statement(
        round_name=round.name,
        terms=round.terms,
        reducer=reducer,
        incarnation=round.incarnations.get(reducer, 0),
        chunk=chunk,
        digest=digest,
        absent=absent,
    )


def statement_of(round: Round, averaged: Averaged) -> Statement:
    """Return the full statement that the reducer of a signed average has signed."""
    return statement(round, averaged.reducer, averaged.chunk, averaged.digest, averaged.absent)
