"""Pseudo-gradients as payloads: their blocks of bytes, how values are rounded, and error feedback."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from opendiloco import kernels
from opendiloco.config.run_config import SPARSE_ERROR_FEEDBACK, CodecSection
from opendiloco.kernels import FORMATS, NEAREST, SPARSE, Format, Payload, Rounding, dequantize, stochastic
from opendiloco.quantities import VALUE_BYTES
from opendiloco.shared_memory import Vector
from peers.transfer.storage import IN_MEMORY, MemoryFile, empty
from peers.values.leases import SampleRange
from peers.values.wire import digest_of
from peers.values.workload import BadBlocksError, Blocks

logger = logging.getLogger(__name__)

PIECE_BLOCKS = 16
"""Of a payload, that are decoded at once, so that it takes no memory to speak of."""
BLOCK_VALUES = 4096
"""Values of what the swarm takes for a block: a whole number of each format's blocks."""


def block_bytes(codec: CodecSection) -> int:
    """Return the bytes of a block of a run's averages, as the swarm cuts them."""
    return FORMATS[codec.kind].payload_size(BLOCK_VALUES)


@dataclass(frozen=True)
class BlockCodec:
    """Payloads of `values` fp32 values, in blocks of BLOCK_VALUES: averages are in `format`, and contributions also in
    the `thinner` ones, numbered from 1."""

    format: Format
    values: int
    thinner: tuple[Format, ...] = ()

    @classmethod
    def of(cls, codec: CodecSection, values: int) -> Self:
        """Return a run's codec for so many values."""
        format, *thinner = (FORMATS[kind] for kind in codec.contributions)
        return cls(format, values, tuple(thinner))

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats of contributions, by their numbers."""
        return (self.format, *self.thinner)

    @property
    def format_count(self) -> int:
        return len(self.formats)

    @property
    def block_count(self) -> int:
        return -(-self.values // BLOCK_VALUES)

    def byte_range(self, first_block: int, last_block: int, format: int = 0) -> tuple[int, int]:
        """Byte offsets [start, stop) of blocks [first_block, last_block); the payload's last block may be short."""
        kind = self.formats[format]
        each = BLOCK_VALUES // kind.block_values
        return kind.byte_range(first_block * each, last_block * each, self.values)

    def empty_payload(self) -> Payload:
        """Memory for a payload; worth keeping, since taking it from the system takes longer than encoding into it."""
        return Payload(self.format, self.values, empty(self.format.payload_size(self.values)))

    def check(self, blocks: Blocks, first_block: int) -> None:
        """Raises: BadBlocksError when these bytes are not whole blocks from `first_block` on that an encoder makes."""
        try:
            kernels.check_payload(self._payload(blocks, first_block))
        except kernels.CorruptPayloadError as error:
            raise BadBlocksError(error.message) from error

    def squared_norm(self, blocks: Blocks, first_block: int, format: int = 0) -> float:
        """Return the sum of the squares of the values in these bytes. Raises: BadBlocksError, as `check` does."""
        try:
            return kernels.squared_norm(self._payload(blocks, first_block, format))
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
        formats: Sequence[int] = (),
    ) -> memoryview:
        """Return the mean of blocks from `first_block` on: fp32, in this order, weighted; quantized once.

        The sum is divided by `tokens`, by default the sum of the weights: a contribution that is clipped weighs less.
        It lies in `out`, if given, which has as many bytes as it takes: new memory costs more than the mean. `formats`
        are those of the contributions; by default the average's. Raises: CorruptPayloadError, NonFiniteError.
        """
        payloads = [
            (self._payload(blocks, first_block, format), weight)
            for (blocks, weight), format in zip(contributions, formats or [0] * len(contributions), strict=True)
        ]
        average = Payload(self.format, payloads[0][0].values, out)
        if not any(formats):
            kernels.average(payloads, average, rounding, total_weight=tokens)
            return average.buffer
        total = np.zeros(average.values, np.float32)
        for payload, weight in payloads:
            kernels.accumulate(payload, weight, total)
        weights = sum(weight for _, weight in contributions)
        kernels.finish_average(total, weights if tokens is None else tokens, average, rounding)
        return average.buffer

    def _payload(self, blocks: Blocks, first_block: int, format: int = 0) -> Payload:
        """Return as many values as these bytes hold if they are whole blocks of the format."""
        kind = self.formats[format]
        whole = -(-len(blocks) // kind.block_bytes) * kind.block_values
        return Payload(kind, min(whole, max(0, self.values - first_block * BLOCK_VALUES)), blocks)


class RunRounding:
    """The rounding of a run's payloads: to the nearest code, or by chance. Outer steps are counted from 0.

    Chance follows from the log, so that everybody who makes a payload again makes the same one.
    """

    def __init__(self, codec: CodecSection) -> None:
        self._is_stochastic = codec.rounding == "stochastic"
        self._formats = [FORMATS[kind] for kind in codec.contributions]

    def of_contribution(self, index: int, fragment: int, samples: Sequence[SampleRange], format: int = 0) -> Rounding:
        """Return that of a fragment's pseudo-gradient in a format. No two peers have the same chance: their samples
        differ. It does not matter how many of them are trained, which is not known yet when the first fragment is
        taken. Formats that have no stochastic rounding are rounded to the nearest code."""
        if not self._formats[format].is_stochastic:
            return NEAREST
        return self._rounding(0, index, fragment, *(part.start for part in samples[:1]))

    def of_average(self, index: int, fragment: int, first_block: int = 0) -> Rounding:
        """Return that of the average's blocks from `first_block` on, whoever averages them."""
        return self._rounding(first_block * (BLOCK_VALUES // self._formats[0].block_values), index, fragment)

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
def share_made_up_for(codec: CodecSection, format: int) -> float:
    """Return the share of what a payload in a format leaves out that the next one makes up for: the run's, and of a
    thinner format than the run's at least SparseLoCo's."""
    return max(codec.error_feedback, SPARSE_ERROR_FEEDBACK) if format else codec.error_feedback


def _zeros(values: int, folder: Path | None) -> Vector:
    """Return so many zeros: in a file if they are many, since no memory was counted for them. Without a folder, or room
    in it, they are in memory."""
    size = VALUE_BYTES * values
    if folder is not None and size > IN_MEMORY:
        try:
            return np.frombuffer(MemoryFile.on_disk(size, folder).data, np.float32)
        except OSError as error:
            logger.warning("no room for error feedback, %d MiB, in %s: %s; it is in memory", size >> 20, folder, error)
    return np.zeros(values, np.float32)


class Residual:
    """Error feedback: what payloads have left out, and later ones make up for (arXiv 1901.09847), whatever the formats
    of either.

    A share of what a payload has left out is added to the next pseudo-gradient that is encoded. Once an outer step was
    taken without our payload nobody knows what of it is still to be made up for, so it is forgotten.

    A sparse average leaves out most of what its members' payloads hold, and reducers keep no residuals. Each member
    takes back what of its own is where the average has nothing: all of them together take back all that was left out.
    """

    def __init__(self, codec: CodecSection, values: int) -> None:
        """It has so many fp32 `values`, once a payload leaves something out that is to be made up for."""
        self._codec = codec
        self._values = values
        self._share = codec.error_feedback  # of what the last payload has left out
        self._vector: Vector | None = np.zeros(values, np.float32) if self._share else None
        self._is_sent = False  # what a payload holds, that no average has answered yet

    def to_add(self, format: int = 0, folder: Path | None = None) -> Vector | None:
        """Return what to add to the pseudo-gradient, and to replace by what its payload in a format leaves out. Few
        volunteers need it: where it is large, it lies in the folder."""
        before, self._share = self._share, share_made_up_for(self._codec, format)
        self._is_sent = True
        if not (before or self._share):
            self._vector = None
        elif self._vector is None:
            self._vector = _zeros(self._values, folder)
        else:
            self._vector *= np.float32(before)
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
