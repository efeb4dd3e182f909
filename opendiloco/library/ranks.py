"""The processes of a loop that share a model. One of them is the run's peer; the others take part in what it does."""

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
"""Within which all processes have to come: one may have failed before."""
LONGEST_WAIT = timedelta(days=7)
"""For which processes wait for the first one, which waits for the swarm. One that dies is noticed at once."""


class Ranks:
    """The processes of torch.distributed's default group, or this one alone. All make the same calls in the same order.

    What they tell each other goes by a group of its own, over gloo: NCCL would give up while the swarm averages.
    """

    def __init__(self) -> None:
        is_there = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if is_there else 0
        self.size = dist.get_world_size() if is_there else 1
        self._group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Return whether this process is the peer."""
        return self.rank == 0

    def meet(self) -> None:
        """Begin to talk. Waits until all processes have come."""
        if self.size > 1:
            with _told_of_deaths():
                self._group = dist.new_group(backend="gloo", timeout=MEETING)
                dist.distributed_c10d._set_pg_timeout(LONGEST_WAIT, self._group)

    def part(self) -> None:
        """Talk no more. Others that wait for this process get an error."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):
                dist.destroy_process_group(group)

    def from_first(self, find: Callable[[], Found]) -> Found:
        """Return what the first process finds, in all; or raise in all what it raises there."""
        if self.size == 1:
            return find()
        found: list[tuple[Found | None, BaseException | None]] = [(None, None)]
        if self.is_first:
            try:
                found = [(find(), None)]
            except BaseException as error:
                with suppress(LoopError):  # those that are gone need not know
                    self._broadcast([(None, _portable(error))])
                raise
        self._broadcast(found)
        value, error_of_first = found[0]
        if error_of_first is not None:
            raise error_of_first
        return cast(Found, value)

    def _broadcast(self, found: list[Any]) -> None:
        with _told_of_deaths():
            dist.broadcast_object_list(found, 0, self._group)

    def sum(self, value: int) -> int:
        """Return the sum of all processes' values."""
        if self.size == 1:
            return value
        total = torch.tensor([value], dtype=torch.int64)
        with _told_of_deaths():
            dist.all_reduce(total, group=self._group)
        return int(total)

    def spread(self, value: float) -> float:
        """Return how far all processes' values lie apart."""
        if self.size == 1:
            return 0.0
        ends = torch.tensor([value, -value], dtype=torch.float64)
        with _told_of_deaths():
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=self._group)
        return float(ends.sum())

    def take_from_first(self, values: torch.Tensor) -> None:
        """Overwrite a tensor with the first process's: on a GPU by the default group, whose backend is made for it."""
        if self.size > 1:
            with _told_of_deaths():
                dist.broadcast(values, 0, self._group if values.device.type == "cpu" else None)

    def piece(self, windows: torch.Tensor) -> torch.Tensor:
        """Return this process's share of a batch. All shares are equally large, since gradients are averaged: where the
        batch cannot be divided so, some of its windows are in it twice."""
        share = -(-len(windows) // self.size)
        places = torch.arange(self.rank * share, (self.rank + 1) * share) % len(windows)
        return windows if self.size == 1 else windows[places]


@contextmanager
def _told_of_deaths() -> Iterator[None]:
    """Raises: LoopError where torch cannot reach another process."""
    try:
        yield
    except RuntimeError as error:
        raise LoopError(
            f"another process of this loop cannot be reached: {first_line(error)}",
            "Look at what it says, and start all of them again.",
        ) from error


def _portable(error: BaseException) -> BaseException:
    """Return an error that another process can read."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__} in the first process: {error}")
