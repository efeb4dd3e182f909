"""A member's commitment to its contribution, signed before the exchange, and chunks that prove the commitment false.

The commitment names the root of a tree over all chunks of the contribution and their norms (`SumTree` in
peers/values/chunks.py). Each chunk comes with its path to that root. So bytes that lead to the root are the member's
own, whichever peer sends them. If they are no valid blocks, or have another norm than the leaf says, every peer can see
that the member lied.
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
"""Maximum bytes of a chunk in a proof, so that it fits into a message. All formats' chunks do, except those of fp16 in
large models."""

Squares = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
"""A squared norm."""
Path = Annotated[bytes, Field(strict=True, max_length=MOST_LEVELS * NODE.size)]


class Author(Value):
    """The author of a commitment: the peer, its incarnation, the position, and the count of the peer's trainings at the
    position so far, since it may train there more than once."""

    peer: PeerId
    incarnation: Count
    position: Position
    number: Count


class _Pledge(Value):
    """The text that a member signs to commit to a contribution. A member signs one such text in each round."""

    author: Author
    digest: Digest
    squares: Squares
    format: Count

    @property
    def text(self) -> bytes:
        return COMMITMENT_CONTEXT + pack(self)


class Contribution(Value):
    """A contribution, named by the Merkle root over its chunks' digests and squared norms. `number` counts its owner's
    trainings at the position. `format` is the number of its format among those that the manifest allows."""

    digest: Digest
    squares: Squares
    number: Count = 0
    format: Count = 0

    @property
    def root(self) -> Sum:
        return Sum(self.digest, self.squares)

    def author(self, peer: str, incarnation: int, position: Position) -> Author:
        """Return the author that the commitment names: the arguments, and this contribution's `number`."""
        return Author(peer=peer, incarnation=incarnation, position=position, number=self.number)

    def signed(self, signature: bytes) -> Commitment:
        """Return the commitment to this contribution with a signature, which is not checked."""
        return Commitment(
            digest=self.digest, squares=self.squares, number=self.number, format=self.format, signature=signature
        )


class Norms(Value):
    """The squared norms of all contributions to a round, in roster order, and a digest of the contributions' other
    fields. A member that averages no chunk needs only these, and not the contributions."""

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
        """The digest of `squares` and `rest`: of the squared norms, and of the contributions' other fields."""
        return digest_of(pack(self))


def digest_of_all(contributions: Sequence[Contribution]) -> bytes:
    """Return the digest of all contributions to a round, given in roster order."""
    return Norms.of(contributions).digest


NOTHING = digest_of_all(())
"""The digest for a round without contributors."""


class Commitment(Contribution):
    """A contribution, and its owner's signature, by which the owner commits to the contribution."""

    signature: Signature

    @property
    def contribution(self) -> Contribution:
        return Contribution(digest=self.digest, squares=self.squares, number=self.number, format=self.format)

    def text(self, author: Author) -> bytes:
        """Return the bytes that the author signs to commit to this contribution."""
        return _pledge(self.root, author, self.format).text

    def is_of(self, author: Author, verify: Verify) -> bool:
        """Return True if the author has signed this commitment."""
        return verify(author.peer, self.text(author), self.signature)


class ChunkProof(Value):
    """A Merkle proof that a chunk belongs to its sender's commitment: the chunk's squared norm, and the sibling nodes
    up to the root."""

    squares: Squares
    path: Path


class CommittedChunk(Value):
    """A chunk with its owner's signed commitment and Merkle proof, as evidence that any peer can check."""

    commitment: Commitment
    chunk: Count
    proof: ChunkProof
    data: Annotated[bytes, Field(strict=True, max_length=EVIDENCE_LIMIT)]

    def convicts(self, author: Author, chunks: int, verify: Verify, inspect: Inspect) -> bool:
        """Return True if the author has committed to these bytes although they are no valid chunk."""
        signed = self.commitment
        return (
            leads_to(signed.root, self.chunk, chunks, digest_of(self.data), self.proof)
            and signed.is_of(author, verify)
            and fault_in(self.chunk, self.data, self.proof, inspect, signed.format) is not None
        )


def commit_to(root: Sum, author: Author, keys: Keys, format: int = 0) -> Commitment:
    """Sign and return this peer's commitment to a contribution with this root. This peer must be the `author`."""
    signature = keys.sign(_pledge(root, author, format).text)
    contribution = Contribution(digest=root.digest, squares=root.squares, number=author.number, format=format)
    return contribution.signed(signature)


def leads_to(root: Sum, chunk: int, chunks: int, digest: bytes, proof: ChunkProof) -> bool:
    """Return True if a chunk with this digest and proof belongs to a commitment with this root."""
    return chunk < chunks and root_of(chunk, chunks, Sum(digest, proof.squares), proof.path) == root


def fault_in(chunk: int, data: Blocks, proof: ChunkProof, inspect: Inspect, format: int = 0) -> str | None:
    """Return the reason why a chunk's committed bytes are invalid in a format; None if they are valid."""
    try:
        squares = inspect(chunk, data, format)
    except BadBlocksError as error:
        return str(error)
    return None if squares == proof.squares else f"its squared norm is {squares:g}, not {proof.squares:g}"


def _pledge(root: Sum, author: Author, format: int) -> _Pledge:
    return _Pledge(author=author, digest=root.digest, squares=root.squares, format=format)
