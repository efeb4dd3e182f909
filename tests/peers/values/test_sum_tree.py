"""The tree over a payload's chunks: each chunk leads to the root alone, and to no other root."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.values.chunks import NODE, Sum, SumTree, root_of
from peers.values.wire import digest_of


def leaves(count: int) -> list[Sum]:
    return [Sum(digest_of(bytes([chunk % 256])), float(chunk + 1)) for chunk in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 64, 100])
def test_every_chunk_leads_to_the_root(count: int) -> None:
    tree = SumTree(leaves(count))
    assert tree.root.squares == count * (count + 1) / 2
    for chunk, leaf in enumerate(leaves(count)):
        assert len(tree.path(chunk)) <= NODE.size * math.ceil(math.log2(count))
        assert tree.squares(chunk) == leaf.squares
        assert root_of(chunk, count, leaf, tree.path(chunk)) == tree.root


def test_the_root_is_this_one_everywhere() -> None:
    """Everybody must compute the same: a change of it is a change of the protocol."""
    assert SumTree(leaves(3)).root.digest.hex()[:16] == "e0796d79027f2869"


@given(st.integers(1, 40), st.data())
def test_another_leaf_or_path_leads_elsewhere(count: int, data: st.DataObject) -> None:
    tree, chunk = SumTree(leaves(count)), data.draw(st.integers(0, count - 1))
    leaf, path = leaves(count)[chunk], tree.path(chunk)
    smaller = Sum(leaf.digest, leaf.squares / 2)
    other = Sum(digest_of(b"other"), leaf.squares)
    for lie in (smaller, other):
        assert root_of(chunk, count, lie, path) != tree.root
    if path:
        at = data.draw(st.integers(0, len(path) - 1))
        changed = path[:at] + bytes([path[at] ^ 1]) + path[at + 1 :]
        assert root_of(chunk, count, leaf, changed) != tree.root


def test_a_smaller_sum_beside_a_chunk_does_not_lead_to_the_root() -> None:
    """Nobody can hide the length of one half behind the other."""
    small, large = leaves(2)[0], Sum(digest_of(b"large"), 1e30)
    honest = SumTree([small, large])
    lie = Sum(large.digest, 0.0)
    claimed = root_of(0, 2, small, lie.packed)
    assert claimed is not None
    assert claimed != honest.root
    assert root_of(1, 2, large, small.packed) == honest.root != claimed


@pytest.mark.parametrize(
    "path",
    [b"", bytes(39), bytes(NODE.size), bytes(3 * NODE.size)]
    + [struct.pack("<32sd", bytes(32), bad) * 2 for bad in (-1.0, math.inf, math.nan)],
    ids=["none", "cut", "too short", "too long", "negative", "infinite", "no number"],
)
def test_what_is_no_path(path: bytes) -> None:
    assert root_of(0, 4, leaves(4)[0], path) is None
