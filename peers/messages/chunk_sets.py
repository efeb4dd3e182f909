"""Sets of chunk numbers, as messages contain them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

CHUNK_SET_BYTES = 1 << 16  # maximum bytes of a set: half a million chunks

ChunkSet = Annotated[bytes, Field(strict=True, max_length=CHUNK_SET_BYTES)]
"""Chunk numbers as a little-endian bit mask: chunk n is bit n % 8 of byte n // 8."""


BITS = tuple(tuple(bit for bit in range(8) if byte >> bit & 1) for byte in range(256))
"""The numbers of the set bits, for each value of a byte."""


def chunk_set(chunks: Iterable[int]) -> bytes:
    """Return the bit mask of a set of chunk numbers."""
    wanted = sorted(chunks)
    mask = bytearray(wanted[-1] // 8 + 1 if wanted else 0)
    for chunk in wanted:
        mask[chunk // 8] |= 1 << chunk % 8
    return bytes(mask)


def chunks_in(mask: bytes) -> list[int]:
    """Return the chunk numbers in a bit mask, in order."""
    return [8 * place + bit for place, byte in enumerate(mask) if byte for bit in BITS[byte]]
