"""How many windows go through the model at once: a worker's whole piece of a batch, or as many as its memory takes.

What a window takes is found by trying one and then two, whatever the model: forward and back where they are to be
trained, forward alone where they are only to be evaluated. On GPUs the allocator knows how much memory tensors take; on
the CPU each tensor is noticed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opendiloco.host_memory import MOMENTS_BYTES, HostMemory
from opendiloco.model.loss import in_pieces_of, positions_at_once
from opendiloco.shared_memory import VALUE_BYTES, available_memory
from opendiloco.training.device_facts import forget_peak_memory, peak_memory
from opendiloco.training.replica import ModelReplica
from opendiloco.training.team import Team

SHARE = {"cpu": 0.25, "cuda": 0.5}
"""Of the memory that is left, what windows may take by the size of their tensors. Operations take memory for
themselves, too, and malloc keeps much that was freed: on the CPU we measured 1.3 to 1.7 times the tensors, and 3.6
times with activation checkpointing."""


class WindowMemory(NamedTuple):
    """Bytes that windows take beside the weights and their gradients: `each` of them, and what is `fixed`.

    The latter is the same for any number of them: the weights once more in bf16, or what FSDP2 gathers, for example.
    """

    fixed: int
    each: int

    @classmethod
    def of(cls, one: int, two: int) -> WindowMemory:
        """Return it from what one and two windows take."""
        each = min(max(1, two - one), one)
        return cls(one - each, each)


def fitting_micro_batch(replica: ModelReplica, piece: int, team: Team, trains: bool = True) -> int:
    """Return 1 to `piece` windows, the same number on all workers. They call this together."""
    if piece == 1:
        return 1  # whether it fits or not
    with trying(replica, team, trains) as taken:
        one = taken(1)
        team.wait_for_all()  # so that nobody sees what another takes to try
        room = free_memory(team) - _taken_later(replica, team, trains)
        room -= VALUE_BYTES * replica.layout.size * replica.reduces_once  # whole gradients, until they are summed
        if not team.smallest(room > 2 * one):
            return 1  # two are not even to be tried
        memory = WindowMemory.of(one, taken(2))
        room = int(SHARE[team.device.type] * (room - memory.fixed))
        fitting = team.smallest(min(room // memory.each, piece))
        length = replica.window_length - 1
        at_once = positions_at_once(replica.model.config.vocab_size, team.device) // length
        if 1 < at_once < fitting:
            beyond = _fitting_by_pieces(taken, room, memory, at_once, length)
            fitting = team.smallest(min(at_once + beyond, piece))
    return max(1, fitting)


def _fitting_by_pieces(taken: Callable[[int], int], room: int, memory: WindowMemory, at_once: int, length: int) -> int:
    """Return how many windows fit beside those whose logits are computed `at_once`: they have no logits of their own,
    but the gradient of the head's weight is added up beside those of the rest."""
    with in_pieces_of(length):
        two, three = taken(2), taken(3)
    each = min(max(1, three - two), memory.each)
    added_up = max(0, two - memory.fixed - memory.each - each)
    return max(0, room - added_up - at_once * memory.each) // each


def _taken_later(replica: ModelReplica, team: Team, trains: bool) -> int:
    """Return this worker's share of the bytes that nobody has taken yet when workers have tried a window: moments,
    where there is training; in main memory also what the peer process takes."""
    moments = MOMENTS_BYTES * replica.layout.size * trains // team.shards
    if team.device.type != "cpu":
        return moments
    host = HostMemory.of(replica.layout.size, replica.codec)
    return moments + ((host.most if trains else host.evaluating) - host.shared) // team.size


@contextmanager
def trying(replica: ModelReplica, team: Team, trains: bool = True) -> Iterator[Callable[[int], int]]:
    """What so many windows take: forward and back, beside the weights' gradients; without `trains`, forward alone.

    There are gradients meanwhile, as there are from a batch's first windows on. In the end the replica is as it was.
    """
    gpus = [team.device] if team.device.type == "cuda" else []

    def go(windows: int) -> None:
        ids = torch.zeros(windows, replica.window_length, dtype=torch.long, device=team.device)
        with torch.set_grad_enabled(trains):
            loss = replica.loss(ids)
        if trains:
            loss.backward()

    with torch.random.fork_rng(gpus), torch.compiler.set_stance("force_eager"):
        try:
            if trains:
                go(1)
            yield lambda windows: peak_while(lambda: go(windows), team.device)
        finally:
            replica.model.zero_grad(set_to_none=True)


def free_memory(team: Team) -> int:
    """Bytes for this worker: of its GPU, or its share of what the machine has."""
    if team.device.type == "cpu":
        return available_memory() // team.size
    unused = torch.cuda.memory_reserved(team.device) - torch.cuda.memory_allocated(team.device)
    return torch.cuda.mem_get_info(team.device)[0] + unused


def peak_while(work: Callable[[], None], device: torch.device) -> int:
    """The most bytes of this device that tensors made by `work` take at any time."""
    if device.type == "cuda":
        forget_peak_memory(device)
        before: int = torch.cuda.memory_allocated(device)
        work()
        return peak_memory(device) - before
    noticed = _Noticing()
    with noticed:
        work()
    return noticed.peak


class _Noticing(TorchDispatchMode):
    """Sees what each operation returns. What an operation takes for itself alone is not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._present = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        inputs = [one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        result = operation(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in inputs:
                self._notice(one.untyped_storage())
        return result

    def _notice(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._forget(key, size))
            self._present += size
            self.peak = max(self.peak, self._present)

    def _forget(self, key: int, size: int) -> None:
        del self._storages[key]
        self._present -= size
