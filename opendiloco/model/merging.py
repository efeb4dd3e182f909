"""How what all peers learned comes back into weights that went on training: line 21 of Algorithm 2 (arXiv 2501.18512).

    local = alpha * local + (1 - alpha) * theta

Two products and a sum, each rounded to fp32: numpy and torch give the same bits, on a CPU as on a GPU, since no product
is contracted with the sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from opendiloco.shared_memory import Vector

if TYPE_CHECKING:
    import torch

Values = TypeVar("Values", Vector, "torch.Tensor")


def merge(local: Values, theta: Values, alpha: float) -> None:
    """Merge theta into local, in place: fp32 values of one shape, on one device.

    With alpha = 0 they are theta's to the bit, signs of zeros included, and with alpha = 1 they stay local's.
    """
    if alpha == 0:
        local[...] = theta
    elif alpha < 1:
        local *= alpha
        local += theta * (1 - alpha)
