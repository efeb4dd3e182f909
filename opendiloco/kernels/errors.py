"""What can be wrong with values and payloads."""

from __future__ import annotations

from peers.errors import DilocoPeerError


class KernelError(DilocoPeerError):
    """A block that can't be encoded or decoded. `block` is its index in the arrays that were passed."""

    exit_code = 8

    def __init__(self, block: int, message: str, remedy: str) -> None:
        super().__init__(message, remedy)
        self.block = block


class NonFiniteError(KernelError):
    """Values to be encoded hold a NaN, an infinity, or a magnitude beyond the format's."""

    def __init__(self, block: int, block_values: int) -> None:
        values = f"values {block * block_values} to {(block + 1) * block_values - 1}"
        super().__init__(
            block,
            f"block {block} ({values}) holds NaN, infinity or a magnitude too large to be encoded.",
            "Training has diverged: lower the learning rate, or go back to an earlier snapshot.",
        )


class CorruptPayloadError(KernelError):
    """A payload that no encoder of ours produces."""

    def __init__(self, block: int, defect: str) -> None:
        super().__init__(block, f"payload block {block}: {defect}.", "Drop the payload; fetch it from another peer.")
