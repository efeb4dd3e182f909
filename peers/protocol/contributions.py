"""The commitments of one round's members to their contributions, and the factors that shorten contributions with too
large a norm (R3)."""

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
"""Maximum members of a round in which all get all commitments. In a larger round that traffic would grow with the
square."""
ROUNDING = 2.0
"""Largest factor by which quantization may lengthen a mean. The coarsest formats add a quarter."""


@dataclass(frozen=True)
class Contributions:
    """The members' commitments, as the leader's message Begin lists them, and the limits on contributions' norms."""

    chunks: int = 0
    commitments: Mapping[str, Contribution] = field(default_factory=dict)
    squares: Mapping[str, float] = field(default_factory=dict)
    """Squared norm of each member's contribution, known to all members that average or vote."""
    clip: float = math.inf
    signature: bytes | None = None
    """This peer's signature of its own contribution, which it sends with its chunks."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each member, if that is not its tokens."""
    _longest: dict[frozenset[str], float] = field(default_factory=dict, repr=False, compare=False)
    """Cache of `longest` by absent members: it is needed for each average, and rarely changes."""

    @classmethod
    def of(
        cls, begin: Begin, clip: float, weights: Mapping[str, float], signature: bytes | None = None
    ) -> Contributions:
        """Return the contributions that a Begin message describes."""
        members = [member.peer for member in begin.round.contributors]
        norms = Norms.of(begin.commitments) if begin.commitments else begin.norms
        commitments = dict(zip(members, begin.commitments, strict=True)) if begin.commitments else {}
        squares = dict(zip(members, norms.squares, strict=True)) if norms else {}
        return cls(begin.round.chunks, commitments, squares, clip, signature, weights)

    def clipped(self, absent: Collection[str] = ()) -> dict[str, float]:
        """Return a factor below 1 for each member whose contribution has too large a norm compared with the others'.
        `absent` members are left out, because their commitments may be false."""
        present = {peer: weight for peer, weight in self.weights.items() if peer not in absent}
        return clipped(present, self.squares, self.clip) if self.squares else {}

    def longest(self, absent: frozenset[str] = frozenset()) -> float:
        """Return the limit on the squared norm that all averages of one reducer have together. It follows from the
        contributions of members that are not `absent`: a mean's norm is at most the largest norm among them."""
        if not self.squares:
            return math.inf
        if absent not in self._longest:
            factors = self.clipped(absent)
            present = {peer: squares for peer, squares in self.squares.items() if peer not in absent}
            counted = (squares * factors.get(peer, 1.0) ** 2 for peer, squares in present.items())
            self._longest[absent] = ROUNDING**2 * max(counted, default=0.0)
        return self._longest[absent]

    def has(self, sender: str, chunk: int, digest: bytes, proof: ChunkProof) -> bool:
        """Return True if the proof shows that a chunk with this digest is part of the sender's commitment."""
        committed = self.commitments.get(sender)
        return committed is not None and leads_to(committed.root, chunk, self.chunks, digest, proof)


UNKNOWN = Contributions()
"""The contributions for a member that neither averages nor votes, and so knows none."""


def clipped(weights: Mapping[str, float], squares: Mapping[str, float], clip: float) -> dict[str, float]:
    """Return a factor below 1 for each member whose norm (root of `squares`) exceeds `clip` times the median."""
    longest = clip * math.sqrt(median(weights, squares))
    norms = {peer: math.sqrt(squares[peer]) for peer in weights}
    return {peer: longest / norm for peer, norm in norms.items() if norm > longest}


def median(weights: Mapping[str, float], squares: Mapping[str, float]) -> float:
    """Return the weighted median: the smallest squared norm so that members with half of the weight have no larger one.

    Weights keep many members with little work from deciding it. Of two members with equal weights it takes the smaller
    norm, since a step that is too short can be made up later.
    """
    half, seen = sum(weights.values()) / 2, 0.0
    for peer in sorted(weights, key=lambda name: (squares[name], name)):
        seen += weights[peer]
        if seen >= half:
            return squares[peer]
    return 0.0


def receivers_of_commitments(begin: Begin, log: LogState) -> tuple[Collection[str], Collection[str]]:
    """Return the members that need all commitments of a Begin, to check chunks and averages, and those that need at
    least the contributions' norms, to recognize averages whose norm is too large.

    Members that average need all commitments; in a small round all members do, since each checks an average now and
    then. Voters need the norms.
    """
    round = begin.round
    if len(round.peers) <= FEW:
        return round.peers, round.peers
    averaging = {share.member.peer for share in round.shares if share.chunks}
    electors = {peer for peer, _ in log.electors}
    return averaging | {heir for _, heir in begin.heirs}, round.peers if round.group else electors or round.peers


class OwnersSignatures:
    """The signatures of members' commitments, which arrive with their chunks. Each is verified only once in a round."""

    def __init__(self, round: Round, keys: Keys | None) -> None:
        """Create the store for one round. If `keys` is None, no signature is verified."""
        self._members = {member.peer: member for member in round.contributors}
        self._round = round
        self._keys = keys
        self._checked: dict[str, Commitment] = {}

    def checked(self, peer: str, contribution: Contribution | None, signature: bytes | None) -> Commitment | None:
        """Return the member's commitment with its `signature` if that is valid; otherwise None."""
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
