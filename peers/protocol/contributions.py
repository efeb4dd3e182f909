"""The contributions of one round's members: which chunks are theirs, and how much of each counts (R3)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from peers.log.state import LogState
from peers.messages.commitment import ChunkProof, Commitment, Contribution, Norms, leads_to
from peers.messages.messages import Begin
from peers.messages.rounds import Round
from peers.values.identity import Keys

FEW = 16
"""Members that all know all commitments: those of a larger round are its square."""
ROUNDING = 2.0
"""Times as long, that a mean may become when it is quantized: the coarsest formats add a quarter."""


@dataclass(frozen=True)
class Contributions:
    """The members' commitments, as a Begin has them, and by how much those that are too long are `clipped`."""

    chunks: int = 0
    commitments: Mapping[str, Contribution] = field(default_factory=dict)
    squares: Mapping[str, float] = field(default_factory=dict)
    """Their squared norms: known to all that average or vote."""
    clip: float = math.inf
    signature: bytes | None = None
    """Our own, of what we contribute: our chunks show it."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """What the members count with, where that is not their tokens."""
    _longest: dict[frozenset[str], float] = field(default_factory=dict, repr=False, compare=False)
    """By who is absent: it is asked for each average, and rarely another one."""

    @classmethod
    def of(
        cls, begin: Begin, clip: float, weights: Mapping[str, float], signature: bytes | None = None
    ) -> Contributions:
        """Return what follows from what a member is told."""
        members = [member.peer for member in begin.round.contributors]
        norms = Norms.of(begin.commitments) if begin.commitments else begin.norms
        said = dict(zip(members, begin.commitments, strict=True)) if begin.commitments else {}
        squares = dict(zip(members, norms.squares, strict=True)) if norms else {}
        return cls(begin.round.chunks, said, squares, clip, signature, weights)

    def clipped(self, absent: Collection[str] = ()) -> dict[str, float]:
        """Return the factors, below 1, of those that are too long beside the others, without members that are absent:
        what these are said to have committed to need not be true."""
        present = {peer: weight for peer, weight in self.weights.items() if peer not in absent}
        return clipped(present, self.squares, self.clip) if self.squares else {}

    def longest(self, absent: frozenset[str] = frozenset()) -> float:
        """Return the squared norm that the averages of one reducer may have: a mean is no longer than what it is made
        of. Members that were absent from all averages that we made do not count."""
        if not self.squares:
            return math.inf
        if absent not in self._longest:
            factors = self.clipped(absent)
            present = {peer: squares for peer, squares in self.squares.items() if peer not in absent}
            counted = (squares * factors.get(peer, 1.0) ** 2 for peer, squares in present.items())
            self._longest[absent] = ROUNDING**2 * max(counted, default=0.0)
        return self._longest[absent]

    def has(self, sender: str, chunk: int, digest: bytes, proof: ChunkProof) -> bool:
        """Return whether a chunk with this digest is what the sender committed to."""
        said = self.commitments.get(sender)
        return said is not None and leads_to(said.root, chunk, self.chunks, digest, proof)


UNKNOWN = Contributions()
"""The contributions, as a member knows them that neither averages nor votes."""


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


def informed(begin: Begin, log: LogState) -> tuple[Collection[str], Collection[str]]:
    """Return the members that need to know all commitments, as those do who average, and where few take part all, who
    check an average now and then; and the members that vote, which need the norms to tell averages that are too long.
    """
    round = begin.round
    if len(round.peers) <= FEW:
        return round.peers, round.peers
    averaging = {share.member.peer for share in round.shares if share.chunks}
    electors = {peer for peer, _ in log.electors}
    return averaging | {heir for _, heir in begin.heirs}, round.peers if round.group else electors or round.peers


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
