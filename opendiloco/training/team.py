"""The workers of one volunteer: the device of each, what they tell each other, and the model that they share.

Workers meet at a store that the first of them serves on a socket of the peer process, bound to the loopback interface:
no other machine can reach it, and no port is chosen before it is taken.

The model is sharded by FSDP2 (arXiv 2304.11277), one group per transformer block and the rest. On a mesh of two
dimensions, replicas and shards, each replica has the whole model, and gradients are summed over both. A worker builds
the model without memory for its weights, and takes memory block by block, keeping its part only.
"""

from __future__ import annotations

import math
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import reduce
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from opendiloco.config.run_config import TrainingSection
from opendiloco.errors import MachineError, first_line
from opendiloco.gpus import read_cards, unusable, usable_gpus
from opendiloco.model.parameters import local_part, shard_rows, transformer_blocks

# Device ---------------------------------------------------------------------------------------------------------------
TRITON_CAPABILITY = (7, 0)
"""Compute capability of the oldest GPUs that it compiles for."""
DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


def choose_device(wanted: str) -> torch.device:
    """Return the device for "auto" (a GPU if torch sees one, else the CPU), "cpu", "cuda" or "cuda:1".

    Raises: MachineError when it is none of these, or torch cannot compute on it.
    """
    if not DEVICE.fullmatch(wanted):
        raise MachineError(f"--device {wanted} is nothing to train on.", "Use auto, cpu, cuda, or cuda:1 and so on.")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
        torch.zeros(1, device=device).add_(1).item()  # a kernel: memory can be had on GPUs that torch has none for
        if device.index is not None:
            torch.cuda.set_device(device)  # so that nothing is put on another GPU for want of a name
    except (RuntimeError, AssertionError) as error:
        raise _cannot_be_used(wanted, first_line(error)) from error
    return device


def _cannot_be_used(wanted: str, said: str) -> MachineError:
    """Return the error for a device of which torch has `said` why it cannot use it."""
    device, version = torch.device(wanted), torch.__version__
    count, why = usable_gpus()
    if device.type == "cuda" and (device.index or 0) < count:
        about = torch.cuda.get_device_properties(device)
        found, remedy = unusable(about.name, (about.major, about.minor), version, said.rstrip("."))
        return MachineError(f"{found}.", remedy)
    cards, cuda = read_cards(), torch.version.cuda
    if cards.are_reachable and not count and cuda:
        found, remedy = cards.hidden_from(version, f"CUDA {cuda}", why)
        return MachineError(f"{found}.", remedy)
    remedy = "Use --device cpu, or install a torch that supports this GPU."
    return MachineError(f"--device {wanted} cannot be used by torch {version}: {said}", remedy)


def device_name(device: torch.device) -> str:
    """Return a GPU's name as its driver says it, such as "NVIDIA A100-SXM4-80GB"; else the device's type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def compiling_lacks(device: torch.device) -> str | None:
    """Return what torch.compile would lack on a GPU: Triton has a C compiler make its launchers. None: nothing."""
    if torch.cuda.get_device_capability(device) < TRITON_CAPABILITY:
        return f"a {device_name(device)} is too old for it"
    compilers = [*filter(None, [os.environ.get("CC")]), "gcc", "clang"]
    return None if any(map(shutil.which, compilers)) else "there is no C compiler here; install gcc"


def has_bf16(device: torch.device) -> bool:
    """Return whether a device computes in bf16 itself. GPUs older than Ampere convert each value, and are slower."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def has_fast_fp16(device: torch.device) -> bool:
    """Return whether a device multiplies fp16 much faster than fp32: since Volta, GPUs have tensor cores for it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0)


def forget_peak_memory(device: torch.device) -> None:
    """`peak_memory` counts from now on. That of the CPU cannot be forgotten."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that were taken: on a GPU by tensors since it was forgotten, on the CPU by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


# Team -----------------------------------------------------------------------------------------------------------------
Value: TypeAlias = float | torch.Tensor
"""A number, or a tensor that holds one, on the worker's device."""
LOOPBACK = "127.0.0.1"
HYBRID = ("replicas", "shards")
SETTING_UP = timedelta(hours=2)
"""For which workers wait for each other before they train: the first alone downloads weights, or draws and writes those
of a large model. NCCL would give up after ten minutes. Workers that die are noticed otherwise."""


