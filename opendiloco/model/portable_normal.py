"""Normal values that are the same bits on every machine, drawn by several threads.

torch's `normal_` is not the same everywhere: its vectorised path, taken on CPUs with AVX2, rounds differently, as do
the logarithms and cosines of C libraries. Here a value is the sum of 12 uniform draws, less 6 (Irwin-Hall). The draws
are integers of 16 bits from Philox (Salmon et al., SC 2011), whose stream numpy keeps as it is. Their sums are exact,
and what follows are elementwise fp32 operations, in which IEEE 754 leaves nothing open. Philox counts: each block of
values has a counter of its own, so that it does not matter who draws it, or when.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opendiloco.cores import usable_cores
from opendiloco.shared_memory import Vector
from opendiloco.stages import at_stage

BLOCK = 1 << 20
"""Values that one thread draws at once."""
DRAWS = 12
HIGHEST = (1 << 16) - 1
DRAWS_A_WORD = 4
"""Draws in a word of Philox."""
THREADS_AT_MOST = 16
"""Each takes 28 MiB while it draws a block."""


class PortableNormal(TorchDispatchMode):
    """Within it, `normal_` gives such values: those of a seed, and of how many calls there were before."""

    def __init__(self, seed: int, total: int | None = None, threads: int | None = None) -> None:
        """Of `total` values to be drawn, if that is known, it tells how many have been. For `threads` see `draw`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._total = total
        self._threads = threads
        self._calls = self._drawn = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.normal_.default:
            return func(*args, **(kwargs or {}))
        self._drawn += args[0].numel()
        result = _fill(self._seed, self._calls, *args, threads=self._threads, **(kwargs or {}))
        self._calls += 1
        if self._total:
            at_stage("drawing the initial weights", min(self._drawn / self._total, 1.0))
        return result


class Undrawn(TorchDispatchMode):
    """Within it, `normal_` gives zeros."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.normal_.default:
            return args[0].zero_()
        return func(*args, **(kwargs or {}))


def draw(seed: int, call: int, out: Vector, threads: int | None = None) -> None:
    """Fill a vector with the values of one call, of mean 0 and standard deviation 1. They do not depend on `threads`
    (None: one for each core that we may use, up to a number)."""
    blocks = range(-(-out.size // BLOCK))
    if len(blocks) == 1:  # a small model has many such calls, and to start a thread takes longer than to draw
        _draw_block(seed, call, 0, out)
        return
    with ThreadPoolExecutor(threads or min(usable_cores(), THREADS_AT_MOST)) as pool:
        for done in [pool.submit(_draw_block, seed, call, block, out) for block in blocks]:
            done.result()


def _draw_block(seed: int, call: int, block: int, out: Vector) -> None:
    values = out[block * BLOCK : (block + 1) * BLOCK]
    key, counter = np.array([seed, call], np.uint64), np.array([0, block, 0, 0], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(values.size * DRAWS // DRAWS_A_WORD)
    draws = words.astype("<u8", copy=False).view("<u2").reshape(DRAWS, values.size)
    total = draws[0].astype(np.int32)
    for row in draws[1:]:
        total += row
    total -= DRAWS * HIGHEST // 2
    np.multiply(total, np.float32(1 / (HIGHEST + 1)), out=values, casting="unsafe", dtype=np.float32)


def _fill(
    seed: int,
    call: int,
    tensor: torch.Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    *,
    generator: Any = None,
    threads: int | None = None,
) -> torch.Tensor:
    """What `normal_` does; a generator of the caller's is passed over."""
    if tensor.is_meta:
        return tensor
    values = torch.empty(tensor.numel(), dtype=torch.float32)
    draw(seed, call, values.numpy(), threads)
    return tensor.copy_(values.mul_(std).add_(mean).view(tensor.shape))
