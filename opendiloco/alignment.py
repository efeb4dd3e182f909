"""The alignment of a model's fragments in flat vectors of parameters."""

from __future__ import annotations

ALIGNMENT = 1024
"""Alignment of a fragment's first value, in values. Each fragment is encoded separately, with its own blocks in every
codec."""


def next_fragment(end: int) -> int:
    """Return the offset, in values, of the fragment after a fragment that ends at the offset `end`."""
    return -(-end // ALIGNMENT) * ALIGNMENT
