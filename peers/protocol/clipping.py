"""How much of each contribution counts: one that is much longer than most are is shortened. Pure functions.

All reducers of a round compute the same from the same commitments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def clipped(tokens: Mapping[str, int], squares: Mapping[str, float], clip: float) -> dict[str, float]:
    """Return the factors, below 1, of those contributions that are longer than `clip` times the median.

    Args:
        tokens: behind each contribution.
        squares: their squared norms.
    """
    longest = clip * math.sqrt(median(tokens, squares))
    norms = {peer: math.sqrt(squares[peer]) for peer in tokens}
    return {peer: longest / norm for peer, norm in norms.items() if norm > longest}


def median(tokens: Mapping[str, int], squares: Mapping[str, float]) -> float:
    """Return the least squared norm that at least half of the tokens do not exceed.

    Tokens are counted and not members, so that many with little work do not decide what is normal. If two contribute as
    much as each other it is the smaller one: too little done can be made up for.
    """
    half, seen = sum(tokens.values()) / 2, 0
    for peer in sorted(tokens, key=lambda name: (squares[name], name)):
        seen += tokens[peer]
        if seen >= half:
            return squares[peer]
    return 0.0
