"""A tree of digests over the chunks of a payload that adds up their squared norms on the way to its root.

Whoever has the root knows the norm of the whole, and can check each chunk by itself, with the nodes beside its way up.
A leaf that leads to the root is part of the sum at the root: nobody can commit to a small norm and to a chunk that is
larger. Sums are doubles, added in the order of the tree, so that they are the same bits everywhere.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from peers.values.wire import DIGEST_BYTES, digest_of

CONTEXT = b"diloco-peer sum\0"
NODE = struct.Struct(f"<{DIGEST_BYTES}sd")
MOST_LEVELS = 24


@dataclass(frozen=True)
class Sum:
    """A node: the digest of all chunks below it, and the sum of their squared norms. A leaf has its chunk's digest."""

    digest: bytes
    squares: float

    @property
    def packed(self) -> bytes:
        return NODE.pack(self.digest, self.squares)


class SumTree:
    """Over the chunks of one payload, in order."""

    def __init__(self, leaves: Sequence[Sum]) -> None:
        self._levels = [list(leaves)]
        while len(level := self._levels[-1]) > 1:
            pairs = [_above(level[place], level[place + 1]) for place in range(0, len(level) - 1, 2)]
            self._levels.append(pairs + level[2 * len(pairs) :])

    @property
    def root(self) -> Sum:
        return self._levels[-1][0]

    def squares(self, chunk: int) -> float:
        """Return the squared norm of one chunk."""
        return self._levels[0][chunk].squares

    def path(self, chunk: int) -> bytes:
        """Return the nodes beside the way from a chunk to the root, packed, from the lowest on."""
        beside, place = list[Sum](), chunk
        for level in self._levels:
            beside += level[place ^ 1 : (place ^ 1) + 1]
            place //= 2
        return b"".join([node.packed for node in beside])


def root_of(chunk: int, count: int, leaf: Sum, path: bytes) -> Sum | None:
    """Return the root to which a leaf of a tree with `count` leaves leads; None if that is no path in such a tree."""
    if len(path) % NODE.size:
        return None
    nodes = [Sum(*fields) for fields in NODE.iter_unpack(path)]
    if any(not 0 <= node.squares < math.inf for node in nodes):  # not so for NaN, either
        return None
    node, place, left = leaf, chunk, count
    while left > 1:
        if place ^ 1 < left:
            if not nodes:
                return None
            beside = nodes.pop(0)
            node = _above(beside, node) if place % 2 else _above(node, beside)
        place, left = place // 2, (left + 1) // 2
    return None if nodes else node


def _above(left: Sum, right: Sum) -> Sum:
    return Sum(digest_of(CONTEXT + left.packed + right.packed), left.squares + right.squares)
