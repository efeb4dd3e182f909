"""The encoding of pseudo-gradients as payloads, with the rounding of values and error feedback. A payload consists of
blocks of bytes."""

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
"""Number of a payload's blocks that are decoded at once, to use little memory."""
BLOCK_VALUES = 4096
"""Number of values in one of the swarm's blocks, a multiple of each format's block size."""


def block_bytes(codec: CodecSection) -> int:
    """Return the size in bytes of one block (BLOCK_VALUES values) of a run's averages."""
    return FORMATS[codec.kind].payload_size(BLOCK_VALUES)


@dataclass(frozen=True)
class BlockCodec:
    """The encoding of `values` fp32 values in blocks of BLOCK_VALUES. An average is encoded in `format`; a contribution
    in `format`, which has number 0, or in one of the `thinner` formats, numbered from 1."""

    format: Format
    values: int
    thinner: tuple[Format, ...] = ()

    @classmethod
    def of(cls, codec: CodecSection, values: int) -> Self:
        """Return the codec for vectors of `values` values, with the formats that a run's settings name."""
        format, *thinner = (FORMATS[kind] for kind in codec.contributions)
        return cls(format, values, tuple(thinner))

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats of contributions, ordered by number."""
        return (self.format, *self.thinner)

    @property
    def format_count(self) -> int:
        return len(self.formats)

    @property
    def block_count(self) -> int:
        return -(-self.values // BLOCK_VALUES)

    def byte_range(self, first_block: int, last_block: int, format: int = 0) -> tuple[int, int]:
        """Return the byte offsets [start, stop) of blocks [first_block, last_block) in a payload of format number
        `format`. The payload's last block may be short."""
        kind = self.formats[format]
        each = BLOCK_VALUES // kind.block_values
        return kind.byte_range(first_block * each, last_block * each, self.values)

    def empty_payload(self) -> Payload:
        """Return a payload for an average, filled with zeros. Callers should reuse it, because allocating a payload
        takes longer than encoding into one."""
        return Payload(self.format, self.values, empty(self.format.payload_size(self.values)))

    def check(self, blocks: Blocks, first_block: int) -> None:
        """Raise BadBlocksError unless `blocks` are whole blocks that an encoder could have made in the averages'
        format. They are a payload's blocks from number `first_block` on."""
        try:
            kernels.check_payload(self._payload(blocks, first_block))
        except kernels.CorruptPayloadError as error:
            raise BadBlocksError(error.message) from error

    def squared_norm(self, blocks: Blocks, first_block: int, format: int = 0) -> float:
        """Return the sum of the squares of the values that `blocks` encode. Raises: BadBlocksError unless an encoder
        could have made the blocks."""
        try:
            return kernels.squared_norm(self._payload(blocks, first_block, format))
        except kernels.CorruptPayloadError as error:
            raise BadBlocksError(error.message) from error

    def checked(self, payload: Blocks) -> Payload:
        """Return a Payload with the bytes of a whole average. Raises: BadBlocksError unless an encoder could have made
        them."""
        self.check(payload, 0)
        if len(payload) != self.format.payload_size(self.values):
            raise BadBlocksError(f"a payload of {self.values} values cannot have {len(payload)} bytes")
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
        """Return the weighted mean of the contributions' blocks, encoded. Each contribution's blocks begin with number
        `first_block`. They are summed in fp32 in the given order, and the mean is quantized once.

        The sum is divided by `tokens`, by default the sum of the weights; a clipped contribution has less weight than
        tokens. The mean is written to `out` if given, which must have its exact size; allocating it takes longer than
        the mean. `formats` are the contributions' formats, by default the average's.

        Raises: CorruptPayloadError, NonFiniteError.
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
        kind = self.formats[format]
        whole = -(-len(blocks) // kind.block_bytes) * kind.block_values
        return Payload(kind, min(whole, max(0, self.values - first_block * BLOCK_VALUES)), blocks)


class RunRounding:
    """Chooses the rounding of a run's payloads: to the nearest value that the format can encode, or stochastic. Outer
    steps are counted from 0.

    The random numbers follow from the log, so that every peer that makes a payload again gets the same bytes.
    """

    def __init__(self, codec: CodecSection) -> None:
        self._is_stochastic = codec.rounding == "stochastic"
        self._formats = [FORMATS[kind] for kind in codec.contributions]

    def of_contribution(self, index: int, fragment: int, samples: Sequence[SampleRange], format: int = 0) -> Rounding:
        """Return the rounding with which this peer encodes a fragment's pseudo-gradient in outer step `index`, in
        format number `format`.

        The random numbers depend on the first sample, so no two peers use the same ones. They do not depend on the
        number of trained samples, which is not known yet when the first fragment is stored. Formats without stochastic
        rounding round to the nearest code.
        """
        if not self._formats[format].is_stochastic:
            return NEAREST
        return self._rounding(0, index, fragment, *(part.start for part in samples[:1]))

    def of_average(self, index: int, fragment: int, first_block: int = 0) -> Rounding:
        """Return the rounding with which a fragment's average is encoded from block `first_block` on. All reducers use
        the same random numbers."""
        return self._rounding(first_block * (BLOCK_VALUES // self._formats[0].block_values), index, fragment)

    def _rounding(self, first_block: int, *drawn_from: int) -> Rounding:
        if not self._is_stochastic:
            return NEAREST
        digest = digest_of(" ".join(map(str, drawn_from)).encode())
        return stochastic(int.from_bytes(digest[:8], "little"), first_block)


def decoded(payload: Payload, start: int, out: Vector) -> Vector:
    """Decode a payload's values from number `start` on until `out` is full or the payload ends. Return the filled part
    of `out`. `start` must be a multiple of the format's block size."""
    format, values = payload.format, min(out.size, payload.values - start)
    block = start // format.block_values
    first, last = format.byte_range(block, block + format.block_count(values), payload.values)
    dequantize(Payload(format, values, payload.buffer[first:last]), out[:values])
    return out[:values]


