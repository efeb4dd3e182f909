"""The processes of a loop that share a model. The first process is the run's peer, and the others receive its
results."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from opendiloco.errors import LoopError, first_line

Found = TypeVar("Found")

MEETING = timedelta(minutes=10)
"""Longest wait for all processes to call `Ranks.meet`, because a process may have failed before."""
LONGEST_WAIT = timedelta(days=7)
"""Longest wait for the first process, which waits for the swarm. The death of a process is noticed at once."""


class Ranks:
    """The processes of torch.distributed's default group, or this process alone. All processes make the same calls in
    the same order, in a gloo group of their own, because NCCL would time out while the peers average."""

    def __init__(self) -> None:
        is_distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if is_distributed else 0
        self.size = dist.get_world_size() if is_distributed else 1
        self._group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def meet(self) -> None:
        """Create the gloo group, and wait until all processes have called this method."""
        if self.size > 1:
            with _raising_loop_error():
                self._group = dist.new_group(backend="gloo", timeout=MEETING)
                dist.distributed_c10d._set_pg_timeout(LONGEST_WAIT, self._group)

    def part(self) -> None:
        """Destroy the gloo group. Processes that wait for this process get an error."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):
                dist.destroy_process_group(group)

    def from_first(self, find: Callable[[], Found]) -> Found:
        """Call `find` in the first process. Return its result, or raise its exception, in all processes."""
        if self.size == 1:
            return find()
        found: list[tuple[Found | None, BaseException | None]] = [(None, None)]
        if self.is_first:
            try:
                found = [(find(), None)]
            except BaseException as error:
                with suppress(LoopError):  # the other processes may have ended
                    self._broadcast([(None, _portable(error))])
                raise
        self._broadcast(found)
        value, error_of_first = found[0]
        if error_of_first is not None:
            raise error_of_first
        return cast(Found, value)

    def _broadcast(self, found: list[Any]) -> None:
        with _raising_loop_error():
            dist.broadcast_object_list(found, 0, self._group)

    def sum(self, value: int) -> int:
        """Return the sum of the values that all processes pass."""
        if self.size == 1:
            return value
        total = torch.tensor([value], dtype=torch.int64)
        with _raising_loop_error():
            dist.all_reduce(total, group=self._group)
        return int(total)

    def spread(self, value: float) -> float:
        """Return the difference between the largest and the smallest of the values that all processes pass."""
        if self.size == 1:
            return 0.0
        ends = torch.tensor([value, -value], dtype=torch.float64)
        with _raising_loop_error():
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=self._group)
        return float(ends.sum())

    def take_from_first(self, values: torch.Tensor) -> None:
        """Overwrite a tensor with the first process's values. A tensor on a GPU is sent through the default group,
        whose backend supports GPUs."""
        if self.size > 1:
            with _raising_loop_error():
                dist.broadcast(values, 0, self._group if values.device.type == "cpu" else None)

    def piece(self, windows: torch.Tensor) -> torch.Tensor:
        """Return this process's share of a batch of windows. All shares have equal size, because gradients are averaged
        with equal weights. If the batch cannot be divided, some windows are in two shares."""
        share = -(-len(windows) // self.size)
        places = torch.arange(self.rank * share, (self.rank + 1) * share) % len(windows)
        return windows if self.size == 1 else windows[places]


@contextmanager
def _raising_loop_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LoopError(
            f"another process of this loop cannot be reached: {first_line(error)}",
            "Read that process's output, and restart all processes.",
        ) from error


def _portable(error: BaseException) -> BaseException:
    """Return the error if another process can unpickle it, else a RuntimeError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__} in the first process: {error}")
