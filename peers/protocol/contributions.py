"""The commitments of one round's members: which chunks are theirs, and how much of each counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from peers.protocol.clipping import clipped
from peers.protocol.commitment import ChunkProof, Commitment, Contribution, leads_to
from peers.protocol.messages import Begin
from peers.protocol.rounds import Round
from peers.values.identity import Keys

ROUNDING = 2.0
"""How many times as long a mean may become when it is quantized: the coarsest formats add a quarter."""


@dataclass(frozen=True)
class Contributions:
    """The members' commitments, as a Begin has them; and the factors of those that are `clipped`."""

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
"""What a member that averages nothing knows."""


class OwnersSignatures:
    """The signatures of the members' commitments, as their chunks show them: each is checked once in a round."""

    def __init__(self, round: Round, keys: Keys | None) -> None:
        """Without `keys` nothing is checked."""
        self._members = {member.peer: member for member in round.contributors}
        self._round = round
        self._keys = keys
        self._checked: dict[str, Commitment] = {}

    def checked(self, peer: str, contribution: Contribution | None, signature: bytes | None) -> Commitment | None:
        """Return what a member contributes, with this signature, if that is its own."""
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
