"""How much of each contribution counts: one that is much longer than most are is shortened. Pure functions.

All reducers of a round compute the same from the same commitments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def clipped(weights: Mapping[str, float], squares: Mapping[str, float], clip: float) -> dict[str, float]:
    """Return the factors, below 1, of those contributions that are longer than `clip` times the median.

    Args:
        weights: what each contribution counts with, by its tokens.
        squares: their squared norms.
    """
    longest = clip * math.sqrt(median(weights, squares))
    norms = {peer: math.sqrt(squares[peer]) for peer in weights}
    return {peer: longest / norm for peer, norm in norms.items() if norm > longest}


def median(weights: Mapping[str, float], squares: Mapping[str, float]) -> float:
    """Return the least squared norm that at least half of the weights do not exceed.

    Weights are counted and not members, so that many with little work do not decide what is normal. If two contribute
    as much as each other it is the smaller one: too little done can be made up for.
    """
    half, seen = sum(weights.values()) / 2, 0.0
    for peer in sorted(weights, key=lambda name: (squares[name], name)):
        seen += weights[peer]
        if seen >= half:
            return squares[peer]
    return 0.0
