"""Error feedback: what payloads have left out, and later ones make up for (arXiv 1901.09847)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opendiloco.kernels import SPARSE, Payload, dequantize
from opendiloco.shared_memory import Vector

PIECE_BLOCKS = 16
"""Of a payload, that are decoded at once, so that it takes no memory to speak of."""


class Residuals:
    """One for each fragment, fp32 of its length, where the run has error feedback.

    A `share` of what a fragment's payload has left out is added to the next pseudo-gradient that is encoded. Once an
    outer step was taken without our payload nobody knows what of it is still to be made up for, so it is forgotten.

    A sparse average leaves out most of what its members' payloads hold, and reducers keep no residuals. Each member
    takes back what of its own is where the average has nothing: all of them together take back all that was left out.
    """

    def __init__(self, share: float, fragments: Sequence[slice]) -> None:
        self._share = np.float32(share)
        self._vectors: list[Vector | None] = [
            np.zeros(part.stop - part.start, np.float32) if share else None for part in fragments
        ]
        self._are_sent = [False] * len(fragments)  # what a payload holds, that no average has answered yet

    def of(self, fragment: int) -> Vector | None:
        """Return what to add to a fragment's pseudo-gradient, and to replace by what its payload leaves out."""
        residual = self._vectors[fragment]
        self._are_sent[fragment] = True
        if residual is not None:
            residual *= self._share
        return residual

    def take_back(self, fragment: int, own: Payload, average: Payload) -> None:
        """Add what our payload holds where the average that it is in has nothing. Both were checked before."""
        residual, is_answered = self._vectors[fragment], self._are_sent[fragment]
        self._are_sent[fragment] = False
        if residual is None or not is_answered or average.format is not SPARSE:
            return
        for start in range(0, average.values, PIECE_BLOCKS * SPARSE.block_values):
            sent, applied = _decoded_piece(own, start), _decoded_piece(average, start)
            sent[applied != 0] = 0
            residual[start : start + sent.size] += sent

    def forget(self, fragment: int) -> None:
        """An outer step of a fragment was taken without our payload."""
        residual = self._vectors[fragment]
        self._are_sent[fragment] = False
        if residual is not None:
            residual[:] = 0

    def forget_unanswered(self) -> None:
        """Training begins anew: payloads that no entry has taken by now are in none."""
        for fragment in [fragment for fragment, is_sent in enumerate(self._are_sent) if is_sent]:
            self.forget(fragment)

    def forget_all(self) -> None:
        for fragment in range(len(self._vectors)):
            self.forget(fragment)


def _decoded_piece(payload: Payload, start: int) -> Vector:
    """Return the values from `start` on, a multiple of a piece's."""
    first, values = start // payload.format.block_values, payload.values - start
    first_byte, end = payload.format.byte_range(first, first + PIECE_BLOCKS, payload.values)
    out: Vector = np.empty(min(values, PIECE_BLOCKS * payload.format.block_values), np.float32)
    dequantize(Payload(payload.format, out.size, payload.buffer[first_byte:end]), out)
    return out
