"""Each worker's part of the parameters, and the way between it and flat vectors.

FSDP2 cuts tensors along their first dimension, in pieces as `torch.chunk` makes them. A worker's part of a parameter is
thus one consecutive slice of the flat vector, and each worker copies its own: nothing is gathered. That holds for
anything shaped like the parameters, an optimizer's moments for example.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor

from opendiloco.model.layout import Layout, Parameter
from opendiloco.model.merging import merge
from opendiloco.shared_memory import Vector

STAGED_VALUES = 2**24
"""Length of the pinned buffer between shared memory and a GPU."""


class Shards:
    """Worker `rank`'s part of each parameter, where `workers` share them.

    With a `staging` buffer (fp32, of one dimension) all values pass through it: copies between a GPU and memory that is
    not pinned are slow.
    """

    def __init__(self, layout: Layout, rank: int = 0, workers: int = 1, staging: torch.Tensor | None = None) -> None:
        self._layout = layout
        self.rank = rank
        self.staging = staging
        self._workers = workers

    def of(self, layout: Layout) -> Shards:
        """Return the same worker's part of other tensors."""
        return Shards(layout, self.rank, self._workers, self.staging)

    def slice_of(self, parameter: Parameter) -> slice:
        """Where this worker's part lies in a flat vector; it may be empty."""
        if self._workers == 1:
            return parameter.slice
        rows = shard_rows(parameter.shape[0], self.rank, self._workers)
        row_size = math.prod(parameter.shape[1:])
        return slice(parameter.offset + rows.start * row_size, parameter.offset + rows.stop * row_size)

    @torch.no_grad()
    def load(self, flat: Vector, tensors: Mapping[str, torch.Tensor]) -> None:
        """flat → tensors, which have the parameters' names and shapes: whole tensors, or this worker's DTensors."""
        for values, own in self._pairs(flat, tensors):
            own.copy_(values if self.staging is None else self.staging[: len(values)].copy_(values))

    @torch.no_grad()
    def store(self, tensors: Mapping[str, torch.Tensor], flat: Vector) -> None:
        """tensors → flat: this worker's part of it, and nothing else."""
        for values, own in self._pairs(flat, tensors):
            values.copy_(own if self.staging is None else self.staging[: len(values)].copy_(own))

    @torch.no_grad()
    def merge(self, flat: Vector, tensors: Mapping[str, torch.Tensor], alpha: float) -> None:
        """Merge flat into tensors, which keep a share of `alpha`; see merging.py."""
        for values, own in self._pairs(flat, tensors):
            staged = values if self.staging is None else self.staging[: len(values)].copy_(values)
            merge(own, staged.to(own.device), alpha)

    def _pairs(self, flat: Vector, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the vector and of the tensors, of one shape each; none longer than the staging buffer."""
        for parameter in self._layout:
            values = torch.from_numpy(flat[self.slice_of(parameter)])
            own = local_part(tensors[parameter.name])
            if self.staging is None:
                yield values.view(own.shape), own
            else:
                yield from zip(values.split(len(self.staging)), own.view(-1).split(len(self.staging)), strict=True)


def shard_rows(rows: int, rank: int, workers: int) -> slice:
    """Worker `rank`'s part of so many rows, as FSDP2 cuts them: the last workers may have fewer, or none."""
    share = math.ceil(rows / workers)
    return slice(min(rows, share * rank), min(rows, share * (rank + 1)))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's part of a tensor, in place; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def staging_for(device: torch.device) -> torch.Tensor | None:
    """The buffer that copies to and from this device need."""
    return torch.empty(STAGED_VALUES, pin_memory=True) if device.type == "cuda" else None
