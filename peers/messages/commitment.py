"""A member's commitment to its contribution, signed before the exchange, and chunks that show that it was a lie.

The commitment is signed, and names the root of a tree over all its chunks and their norms (`SumTree` in
peers/values/chunks.py). Each chunk comes with its way up to that root. So bytes that lead there are its own, from
any sender; and if they are no blocks, or have another norm than the leaf says, every peer can see that it lied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from peers.log.header import MEMBER_LIMIT, Position
from peers.values.chunks import MOST_LEVELS, NODE, Sum, root_of
from peers.values.identity import Keys, Signature, Verify
from peers.values.wire import MESSAGE_LIMIT, Count, Digest, PeerId, Value, digest_of, pack, pack_plain
from peers.values.workload import BadBlocksError, Blocks, Inspect

COMMITMENT_CONTEXT = b"diloco-peer contribution\0"
EVIDENCE_LIMIT = MESSAGE_LIMIT - (1 << 14)
"""Bytes of a chunk that fits into a message: all formats' chunks do, but those of fp16 in large models."""

Squares = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
"""A squared norm."""
Path = Annotated[bytes, Field(strict=True, max_length=MOST_LEVELS * NODE.size)]


class Author(Value):
    """The peer that commits, as which start, and to which of its trainings for a position: it may train again there."""

    peer: PeerId
    incarnation: Count
    position: Position
    number: Count


class _Pledge(Value):
    """What a member signs: it contributes this. For one round it signs no other."""

    author: Author
    digest: Digest
    squares: Squares
    format: Count

    @property
    def text(self) -> bytes:
        return COMMITMENT_CONTEXT + pack(self)


class Contribution(Value):
    """The root over a contribution's chunks and their squared norms; `number` counts its owner's trainings for the
    position. The chunks are in a `format` of those that the manifest allows."""

    digest: Digest
    squares: Squares
    number: Count = 0
    format: Count = 0

    @property
    def root(self) -> Sum:
        return Sum(self.digest, self.squares)

    def author(self, peer: str, incarnation: int, position: Position) -> Author:
        """Return as whom a peer has committed to it."""
        return Author(peer=peer, incarnation=incarnation, position=position, number=self.number)

    def signed(self, signature: bytes) -> Commitment:
        """Return it with its owner's signature, if it is one."""
        return Commitment(
            digest=self.digest, squares=self.squares, number=self.number, format=self.format, signature=signature
        )


class Norms(Value):
    """The squared norms of all contributions to a round, in its order, and a digest that names all else of them. A
    member that does not average needs no more."""

    squares: Annotated[tuple[Squares, ...], Field(max_length=MEMBER_LIMIT)]
    rest: Digest

    @classmethod
    def of(cls, contributions: Sequence[Contribution]) -> Norms:
        squares = tuple(one.squares for one in contributions)
        return cls(
            squares=squares, rest=digest_of(pack_plain([[one.digest, one.number, one.format] for one in contributions]))
        )

    @property
    def digest(self) -> bytes:
        """Return what names the commitments of all members of a round."""
        return digest_of(pack(self))


def digest_of_all(contributions: Sequence[Contribution]) -> bytes:
    """Return what names the commitments of all members of a round, in its order."""
    return Norms.of(contributions).digest


NOTHING = digest_of_all(())
"""What names those of a round to which nobody contributes."""


class Commitment(Contribution):
    """A contribution, and its owner's signature of it."""

    signature: Signature

    @property
    def contribution(self) -> Contribution:
        return Contribution(digest=self.digest, squares=self.squares, number=self.number, format=self.format)

    def text(self, author: Author) -> bytes:
        """Return what the peer has signed, if it is its own."""
        return _pledge(self.root, author, self.format).text

    def is_of(self, author: Author, verify: Verify) -> bool:
        """Return whether the peer has signed it for this round."""
        return verify(author.peer, self.text(author), self.signature)


class ChunkProof(Value):
    """How a chunk follows from its sender's commitment: its squared norm, and the nodes beside its way to the root."""

    squares: Squares
    path: Path


class CommittedChunk(Value):
    """A chunk as its owner committed to it, with its signature. It convinces everybody, or nobody."""

    commitment: Commitment
    chunk: Count
    proof: ChunkProof
    data: Annotated[bytes, Field(strict=True, max_length=EVIDENCE_LIMIT)]

    def convicts(self, author: Author, chunks: int, verify: Verify, inspect: Inspect) -> bool:
        """Return whether these bytes are what their author has committed to, and nothing that one may commit to."""
        said = self.commitment
        return (
            leads_to(said.root, self.chunk, chunks, digest_of(self.data), self.proof)
            and said.is_of(author, verify)
            and fault_in(self.chunk, self.data, self.proof, inspect, said.format) is not None
        )


def commit_to(root: Sum, author: Author, keys: Keys, format: int = 0) -> Commitment:
    """Return the peer's own signed commitment."""
    signature = keys.sign(_pledge(root, author, format).text)
    contribution = Contribution(digest=root.digest, squares=root.squares, number=author.number, format=format)
    return contribution.signed(signature)


def leads_to(root: Sum, chunk: int, chunks: int, digest: bytes, proof: ChunkProof) -> bool:
    """Return whether a chunk with this digest is the one that was committed to."""
    return chunk < chunks and root_of(chunk, chunks, Sum(digest, proof.squares), proof.path) == root


def fault_in(chunk: int, data: Blocks, proof: ChunkProof, inspect: Inspect, format: int = 0) -> str | None:
    """Return what is wrong with bytes that were committed to in a format; None: nothing."""
    try:
        squares = inspect(chunk, data, format)
    except BadBlocksError as error:
        return str(error)
    return None if squares == proof.squares else f"its squared norm is {squares:g}, not {proof.squares:g}"


def _pledge(root: Sum, author: Author, format: int) -> _Pledge:
    return _Pledge(author=author, digest=root.digest, squares=root.squares, format=format)
