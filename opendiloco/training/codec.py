"""Pseudo-gradients as payloads: their blocks of bytes, how values are rounded, and error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opendiloco import kernels
from opendiloco.config.run_config import CodecSection
from opendiloco.kernels import NEAREST, SPARSE, Format, Payload, Rounding, dequantize, stochastic
from opendiloco.shared_memory import Vector
from peers.transfer.storage import empty
from peers.values.leases import SampleRange
from peers.values.wire import digest_of
from peers.values.workload import BadBlocksError, Blocks

PIECE_BLOCKS = 16
"""Of a payload, that are decoded at once, so that it takes no memory to speak of."""


@dataclass(frozen=True)
class BlockCodec:
    """Payloads of `values` fp32 values in a format."""

    format: Format
    values: int

    @property
    def block_count(self) -> int:
        return self.format.block_count(self.values)

    def byte_range(self, first_block: int, last_block: int) -> tuple[int, int]:
        """Byte offsets [start, stop) of blocks [first_block, last_block); the payload's last block may be short."""
        return self.format.byte_range(first_block, last_block, self.values)

    def empty_payload(self) -> Payload:
        """Memory for a payload; worth keeping, since taking it from the system takes longer than encoding into it."""
        return Payload(self.format, self.values, empty(self.format.payload_size(self.values)))

    def check(self, blocks: Blocks, first_block: int) -> None:
        """Raises: BadBlocksError when these bytes are not whole blocks from `first_block` on that an encoder makes."""
        try:
            kernels.check_payload(self._payload(blocks, first_block))
        except kernels.CorruptPayloadError as error:
            raise BadBlocksError(error.message) from error

    def squared_norm(self, blocks: Blocks, first_block: int) -> float:
        """Return the sum of the squares of the values in these bytes. Raises: BadBlocksError, as `check` does."""
        try:
            return kernels.squared_norm(self._payload(blocks, first_block))
        except kernels.CorruptPayloadError as error:
            raise BadBlocksError(error.message) from error

    def checked(self, payload: Blocks) -> Payload:
        """Return a whole payload. Raises: BadBlocksError unless it is one that an encoder makes."""
        self.check(payload, 0)
        if len(payload) != self.format.payload_size(self.values):
            raise BadBlocksError(f"{len(payload)} bytes are no payload of {self.values} values")
        return Payload(self.format, self.values, payload)

    def average(
        self,
        contributions: Sequence[tuple[Blocks, float]],
        first_block: int,
        out: memoryview | None = None,
        tokens: float | None = None,
        rounding: Rounding = NEAREST,
    ) -> memoryview:
        """Return the mean of blocks from `first_block` on: fp32, in this order, weighted; quantized once.

        The sum is divided by `tokens`, by default the sum of the weights: a contribution that is clipped weighs less.
        It lies in `out`, if given, which has as many bytes as each contribution: new memory costs more than the mean.
        Raises: CorruptPayloadError, NonFiniteError.
        """
        average = Payload(self.format, self._value_count(contributions[0][0], first_block), out)
        payloads = [(self._payload(blocks, first_block), weight) for blocks, weight in contributions]
        kernels.average(payloads, average, rounding, total_weight=tokens)
        return average.buffer

    def _payload(self, blocks: Blocks, first_block: int) -> Payload:
        return Payload(self.format, self._value_count(blocks, first_block), blocks)

    def _value_count(self, blocks: Blocks, first_block: int) -> int:
        """Return how many values these bytes hold if they are whole blocks of ours."""
        whole = -(-len(blocks) // self.format.block_bytes) * self.format.block_values
        return min(whole, max(0, self.values - first_block * self.format.block_values))


class RunRounding:
    """The rounding of a run's payloads: to the nearest code, or by chance. Outer steps are counted from 0.

    Chance follows from the log, so that everybody who makes a payload again makes the same one.
    """

    def __init__(self, codec: CodecSection) -> None:
        self._is_stochastic = codec.rounding == "stochastic"

    def of_contribution(self, index: int, fragment: int, samples: Sequence[SampleRange]) -> Rounding:
        """Return that of a fragment's pseudo-gradient. No two peers have the same chance: their samples differ. It does
        not matter how many of them are trained, which is not known yet when the first fragment is taken."""
        return self._rounding(0, index, fragment, *(part.start for part in samples[:1]))

    def of_average(self, index: int, fragment: int, first_block: int = 0) -> Rounding:
        """Return that of the average's blocks from `first_block` on, whoever averages them."""
        return self._rounding(first_block, index, fragment)

    def _rounding(self, first_block: int, *drawn_from: int) -> Rounding:
        if not self._is_stochastic:
            return NEAREST
        digest = digest_of(" ".join(map(str, drawn_from)).encode())
        return stochastic(int.from_bytes(digest[:8], "little"), first_block)


def decoded(payload: Payload, start: int, out: Vector) -> Vector:
    """Return the values of a payload from `start` on, a multiple of a block's: as many as `out` has room for."""
    format, values = payload.format, min(out.size, payload.values - start)
    block = start // format.block_values
    first, last = format.byte_range(block, block + format.block_count(values), payload.values)
    dequantize(Payload(format, values, payload.buffer[first:last]), out[:values])
    return out[:values]


# Error feedback ------------------------------------------------------------------------------------------------------
class Residual:
    """Error feedback: what payloads have left out, and later ones make up for (arXiv 1901.09847).

    A `share` of what a payload has left out is added to the next pseudo-gradient that is encoded. Once an outer step
    was taken without our payload nobody knows what of it is still to be made up for, so it is forgotten.

    A sparse average leaves out most of what its members' payloads hold, and reducers keep no residuals. Each member
    takes back what of its own is where the average has nothing: all of them together take back all that was left out.
    """

    def __init__(self, share: float, values: int) -> None:
        """It has so many fp32 `values`, where the run has error feedback."""
        self._share = np.float32(share)
        self._vector: Vector | None = np.zeros(values, np.float32) if share else None
        self._is_sent = False  # what a payload holds, that no average has answered yet

    def to_add(self) -> Vector | None:
        """Return what to add to the pseudo-gradient, and to replace by what its payload leaves out."""
        self._is_sent = True
        if self._vector is not None:
            self._vector *= self._share
        return self._vector

    def take_back(self, own: Payload, average: Payload) -> None:
        """Add what our payload holds where the average that it is in has nothing. Both were checked before."""
        is_answered, self._is_sent = self._is_sent, False
        if self._vector is None or not is_answered or average.format is not SPARSE:
            return
        piece = PIECE_BLOCKS * SPARSE.block_values
        for start in range(0, average.values, piece):
            sent, applied = (decoded(payload, start, np.empty(piece, np.float32)) for payload in (own, average))
            sent[applied != 0] = 0
            self._vector[start : start + sent.size] += sent

    def forget(self) -> None:
        """Have nothing made up for: an outer step was taken without our payload."""
        self._is_sent = False
        if self._vector is not None:
            self._vector[:] = 0

    def forget_unanswered(self) -> None:
        """Forget it if its payload is in no entry by now: training begins anew."""
        if self._is_sent:
            self.forget()