class Team:
    """Worker `rank` of `size`. A worker without a mesh is alone: it has the plain model, and no process group.

    They share the model `replicas` times: each of so many groups of workers with consecutive ranks has all of it, and
    cuts it into as many `shards` as it has workers. This one has number `shard`. They compute in `half` precision where
    a run asks for bf16: in fp16, with a loss scale, where one of their GPUs has no bf16.
    """

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1, mesh: DeviceMesh | None = None) -> None:
        self.device = device
        self.rank = rank
        self.size = size
        self.mesh = mesh
        self.shards = size if mesh is None else mesh.size(mesh.ndim - 1)
        self.shard = rank % self.shards
        self.half = torch.bfloat16

    @classmethod
    def meet(
        cls, device: torch.device, rank: int, size: int, port: int = 0, listener: int | None = None, replicas: int = 1
    ) -> Team:
        """Return the team once all have come to the store that the first worker serves on `listener`, a socket bound to
        `port`. The listener is taken over.

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
            if listener is not None:
                os.close(listener)
            return cls(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        device_id = device if device.type == "cuda" else None
        store = TCPStore(
            LOOPBACK, port, size, is_master=listener is not None, timeout=SETTING_UP, master_listen_fd=listener
        )
        dist.init_process_group(
            backend, timeout=SETTING_UP, store=store, rank=rank, world_size=size, device_id=device_id
        )
        shape, names = ((size,), ("shards",)) if replicas == 1 else ((replicas, size // replicas), HYBRID)
        return cls(device, rank, size, init_device_mesh(device.type, shape, mesh_dim_names=names))

    def wait_at_most(self, seconds: float) -> None:
        """Have this worker fail when another keeps it waiting for longer in a collective, from the next one on."""
        if self.mesh is not None:
            for group in {dist.group.WORLD, *self.mesh.get_all_groups()}:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    @property
    def is_in_first_replica(self) -> bool:
        """Return whether it is up to this worker to hand its shard out: the other replicas have the same."""
        return self.rank < self.shards

    def piece(self, count: int) -> slice:
        """Return this worker's share of `count` things in a row: consecutive, and as even as possible."""
        share, larger = divmod(count, self.size)
        start = share * self.rank + min(self.rank, larger)
        return slice(start, start + share + (self.rank < larger))

    def largest_piece(self, count: int) -> int:
        """Return the length of worker 0's piece."""
        return math.ceil(count / self.size)

    def sums(self, values: Sequence[Value]) -> list[float]:
        """Return the sum of each value over all workers, in their order, so that all have the same bits.

        This process waits once for the device, however many values are still being computed there.
        """
        if self.mesh is None and not any(isinstance(value, torch.Tensor) for value in values):
            return [float(value) for value in values]
        return [float(value) for value in self.sums_on_device(values).tolist()]

    def sums_on_device(self, values: Sequence[Value]) -> torch.Tensor:
        """Return the same sums as a vector of fp64 on the device, without waiting for it."""
        return reduce(torch.add, self._gather(values))

    def smallest(self, value: int) -> int:
        """Return the smallest of all workers' values."""
        return int(value) if self.mesh is None else int(min(self._gather([value])).item())

    def take_from_first(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor with worker 0's."""
        if self.mesh is not None:
            dist.broadcast(tensor, 0)

    def wait_for_all(self) -> None:
        self.sums([0.0])

    def _gather(self, values: Sequence[Value]) -> list[torch.Tensor]:
        """Return every worker's values, ordered by rank: a vector of fp64 on the device for each worker."""
        own = torch.stack([self._on_device(value) for value in values])
        if self.mesh is None:
            return [own]
        everyones = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(everyones, own)
        return everyones

    def _on_device(self, value: Value) -> torch.Tensor:
        """Return a value as a tensor of fp64. A number is filled in, since a copy would wait for the device."""
        if isinstance(value, torch.Tensor):
            return value.to(self.device, torch.float64)
        return torch.full((), float(value), dtype=torch.float64, device=self.device)


def read_later(numbers: torch.Tensor) -> Callable[[], list[float]]:
    """Begin to copy a vector to the host. Return a function that waits for it and returns its numbers.

    It does not wait for what a GPU was given after this call.
    """
    if numbers.device.type != "cuda":
        return numbers.tolist
    copied, there = torch.cuda.Event(), numbers.to("cpu", non_blocking=True)  # torch takes pinned memory for that
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return there.tolist()

    return read


# The model that they share --------------------------------------------------------------------------------------------
def shard_model(model: Any, team: Team, training: TrainingSection, whole_layers: bool = False) -> None:
    """Share a model, in place; what is on the meta device gets memory, but no values.

    The rest has the head, with which the loss is computed after the forward pass; so it stays gathered until the
    backward pass, which begins with it. With `whole_layers` all groups do.
    """
    computed = team.half if training.precision == "bf16" else torch.float32
    summed = torch.bfloat16 if training.gradient_reduction == "bf16" and team.half == torch.bfloat16 else torch.float32
    policy = MixedPrecisionPolicy(computed, summed)
    for module in (*transformer_blocks(model), model):
        _take_memory(module, team.device)
        is_freed = module is not model and not whole_layers
        fully_shard(module, mesh=team.mesh, mp_policy=policy, reshard_after_forward=is_freed)


def has_other_tensors(model: torch.nn.Module) -> bool:
    """Return whether a model keeps tensors beside its parameters and buffers: only its constructor can fill those."""
    return any(isinstance(value, torch.Tensor) for module in model.modules() for value in vars(module).values())


@torch.no_grad()
def fill_untrained(model: Any, whole: Any, team: Team) -> None:
    """Frozen parameters and buffers, which theta does not have, from worker 0's whole model; the others give None."""
    source = {} if whole is None else dict(_untrained(whole))
    for name, tensor in _untrained(model):
        if team.rank == 0:
            values = source[name].to(team.device).contiguous()
        else:
            values = torch.empty(tensor.shape, dtype=tensor.dtype, device=team.device)
        team.take_from_first(values)
        own = local_part(tensor)
        own.copy_(values if own is tensor else values[shard_rows(len(values), team.shard, team.shards)])


def _untrained(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    frozen = ((name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad)
    return chain(frozen, model.named_buffers())


def _take_memory(module: torch.nn.Module, device: torch.device) -> None:
    """Replace what is on the meta device. Tied parameters stay one, which `Module.to_empty` would not see to."""
    replaced: dict[int, torch.nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                if id(parameter) not in replaced:
                    empty = torch.empty_like(parameter, device=device)
                    replaced[id(parameter)] = torch.nn.Parameter(empty, parameter.requires_grad)
                setattr(owner, name, replaced[id(parameter)])
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(owner, name, torch.empty_like(buffer, device=device))
