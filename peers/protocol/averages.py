"""What reducers sign of the chunks that they averaged: one that gives its partners different bytes is found out.

Whoever takes an average keeps the signature. If members end up with different payloads, two of them show what they got:
two statements by one reducer about one chunk that differ are proof, whoever shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from peers.log.header import MEMBER_LIMIT
from peers.protocol.rounds import Attempt
from peers.protocol.signed_averages import Averaged, Origin
from peers.values.identity import Keys
from peers.values.wire import DIGEST_BYTES, MESSAGE_LIMIT, Count, Digest, PeerId, Value, digest_of, pack

AVERAGE_CONTEXT = b"diloco-peer average\0"
MARK_BYTES = 16
"""With half of them a reducer could find two averages with one mark while the round lasts: it would need 2³² tries."""
MARKED = MESSAGE_LIMIT // 2 // MARK_BYTES
"""Chunks that are told apart: as many marks as a message may have. That is a payload of 16 GiB."""
NO_STARTS: Mapping[str, int] = {}
NO_TERMS = bytes(DIGEST_BYTES)


class Statement(Value):
    """What a reducer signs: in this round, as its `terms` name it, the average of this chunk has this digest, without
    the blocks of these. In one incarnation it signs nothing else of the chunk."""

    round_name: Attempt
    terms: Digest
    reducer: PeerId
    incarnation: Count
    chunk: Count
    digest: Digest
    absent: Annotated[tuple[PeerId, ...], Field(max_length=MEMBER_LIMIT)]

    @property
    def text(self) -> bytes:
        return AVERAGE_CONTEXT + pack(self)


class Averages:
    """The averaged chunks of one round that are here, as their reducers have signed them."""

    def __init__(
        self,
        me: str,
        round_name: Attempt,
        keys: Keys | None,
        starts: Mapping[str, int] = NO_STARTS,
        terms: bytes = NO_TERMS,
    ) -> None:
        """`starts` are the incarnations of the round's members; `terms` name what they all know of it. Without `keys`
        nothing is signed, nor checked."""
        self._me = me
        self._round_name = round_name
        self._keys = keys
        self._starts = starts
        self._terms = terms
        self._signed: dict[int, Averaged] = {}

    def sign(self, chunk: int, digest: bytes, absent: tuple[str, ...]) -> None:
        """We have averaged this ourselves."""
        if self._keys is not None:
            signature = self._keys.sign(self._text(self._me, chunk, digest, absent))
            self.keep(chunk, digest, absent, Origin(reducer=self._me, signature=signature))

    def is_signed(self, chunk: int, digest: bytes, absent: tuple[str, ...], origin: Origin) -> bool:
        """Return whether the reducer that is named has signed this of a chunk."""
        text = self._text(origin.reducer, chunk, digest, absent)
        return self._keys is None or self._keys.verify(origin.reducer, text, origin.signature)

    def keep(self, chunk: int, digest: bytes, absent: tuple[str, ...], origin: Origin) -> None:
        """A chunk is here, and signed."""
        self._signed[chunk] = Averaged(chunk=chunk, digest=digest, absent=absent, origin=origin)

    def origin(self, chunk: int) -> Origin | None:
        """Return who has averaged a chunk, with its signature."""
        signed = self._signed.get(chunk)
        return signed.origin if signed else None

    @property
    def of_others(self) -> list[Averaged]:
        """Return the averages that others have made."""
        return [signed for signed in self._signed.values() if signed.origin.reducer != self._me]

    def marks(self) -> bytes:
        """Return what tells these averages from others, a few bytes for each chunk."""
        return b"".join(self._mark(self._signed[chunk]) for chunk in sorted(self._signed)[:MARKED])

    def difference(self, marks: bytes) -> Averaged | None:
        """Return the first of our averages whose mark is another one."""
        for place, chunk in enumerate(sorted(self._signed)[:MARKED]):
            if self._mark(self._signed[chunk]) != marks[place * MARK_BYTES : (place + 1) * MARK_BYTES]:
                return self._signed[chunk]
        return None

    def start_of(self, reducer: str) -> int:
        """Return the incarnation in which a reducer signs."""
        return self._starts.get(reducer, 0)

    def signed(self, chunk: int) -> Averaged | None:
        """Return what has been signed to us of a chunk."""
        return self._signed.get(chunk)

    def _mark(self, signed: Averaged) -> bytes:
        return digest_of(self._text(signed.origin.reducer, signed.chunk, signed.digest, signed.absent))[:MARK_BYTES]

    def _text(self, reducer: str, chunk: int, digest: bytes, absent: tuple[str, ...]) -> bytes:
        return Statement(
            round_name=self._round_name,
            terms=self._terms,
            reducer=reducer,
            incarnation=self.start_of(reducer),
            chunk=chunk,
            digest=digest,
            absent=absent,
        ).text
