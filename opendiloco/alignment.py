"""Where fragments begin in flat vectors."""

from __future__ import annotations

ALIGNMENT = 1024
"""Values. A fragment begins at a multiple of them. It is encoded by itself, with blocks of its own in every codec."""


def next_fragment(end: int) -> int:
    """Return where the fragment begins that comes after one that ends there."""
    return -(-end // ALIGNMENT) * ALIGNMENT
