"""Error feedback: what payloads have left out, and later ones make up for (arXiv 1901.09847)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opendiloco.shared_memory import Vector


class Residuals:
    """One for each fragment, fp32 of its length, where the run has error feedback.

    A `share` of what a fragment's payload has left out is added to the next pseudo-gradient that is encoded. Once an
    outer step was taken without our payload nobody knows what of it is still to be made up for, so it is forgotten.
    """

    def __init__(self, share: float, fragments: Sequence[slice]) -> None:
        self._share = np.float32(share)
        self._vectors: list[Vector | None] = [
            np.zeros(part.stop - part.start, np.float32) if share else None for part in fragments
        ]

    def of(self, fragment: int) -> Vector | None:
        """Return what to add to a fragment's pseudo-gradient, and to replace by what its payload leaves out."""
        residual = self._vectors[fragment]
        if residual is not None:
            residual *= self._share
        return residual

    def forget(self, fragment: int) -> None:
        """An outer step of a fragment was taken without our payload."""
        residual = self._vectors[fragment]
        if residual is not None:
            residual[:] = 0

    def forget_all(self) -> None:
        for fragment in range(len(self._vectors)):
            self.forget(fragment)
