"""The workers of one volunteer: their devices, their communication, and the model shared among them.

Workers connect to each other through a store. The first worker serves it on a socket of the peer process that is bound
to the loopback interface, so no other machine can reach it, and no other program can take the port first.

FSDP2 (arXiv 2304.11277) shards the model, with one group for each transformer block and one for the rest. On a mesh of
two dimensions, replicas and shards, each replica has the whole model, and gradients are summed over both. A worker
builds the model without memory for its weights, then allocates memory block by block and keeps only its part.
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
"""Compute capability of the oldest GPUs for which Triton compiles."""
DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


def choose_device(wanted: str) -> torch.device:
    """Return the device that `wanted` names: "auto" (a GPU if torch sees one, else the CPU), "cpu", "cuda" or "cuda:1".

    Raises: MachineError when the text is none of these, or torch cannot compute on the device.
    """
    if not DEVICE.fullmatch(wanted):
        raise MachineError(f"--device {wanted} is not a device.", "Use auto, cpu, cuda, or cuda:1 and so on.")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
        # Run a kernel, because on an unsupported GPU an allocation alone works.
        torch.zeros(1, device=device).add_(1).item()
        if device.index is not None:
            torch.cuda.set_device(device)  # tensors that are created without a device are on this GPU
    except (RuntimeError, AssertionError) as error:
        raise _cannot_be_used(wanted, first_line(error)) from error
    return device


def _cannot_be_used(wanted: str, reason: str) -> MachineError:
    """Return the error for a device that torch cannot use. `reason` is torch's message."""
    device, version = torch.device(wanted), torch.__version__
    count, why = usable_gpus()
    if device.type == "cuda" and (device.index or 0) < count:
        about = torch.cuda.get_device_properties(device)
        found, remedy = unusable(about.name, (about.major, about.minor), version, reason.rstrip("."))
        return MachineError(f"{found}.", remedy)
    cards, cuda = read_cards(), torch.version.cuda
    if cards.are_reachable and not count and cuda:
        found, remedy = cards.hidden_from(version, f"CUDA {cuda}", why)
        return MachineError(f"{found}.", remedy)
    remedy = "Use --device cpu, or install a torch that supports this GPU."
    return MachineError(f"--device {wanted} cannot be used by torch {version}: {reason}", remedy)


def device_name(device: torch.device) -> str:
    """Return a GPU's name from its driver, such as "NVIDIA A100-SXM4-80GB"; for other devices, their type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def compiling_lacks(device: torch.device) -> str | None:
    """Return the reason why torch.compile cannot work on a GPU, or None if it can. Triton needs a C compiler for its
    launchers."""
    if torch.cuda.get_device_capability(device) < TRITON_CAPABILITY:
        return f"a {device_name(device)} is too old for it"
    compilers = [*filter(None, [os.environ.get("CC")]), "gcc", "clang"]
    return None if any(map(shutil.which, compilers)) else "there is no C compiler here; install gcc"


def has_bf16(device: torch.device) -> bool:
    """Return True if a device computes in bf16 natively. GPUs older than Ampere convert each value, and are slower."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def has_fast_fp16(device: torch.device) -> bool:
    """Return True if a device multiplies fp16 much faster than fp32, as GPUs since Volta do with tensor cores."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0)


def forget_peak_memory(device: torch.device) -> None:
    """Reset a GPU's peak memory, which `peak_memory` returns. The CPU's peak cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: on a GPU, of tensors since `forget_peak_memory`; on the CPU, of this process
    since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports ru_maxrss in KiB


# Team -----------------------------------------------------------------------------------------------------------------
Value: TypeAlias = float | torch.Tensor
"""A number, or a tensor with one number on the worker's device."""
LOOPBACK = "127.0.0.1"
HYBRID = ("replicas", "shards")
SETTING_UP = timedelta(hours=2)
"""Time limit for workers that wait for each other before training. The first worker alone downloads weights, or draws
and writes those of a large model, and NCCL's default limit is ten minutes. Dead workers are noticed in other ways."""


