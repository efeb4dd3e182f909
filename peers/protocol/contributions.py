"""The contributions of one round's members: which chunks are theirs, and how much of each counts (R3).

All reducers of a round compute the same from the same commitments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from peers.protocol.commitment import ChunkProof, Commitment, Contribution, leads_to
from peers.protocol.messages import Begin
from peers.protocol.rounds import Round
from peers.values.identity import Keys

ROUNDING = 2.0
"""Multiple of its length that a quantized mean may have: the coarsest formats add a quarter."""


@dataclass(frozen=True)
class Contributions:
    """The members' commitments, as a Begin has them, and the factors of those that are `clipped`. `weights` are what
    the members count with; the own `signature` goes with our chunks."""

    chunks: int = 0
    commitments: Mapping[str, Contribution] = field(default_factory=dict)
    clipped: Mapping[str, float] = field(default_factory=dict)
    longest: float = math.inf
    """The squared norm that the averages of one reducer may have: a mean is no longer than its longest part."""
    signature: bytes | None = None
    weights: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, begin: Begin, clip: float, weights: Mapping[str, float], signature: bytes | None = None
    ) -> Contributions:
        """Return what follows from the commitments. Begin has them for reducers alone."""
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
        """Return whether the sender has committed to a chunk with this digest."""
        said = self.commitments.get(sender)
        return said is not None and leads_to(said.root, chunk, self.chunks, digest, proof)


UNKNOWN = Contributions()
"""The contributions, as a member knows them that averages nothing."""


def clipped(weights: Mapping[str, float], squares: Mapping[str, float], clip: float) -> dict[str, float]:
    """Return the factors, below 1, of the contributions that are longer than `clip` times the median, given their
    weights and squared norms."""
    longest = clip * math.sqrt(median(weights, squares))
    norms = {peer: math.sqrt(squares[peer]) for peer in weights}
    return {peer: longest / norm for peer, norm in norms.items() if norm > longest}


def median(weights: Mapping[str, float], squares: Mapping[str, float]) -> float:
    """Return the least squared norm that at least half of the weights do not exceed.

    It is over weights, so that many members with little work do not decide it. Of two that weigh the same it is the
    smaller one: a step that is too short can be made up for.
    """
    half, seen = sum(weights.values()) / 2, 0.0
    for peer in sorted(weights, key=lambda name: (squares[name], name)):
        seen += weights[peer]
        if seen >= half:
            return squares[peer]
    return 0.0


class OwnersSignatures:
    """The signatures of the members' commitments, which come with their chunks. Each is checked once."""

    def __init__(self, round: Round, keys: Keys | None) -> None:
        """Without `keys` nothing is checked."""
        self._members = {member.peer: member for member in round.contributors}
        self._round = round
        self._keys = keys
        self._checked: dict[str, Commitment] = {}

    def checked(self, peer: str, contribution: Contribution | None, signature: bytes | None) -> Commitment | None:
        """Return the member's commitment, if this signature of it is its own."""
        if peer in self._checked:
            return self._checked[peer]
        if peer not in self._members or contribution is None or signature is None:
            return None
        author = self._round.author(self._members[peer], contribution)
        commitment = contribution.signed(signature)
        if self._keys is not None and not commitment.is_of(author, self._keys.verify):
            return None
        self._checked[peer] = commitment
        return commitment