# Error feedback ------------------------------------------------------------------------------------------------------
def share_made_up_for(codec: CodecSection, format: int) -> float:
    """Return the share (0 to 1) of a payload's quantization error that is added to the next pseudo-gradient.

    It is the run's share; for a thinner format than the run's, it is at least SparseLoCo's.
    """
    return max(codec.error_feedback, SPARSE_ERROR_FEEDBACK) if format else codec.error_feedback


def _zeros(values: int, folder: Path | None) -> Vector:
    """Return a vector of zeros for quantization errors. A large vector is in a temporary file in `folder`, because no
    memory was reserved for it; without a folder or disk space, it is in memory."""
    size = VALUE_BYTES * values
    if folder is not None and size > IN_MEMORY:
        try:
            return np.frombuffer(MemoryFile.on_disk(size, folder).data, np.float32)
        except OSError as error:
            logger.warning("no room for %d MiB of error feedback in %s: %s; using memory", size >> 20, folder, error)
    return np.zeros(values, np.float32)


class Residual:
    """Keeps the quantization errors of this peer's payloads, which are added to later pseudo-gradients before encoding
    (error feedback, arXiv 1901.09847).

    When an outer step is taken without this peer's payload, it is unknown how much of the error still matters, so the
    residual is reset.

    A sparse average leaves out most values of its members' payloads, and reducers keep no residuals. Each member takes
    back its own values where the average has none, so that all members together take back everything that was left out.
    """

    def __init__(self, codec: CodecSection, values: int) -> None:
        """Create a quantization error of zero for each of `values` fp32 values. The errors use no memory until the
        first error is stored."""
        self._codec = codec
        self._values = values
        self._share = codec.error_feedback  # share of the last payload's error to add to the next pseudo-gradient
        self._vector: Vector | None = np.zeros(values, np.float32) if self._share else None
        self._is_sent = False  # True from the encoding of a payload until its average is applied

    def to_add(self, format: int = 0, folder: Path | None = None) -> Vector | None:
        """Return the quantization errors to add to the next pseudo-gradient, which is then encoded in format number
        `format`; None without error feedback. The encoder overwrites the returned vector with the new errors. A new
        vector that is large lies in a file in `folder`, unless that is None."""
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
        """Add to the quantization errors those values of this peer's contribution (`own`) that a sparse average leaves
        out. Both payloads must have been checked."""
        is_answered, self._is_sent = self._is_sent, False
        if self._vector is None or not is_answered or average.format is not SPARSE:
            return
        piece = PIECE_BLOCKS * SPARSE.block_values
        for start in range(0, average.values, piece):
            sent, applied = (decoded(payload, start, np.empty(piece, np.float32)) for payload in (own, average))
            sent[applied != 0] = 0
            self._vector[start : start + sent.size] += sent

    def forget(self) -> None:
        """Reset all quantization errors to zero, because an outer step was taken without this peer's payload."""
        self._is_sent = False
        if self._vector is not None:
            self._vector[:] = 0

    def forget_unanswered(self) -> None:
        """Reset all quantization errors to zero at the start of a training, if this peer has encoded a payload since
        an average was last applied."""
        if self._is_sent:
            self.forget()