class Team:
    """Worker `rank` (counted from 0) of a volunteer's `size` workers, and its communication with the others. Without a
    mesh, the worker is alone: it has the unsharded model and no process group.

    The workers form equal groups of consecutive ranks, `replicas` of them. Each group has the whole model, cut into as
    many `shards` as it has workers; this worker has number `shard`. Where a run asks for bf16, they compute in `half`:
    in bf16, or, if one GPU has no bf16, in fp16 with a loss scale.
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
        """Connect to the other workers through a store, and return the team. The first worker serves the store on
        `listener`, the descriptor of a socket bound to `port`; the team will close the descriptor.

        A single worker connects to no store, whatever its device. With FSDP2 over one GPU all parameters would be
        copied twice a micro-batch, and torch could not compute every optimizer on the shards.

        Raises: MachineError when `replicas` does not divide the number of workers.
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
        """Make this worker fail if it waits longer than `seconds` for another worker in a collective. The limit applies
        from the next collective on."""
        if self.mesh is not None:
            for group in {dist.group.WORLD, *self.mesh.get_all_groups()}:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    @property
    def is_in_first_replica(self) -> bool:
        """True if this worker must write out its shard. Workers of other replicas have equal shards, and write
        nothing."""
        return self.rank < self.shards

    def piece(self, count: int) -> slice:
        """Return this worker's slice of `count` items, which all workers share. The slices follow each other by rank,
        and their sizes differ by at most one."""
        share, larger = divmod(count, self.size)
        start = share * self.rank + min(self.rank, larger)
        return slice(start, start + share + (self.rank < larger))

    def largest_piece(self, count: int) -> int:
        """Return the number of items in worker 0's piece of `count` items, the largest piece."""
        return math.ceil(count / self.size)

    def sums(self, values: Sequence[Value]) -> list[float]:
        """Return the sum of each value over all workers, added in the order of ranks, so that all workers get the same
        bits.

        This process waits once for the device, even if several values are still being computed there.
        """
        if self.mesh is None and not any(isinstance(value, torch.Tensor) for value in values):
            return [float(value) for value in values]
        return [float(value) for value in self.sums_on_device(values).tolist()]

    def sums_on_device(self, values: Sequence[Value]) -> torch.Tensor:
        """Return the sums that `sums` returns, but as an fp64 vector on the device, so that this process does not wait
        for the device."""
        return reduce(torch.add, self._gather(values))

    def smallest(self, value: int) -> int:
        """Return the smallest `value` of all workers."""
        return int(value) if self.mesh is None else int(min(self._gather([value])).item())

    def take_from_first(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor on all workers with worker 0's values."""
        if self.mesh is not None:
            dist.broadcast(tensor, 0)

    def wait_for_all(self) -> None:
        self.sums([0.0])

    def _gather(self, values: Sequence[Value]) -> list[torch.Tensor]:
        """Return all workers' values, ordered by rank: for each worker one fp64 vector on this worker's device."""
        own = torch.stack([self._on_device(value) for value in values])
        if self.mesh is None:
            return [own]
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(gathered, own)
        return gathered

    def _on_device(self, value: Value) -> torch.Tensor:
        """Return a number or tensor as an fp64 tensor on the device. A number is filled in on the device, because
        copying it there would wait for the device."""
        if isinstance(value, torch.Tensor):
            return value.to(self.device, torch.float64)
        return torch.full((), float(value), dtype=torch.float64, device=self.device)


def read_later(numbers: torch.Tensor) -> Callable[[], list[float]]:
    """Start to copy a vector to the host. Return a function that waits for the copy and returns the vector's numbers.

    The function does not wait for work that a GPU is given after this call.
    """
    if numbers.device.type != "cuda":
        return numbers.tolist
    copied, there = torch.cuda.Event(), numbers.to("cpu", non_blocking=True)  # torch uses pinned memory for this copy
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return there.tolist()

    return read


# The model that they share --------------------------------------------------------------------------------------------
def shard_model(model: Any, team: Team, training: TrainingSection, whole_layers: bool = False) -> None:
    """Shard a model in place with FSDP2. Tensors on the meta device get memory, but no values.

    The group of the rest contains the head. It stays gathered from the forward to the backward pass, because the loss
    is computed with the head in between. With `whole_layers` all groups stay gathered.
    """
    computed = team.half if training.precision == "bf16" else torch.float32
    summed = torch.bfloat16 if training.gradient_reduction == "bf16" and team.half == torch.bfloat16 else torch.float32
    policy = MixedPrecisionPolicy(computed, summed)
    for module in (*transformer_blocks(model), model):
        _take_memory(module, team.device)
        is_freed = module is not model and not whole_layers
        fully_shard(module, mesh=team.mesh, mp_policy=policy, reshard_after_forward=is_freed)


def has_other_tensors(model: torch.nn.Module) -> bool:
    """Return True if a model has tensors besides its parameters and buffers. Only the model's constructor can fill
    those tensors."""
    return any(isinstance(value, torch.Tensor) for module in model.modules() for value in vars(module).values())


@torch.no_grad()
def fill_untrained(model: Any, whole: Any, team: Team) -> None:
    """Fill a sharded model's frozen parameters and buffers, which theta does not contain, from worker 0's unsharded
    model `whole`. Other workers pass None."""
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
    """Replace a module's tensors on the meta device by uninitialised ones. Unlike with `Module.to_empty`, tied
    parameters stay tied."""
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
