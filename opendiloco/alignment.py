"""The alignment of fragments in flat vectors."""

from __future__ import annotations

ALIGNMENT = 1024
"""Alignment of a fragment's first value, in values. Each fragment is encoded separately, with its own blocks in every
codec."""


def next_fragment(end: int) -> int:
    """Return the offset of the fragment that follows one ending at `end`."""
    return -(-end // ALIGNMENT) * ALIGNMENT
