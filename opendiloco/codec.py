"""Pseudo-gradients as blocks of bytes: what LocalWorkload sends, checks and averages, for vectors of one size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opendiloco import kernels
from opendiloco.shared_memory import Vector
from peers.workload import BadBlocksError


@dataclass(frozen=True)
class Int8Codec:
    """Payloads of `values` fp32 values, in blocks of 1024 that share a scale."""

    values: int

    @property
    def block_count(self) -> int:
        return kernels.block_count(self.values)

    @property
    def payload_size(self) -> int:
        return kernels.payload_size(self.values)

    def byte_range(self, first_block: int, last_block: int) -> tuple[int, int]:
        """Byte offsets [start, stop) of blocks [first_block, last_block); the payload's last block may be short."""
        size = self.payload_size
        return min(first_block * kernels.BLOCK_BYTES, size), min(last_block * kernels.BLOCK_BYTES, size)

    def encode_difference(self, theta: Vector, local: Vector) -> bytes:
        """The payload of theta - local, both of shape (values,). Raises: NonFiniteError."""
        payload = bytearray(self.payload_size)
        kernels.quantize_difference(theta, local, payload)
        return bytes(payload)

    def check(self, blocks: bytes, first_block: int) -> None:
        """Raises: BadBlocksError when these bytes are not whole blocks from `first_block` on that an encoder makes."""
        try:
            kernels.check_payload(blocks, self._value_count(blocks, first_block))
        except kernels.CorruptPayloadError as error:
            raise BadBlocksError(error.message) from error

    def average(self, contributions: Sequence[tuple[bytes, int]], first_block: int) -> bytes:
        """The mean of checked blocks from `first_block` on: fp32, in this order, weighted by tokens; quantized once."""
        size = len(contributions[0][0])
        accumulator = np.zeros(self._value_count(contributions[0][0], first_block), np.float32)
        for blocks, tokens in contributions:
            kernels.accumulate(blocks, tokens, accumulator)
        average = bytearray(size)
        kernels.finish_average(accumulator, sum(tokens for _, tokens in contributions), average)
        return bytes(average)

    def _value_count(self, blocks: bytes, first_block: int) -> int:
        """How many values these blocks hold if they are whole ones of ours."""
        count = kernels.block_count(len(blocks) * kernels.BLOCK // kernels.BLOCK_BYTES)
        available = max(0, self.values - first_block * kernels.BLOCK)
        return min(count * kernels.BLOCK, available)
