"""The workers of one volunteer, as each of them sees the others: who it is, and what they tell each other.

They meet at a store that the first of them serves on a socket of the peer process, bound to the loopback interface:
nobody else's machine can reach it, and no port is chosen before it is taken.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from opendiloco.errors import MachineError

Value: TypeAlias = float | torch.Tensor
"""A number, or a tensor that holds one, on the worker's device."""
LOOPBACK = "127.0.0.1"
HYBRID = ("replicas", "shards")
PATIENCE = timedelta(hours=2)
"""For which workers wait for each other: the first alone downloads weights, or draws and writes those of a large model.
NCCL would give up after ten minutes. Workers that die are noticed otherwise."""


@dataclass(frozen=True)
class MeetingPlace:
    """Where workers meet: at the first worker's store, which it serves on the socket `listener` bound to `port`."""

    port: int = 0
    listener: int | None = None

    def store(self, size: int) -> Store:
        """Return the store that so many workers share. The listener is taken over."""
        if self.listener is None:
            return TCPStore(LOOPBACK, self.port, size, timeout=PATIENCE)
        return TCPStore(LOOPBACK, self.port, size, is_master=True, timeout=PATIENCE, master_listen_fd=self.listener)


class Team:
    """Worker `rank` of `size`. A worker without a mesh is alone: it has the plain model, and no process group.

    They share the model `replicas` times: each of so many groups of workers with consecutive ranks has all of it, and
    cuts it into as many `shards` as it has workers. This one has number `shard`.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int = 0,
        size: int = 1,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.device = device
        self.rank = rank
        self.size = size
        self.mesh = mesh
        self.shards = size if mesh is None else mesh.size(mesh.ndim - 1)
        self.shard = rank % self.shards

    @classmethod
    def meet(
        cls,
        device: torch.device,
        rank: int,
        size: int,
        place: MeetingPlace,
        replicas: int = 1,
    ) -> Team:
        """Return when all have come.

        A worker that is the only one meets nobody, whatever its device: FSDP2 over one GPU would copy all parameters
        twice a micro-batch, and make shards of them on which torch cannot compute every optimizer.

        Raises: MachineError when so many workers cannot be so many equal groups.
        """
        if size % replicas:
            raise MachineError(
                f"--replicas {replicas} does not divide the {size} workers of this volunteer.",
                "Choose a number that does.",
            )
        if size == 1:
            if place.listener is not None:
                os.close(place.listener)
            return cls(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        device_id = device if device.type == "cuda" else None
        store = place.store(size)
        dist.init_process_group(backend, timeout=PATIENCE, store=store, rank=rank, world_size=size, device_id=device_id)
        shape, names = ((size,), ("shards",)) if replicas == 1 else ((replicas, size // replicas), HYBRID)
        return cls(device, rank, size, init_device_mesh(device.type, shape, mesh_dim_names=names))

    @property
    def is_in_first_replica(self) -> bool:
        """Whether it is up to this worker to hand its shard out: the other replicas have the same."""
        return self.rank < self.shards

    def piece(self, count: int) -> slice:
        """This worker's share of `count` things in a row: consecutive, and as even as possible."""
        share, larger = divmod(count, self.size)
        start = share * self.rank + min(self.rank, larger)
        return slice(start, start + share + (self.rank < larger))

    def largest_piece(self, count: int) -> int:
        """The length of worker 0's piece."""
        return math.ceil(count / self.size)

    def sums(self, values: Sequence[Value]) -> list[float]:
        """Return the sum of each value over all workers, in their order, so that all have the same bits.

        This process waits once for the device, however many values are still being computed there.
        """
        return [sum(column) for column in self._gather(values)]

    def smallest(self, value: int) -> int:
        """Of all workers' values."""
        [column] = self._gather([value])
        return int(min(column))

    def take_from_first(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor with worker 0's."""
        if self.mesh is not None:
            dist.broadcast(tensor, 0)

    def wait_for_all(self) -> None:
        self.sums([0.0])

    def _gather(self, values: Sequence[Value]) -> list[list[float]]:
        """Return every worker's values, ordered by rank: a list for each value."""
        if self.mesh is None and not any(isinstance(value, torch.Tensor) for value in values):
            return [[float(value)] for value in values]
        own = torch.stack([self._on_device(value) for value in values])
        if self.mesh is None:
            return [[value] for value in own.tolist()]
        everyones = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(everyones, own)
        return [list(column) for column in torch.stack(everyones).T.tolist()]

    def _on_device(self, value: Value) -> torch.Tensor:
        """Return a value as a tensor of fp64. A number is filled in, since a copy would wait for the device."""
        if isinstance(value, torch.Tensor):
            return value.to(self.device, torch.float64)
        return torch.full((), float(value), dtype=torch.float64, device=self.device)
