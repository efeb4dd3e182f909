"""What the members of one round have committed to: which chunks are theirs, and how much of each counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from peers.protocol.clipping import clipped
from peers.protocol.commitment import ChunkProof, Contribution, leads_to
from peers.protocol.messages import Begin

ROUNDING = 2.0
"""How many times as long a mean may become when it is quantized: the coarsest formats add a quarter."""


@dataclass(frozen=True)
class Contributions:
    """As a round's first Begin has them, by member; and the factors of those that are `clipped`."""

    chunks: int = 0
    commitments: Mapping[str, Contribution] = field(default_factory=dict)
    clipped: Mapping[str, float] = field(default_factory=dict)
    longest: float = math.inf
    """The squared norm that the averages of one reducer may have: a mean is no longer than what it is made of."""
    signature: bytes | None = None
    """Our own, of what we contribute: our chunks show it."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """What the members count with, where that is not their tokens."""

    @classmethod
    def of(
        cls, begin: Begin, clip: float, weights: Mapping[str, float], signature: bytes | None = None
    ) -> Contributions:
        """Return what follows from the commitments. A member that reduces nothing is told none, and needs none."""
        members = begin.round.contributors
        if len(begin.commitments) != len(members):
            return cls(signature=signature, weights=weights)
        said = {member.peer: commitment for member, commitment in zip(members, begin.commitments, strict=True)}
        squares = {peer: commitment.squares for peer, commitment in said.items()}
        factors = clipped(weights, squares, clip)
        counted = (squares[peer] * factors.get(peer, 1.0) ** 2 for peer in squares)
        longest = ROUNDING**2 * max(counted, default=0.0)
        return cls(begin.round.chunks, said, factors, longest, signature, weights)

    def has(self, sender: str, chunk: int, digest: bytes, proof: ChunkProof) -> bool:
        """Return whether a chunk with this digest is what the sender committed to."""
        said = self.commitments.get(sender)
        return said is not None and leads_to(said.root, chunk, self.chunks, digest, proof)


UNKNOWN = Contributions()
"""Of whoever averages nothing."""
