"""How what payloads hold is rounded: to the nearest code, or by chance. Chance follows from the log, so that everybody
who makes a payload again makes the same one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opendiloco.config.run_config import CodecSection
from opendiloco.kernels import NEAREST, Rounding, stochastic
from peers.values.leases import SampleRange
from peers.values.wire import digest_of


@dataclass(frozen=True)
class RunRounding:
    """A run's. Outer steps are counted from 0."""

    is_stochastic: bool

    @classmethod
    def of(cls, codec: CodecSection) -> RunRounding:
        """Return what the manifest says."""
        return cls(codec.rounding == "stochastic")

    def of_contribution(self, index: int, fragment: int, samples: Sequence[SampleRange]) -> Rounding:
        """Return that of a fragment's pseudo-gradient. No two peers have the same chance: their samples differ. It does
        not matter how many of them are trained, which is not known yet when the first fragment is taken."""
        return self._rounding(0, index, fragment, *(part.start for part in samples[:1]))

    def of_average(self, index: int, fragment: int, first_block: int = 0) -> Rounding:
        """Return that of the average's blocks from `first_block` on, whoever averages them."""
        return self._rounding(first_block, index, fragment)

    def _rounding(self, first_block: int, *drawn_from: int) -> Rounding:
        if not self.is_stochastic:
            return NEAREST
        digest = digest_of(" ".join(map(str, drawn_from)).encode())
        return stochastic(int.from_bytes(digest[:8], "little"), first_block)
