"""Numbers of chunks, as messages say them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

CHUNK_SET_BYTES = 1 << 16  # half a million chunks

ChunkSet = Annotated[bytes, Field(strict=True, max_length=CHUNK_SET_BYTES)]
"""Numbers of chunks as a bit mask, little-endian: chunk n is bit n % 8 of byte n // 8."""


BITS = tuple(tuple(bit for bit in range(8) if byte >> bit & 1) for byte in range(256))
"""The bits that are set in each byte."""


def chunk_set(chunks: Iterable[int]) -> bytes:
    """Return the mask with these bits."""
    wanted = sorted(chunks)
    mask = bytearray(wanted[-1] // 8 + 1 if wanted else 0)
    for chunk in wanted:
        mask[chunk // 8] |= 1 << chunk % 8
    return bytes(mask)


def chunks_in(mask: bytes) -> list[int]:
    """Return the bits that are set, in order."""
    return [8 * place + bit for place, byte in enumerate(mask) if byte for bit in BITS[byte]]
