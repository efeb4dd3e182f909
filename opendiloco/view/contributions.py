"""What one peer has contributed to a run, and how that compares with the others, by the log of this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from opendiloco.view.chronicle import Chronicle


@dataclass(frozen=True)
class Contribution:
    """What one peer has contributed: tokens in so many rounds, a `share` of all tokens, and its `rank` among `peers`,
    1 the largest. A log that begins in the middle of the run counts from there."""

    tokens: int
    rounds: int
    share: float
    rank: int
    peers: int

    def plain(self) -> dict[str, Any]:
        """Return it as JSON can say it."""
        return asdict(self)


def contribution_of(peer: str, chronicle: Chronicle) -> Contribution | None:
    """Return what a peer has contributed; None where nobody has."""
    if not chronicle.tokens:
        return None
    all_tokens = {name: found.tokens for name, found in chronicle.contributions.items()}
    own = chronicle.contributions.get(peer)
    tokens, rounds = (own.tokens, own.entries) if own else (0, 0)
    rank = 1 + sum(others > tokens for others in all_tokens.values())
    return Contribution(tokens, rounds, tokens / chronicle.tokens, rank, len({*all_tokens, peer}))
