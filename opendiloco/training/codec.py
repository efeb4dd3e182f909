"""Pseudo-gradients as blocks of bytes: what LocalWorkload sends, checks and averages, for vectors of one size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opendiloco import kernels
from opendiloco.kernels import Format, Payload, Rounding
from opendiloco.shared_memory import Vector
from peers.transfer.storage import empty
from peers.values.workload import BadBlocksError, Blocks


@dataclass(frozen=True)
class BlockCodec:
    """Payloads of `values` fp32 values in a format, with up to `threads` threads a call."""

    format: Format
    values: int
    threads: int = 1

    @property
    def block_count(self) -> int:
        return self.format.block_count(self.values)

    def byte_range(self, first_block: int, last_block: int) -> tuple[int, int]:
        """Byte offsets [start, stop) of blocks [first_block, last_block); the payload's last block may be short."""
        return self.format.byte_range(first_block, last_block, self.values)

    def empty_payload(self) -> Payload:
        """Memory for a payload; worth keeping, since taking it from the system takes longer than encoding into it."""
        return Payload(self.format, self.values, empty(self.format.payload_size(self.values)))

    def encode_difference(
        self,
        theta: Vector,
        local: Vector,
        out: Payload,
        rounding: Rounding = kernels.NEAREST,
        residual: Vector | None = None,
    ) -> None:
        """The payload of theta - local, both of shape (values,). A `residual` of this shape is added to the difference,
        and becomes what the payload leaves out. Raises: NonFiniteError.
        """
        kernels.quantize_difference(theta, local, out, rounding, residual, self.threads)

    def check(self, blocks: Blocks, first_block: int) -> None:
        """Raises: BadBlocksError when these bytes are not whole blocks from `first_block` on that an encoder makes."""
        try:
            kernels.check_payload(self._payload(blocks, first_block), self.threads)
        except kernels.CorruptPayloadError as error:
            raise BadBlocksError(error.message) from error

    def squared_norm(self, blocks: Blocks, first_block: int) -> float:
        """Return the sum of the squares of the values in these bytes. Raises: BadBlocksError, as `check` does."""
        try:
            return kernels.squared_norm(self._payload(blocks, first_block))
        except kernels.CorruptPayloadError as error:
            raise BadBlocksError(error.message) from error

    def checked(self, payload: Blocks) -> Payload:
        """A whole payload. Raises: BadBlocksError unless it is one that an encoder makes."""
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
        rounding: Rounding = kernels.NEAREST,
    ) -> memoryview:
        """Return the mean of blocks from `first_block` on: fp32, in this order, weighted; quantized once.

        The sum is divided by `tokens`, by default the sum of the weights: a contribution that is clipped weighs less.
        It lies in `out`, if given, which has as many bytes as each contribution: new memory costs more than the mean.
        Raises: CorruptPayloadError, NonFiniteError.
        """
        average = Payload(self.format, self._value_count(contributions[0][0], first_block), out)
        payloads = [(self._payload(blocks, first_block), weight) for blocks, weight in contributions]
        kernels.average(payloads, average, rounding, self.threads, tokens)
        return average.buffer

    def _payload(self, blocks: Blocks, first_block: int) -> Payload:
        return Payload(self.format, self._value_count(blocks, first_block), blocks)

    def _value_count(self, blocks: Blocks, first_block: int) -> int:
        """How many values these bytes hold if they are whole blocks of ours."""
        whole = -(-len(blocks) // self.format.block_bytes) * self.format.block_values
        return min(whole, max(0, self.values - first_block * self.format.block_values))
