"""The inner optimizers of torch, and the files in which a machine keeps their state.

All optimizers but Adafactor and Rprop work on a sharded replica, whose parameters are DTensors. They step value by
value, apart from Muon: it orthogonalizes whole matrices, which torch gathers for each of its products. Its results
agree with an unsharded replica's up to the rounding of bfloat16.

To save GPU memory, `PackedOptimizer` keeps state tensors as large as their parameter, such as AdamW's two moments, in
main memory or in 8 bits a value.
"""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from opendiloco.config.optimizers import (
    AdafactorSection,
    AdamWSection,
    AdamWSettings,
    InnerOptimizerSection,
    MuonSection,
    TorchSection,
)
from opendiloco.errors import MachineError, first_line
from opendiloco.gpus import INSTALL_TORCHAO
from opendiloco.host_memory import QUANTIZED_AT_ONCE, QUANTIZED_BLOCK
from opendiloco.model.layout import Layout
from opendiloco.model.parameters import Shards, local_part
from opendiloco.quantities import VALUE_BYTES, OptimizerState
from opendiloco.shared_memory import Vector
from opendiloco.training.moments_file import FORMAT, NO_STEP, UNSEALED, header_of, read_header
from peers.errors import ManifestError
from peers.values.wire import printable
from peers.values.workload import SnapshotError

# Excluded because LBFGS evaluates the loss several times a step, SparseAdam needs sparse gradients, and Muon takes only
# matrices.
UNUSABLE = frozenset({torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Muon})
UNSHARDABLE = (torch.optim.Adafactor, torch.optim.Rprop)
# Arguments of torch's optimizers that a manifest's `inner_optimizer.options` must not contain.
RESERVED = frozenset({"params", "lr", "foreach", "fused", "capturable", "differentiable", "maximize"})

FUSED_ON = {"cuda"}
"""Devices on which AdamW makes its step in one kernel. Elsewhere the step needs memory for itself: on the CPU for one
parameter at a time; on a GPU, where torch would step all parameters together, for a copy of all of them."""

Groups = list[dict[str, Any]]


def build_inner_optimizer(
    model: torch.nn.Module, section: InnerOptimizerSection, kept: OptimizerState = "device"
) -> torch.optim.Optimizer:
    """Return the run's inner optimizer over a model's trainable parameters. `kept` names the place where the optimizer
    keeps its state between two steps.

    Each parameter group has its peak learning rate as `initial_lr`.

    Raises: ManifestError when torch has no such optimizer or option; MachineError when the optimizer cannot step on
    shards, or its state cannot be kept in this way.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer
    match section:
        case AdamWSection():
            optimizer = _adamw(trainable, section)
        case MuonSection():
            optimizer = _muon(model, trainable, section)
        case AdafactorSection():
            optimizer = torch.optim.Adafactor(
                _groups(trainable, section.weight_decay),
                lr=section.learning_rate,
                beta2_decay=section.beta2_decay,
                eps=(None, section.epsilon),
                d=section.clip_threshold,
            )
        case TorchSection():
            optimizer = _from_torch(trainable, section)
    if isinstance(optimizer, UNSHARDABLE) and any(isinstance(parameter, DTensor) for parameter in trainable):
        raise MachineError(
            f"torch cannot compute {type(optimizer).__name__} on a model that is sharded over several workers.",
            "Train with one worker, on one device.",
        )
    if kept == "8bit":
        _check_8bit(optimizer)
    if kept != "device":
        parts = optimizer.parts if isinstance(optimizer, _JointOptimizer) else [optimizer]
        packed = [PackedOptimizer(part, kept) for part in parts]
        optimizer = _JointOptimizer(packed) if len(packed) > 1 else packed[0]
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def steps_without_waiting(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if `step_if` works with this optimizer. It works only with torch's fused AdamW."""
    return type(optimizer) is torch.optim.AdamW and all(group["fused"] for group in optimizer.param_groups)


def step_if(optimizer: Any, is_wanted: torch.Tensor) -> None:
    """Take an optimizer step if `is_wanted`, a bool tensor on the device, is true; otherwise change nothing. The host
    does not wait for the tensor's value."""
    optimizer.found_inf = (~is_wanted).float()  # torch's attribute; if it is 1, fused kernels write nothing
    optimizer.step()
    del optimizer.found_inf


def check_inner_optimizer(section: InnerOptimizerSection, kept: OptimizerState = "device") -> None:
    """Raise ManifestError unless torch has this optimizer with these options, and MachineError unless this machine can
    keep its state in the place `kept`."""
    build_inner_optimizer(torch.nn.Linear(1, 1), section, kept)


def _groups(parameters: Sequence[torch.nn.Parameter], weight_decay: float, vectors_decay: bool = False) -> Groups:
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": weight_decay * vectors_decay},
    ]


def _adamw(parameters: Sequence[torch.nn.Parameter], settings: AdamWSettings) -> torch.optim.AdamW:
    groups = _groups(parameters, settings.weight_decay, settings.decays == "all")
    fused = all(parameter.device.type in FUSED_ON for parameter in parameters)
    rates: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.epsilon}
    return torch.optim.AdamW(groups, fused=fused or None, **rates)


def _muon(
    model: torch.nn.Module, trainable: Sequence[torch.nn.Parameter], section: MuonSection
) -> torch.optim.Optimizer:
    outer: list[Any] = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    output_embeddings = getattr(model, "get_output_embeddings", None)  # a method of transformers' models
    if output_embeddings is not None:
        outer.append(output_embeddings())
    not_hidden = {id(parameter) for module in outer for parameter in module.parameters()}
    hidden = [p for p in trainable if p.ndim == 2 and id(p) not in not_hidden]
    chosen = {id(p) for p in hidden}
    muon = torch.optim.Muon(
        hidden,
        lr=section.learning_rate,
        weight_decay=section.weight_decay,
        momentum=section.momentum,
        nesterov=section.nesterov,
        ns_steps=section.newton_schulz_steps,
        adjust_lr_fn=section.scale,
    )
    return _JointOptimizer([muon, _adamw([p for p in trainable if id(p) not in chosen], section.adamw)])


def _from_torch(parameters: Sequence[torch.nn.Parameter], section: TorchSection) -> torch.optim.Optimizer:
    kind = _optimizer_class(section.name)
    known = {name: option for name, option in inspect.signature(kind).parameters.items() if name not in RESERVED}
    for key, value in section.options.items():
        setting = printable(f"inner_optimizer.options.{key} = {value!r}")
        if key not in known:
            allowed = f"It has: {', '.join(known)}."
            raise ManifestError(f"{setting}: torch.optim.{section.name} has no such option for a run.", allowed)
        if not _fits(value, known[key].default):
            default = known[key].default
            raise ManifestError(f"{setting} has the wrong type.", f"Use the type of its default, {default!r}.")
    options: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in section.options.items()
    }
    groups = _groups(parameters, options["weight_decay"]) if "weight_decay" in options else list(parameters)
    try:
        return kind(groups, lr=section.learning_rate, **options)
    except (TypeError, ValueError) as error:
        cause = f"inner_optimizer: torch.optim.{section.name} refuses it: {first_line(error)}"
        raise ManifestError(cause, "Correct that value.") from error


def _optimizer_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return the class in torch.optim with this name. Raises: ManifestError for any other name, because the manifest's
    author may be a stranger."""
    known = {
        key: kind
        for key, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind not in UNUSABLE
    }
    if name not in known:
        raise ManifestError(
            f"inner_optimizer.name = {name!r} is no optimizer of torch.optim that a run can use.",
            f"Use one of: {', '.join(sorted(known))}.",
        )
    return known[name]


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, tuple):
        return isinstance(value, list) and len(value) == len(default) and all(_fits(each, 0.0) for each in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


class _JointOptimizer(torch.optim.Optimizer):
    """Joins several optimizers of disjoint parameters to one optimizer with all their parameter groups and state."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: Any = None) -> Any:
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Make the parts use this object's parameter groups and state instead of copies."""
        first = 0
        for part in self.parts:
            last = first + len(part.param_groups)
            part.param_groups, part.state, first = self.param_groups[first:last], self.state, last


# Packed state ---------------------------------------------------------------------------------------------------------
KEPT = "optimizer_state"
"""The key of a parameter group that names how the group's state is kept."""
LEAST_QUANTIZED = 4096
"""Number of values of the smallest moment that is kept in 8 bits, as in torchao and bitsandbytes."""
PAGE_VALUES = 1024
"""Number of values in a page of memory, 4 KiB."""


class _Packed(NamedTuple):
    """One tensor of an optimizer's state, stored between two steps as flat pieces that together hold this worker's
    part. `shape` is the shape of the whole tensor."""

    shape: torch.Size
    pieces: tuple[torch.Tensor, ...]

    @classmethod
    def like(cls, tensor: torch.Tensor, kept: OptimizerState, is_signed: bool) -> _Packed:
        """Allocate pieces for this worker's part of a tensor: in main memory if `kept` is "host", else on the tensor's
        device with 8 bits a value. Values are not initialised. They may be negative if `is_signed`."""
        count, device = local_part(tensor).numel(), tensor.device
        if kept == "host":
            is_pinned = device.type == "cuda"
            return cls(tensor.shape, tuple(torch.empty(size, pin_memory=is_pinned) for size in _powers_of_two(count)))
        from torchao.optim.subclass_8bit import OptimState8bit

        quantized = count - count % QUANTIZED_BLOCK if count >= LEAST_QUANTIZED else 0
        sizes = [min(QUANTIZED_AT_ONCE, quantized - start) for start in range(0, quantized, QUANTIZED_AT_ONCE)]
        pieces = [OptimState8bit.zeros((size,), is_signed, QUANTIZED_BLOCK, device) for size in sizes]
        return cls(tensor.shape, (*pieces, torch.empty(count - quantized, device=device)))

    def take(self, tensor: torch.Tensor) -> None:
        """Copy this worker's part of a tensor into `self.pieces`, the flat tensors that store it. The host does not
        wait for copies between a GPU and pinned memory."""
        for piece, values in self._beside(tensor):
            piece.copy_(values, non_blocking=True)

    def whole(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the values in `self.pieces` as one tensor on the device of `parameter`, sharded as that is."""
        tensor = torch.empty_like(parameter, requires_grad=False)
        for piece, values in self._beside(tensor):
            values.copy_(piece, non_blocking=True)
        return tensor

    def _beside(self, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor of `self.pieces`, with the part of `tensor` whose values belong in it."""
        yield from zip(self.pieces, local_part(tensor).view(-1).split([*map(len, self.pieces)]), strict=True)


def _powers_of_two(count: int) -> Iterator[int]:
    """Yield numbers of values that add up to `count`: powers of two, then a rest of less than a memory page.

    Torch rounds pinned memory of other sizes up to a power of two, which could take up to twice as much.
    """
    while count >= PAGE_VALUES:
        size = 1 << (count.bit_length() - 1)
        yield size
        count -= size
    if count:
        yield count


class PackedOptimizer(torch.optim.Optimizer):
    """A torch optimizer that packs its state between two steps: "host" keeps the state in main memory; "8bit" keeps
    AdamW's moments on the device with 8 bits a value, in torchao's format.

    Parameters step one by one on their device, each with its state unpacked. A step therefore needs memory for the
    state of the largest parameter. With "host" it gives the same bits as without packing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, kept: OptimizerState) -> None:
        self._optimizer = optimizer
        super().__init__(optimizer.param_groups, {KEPT: kept})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient, one after the other. `closure` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(group, parameter)

    def _step_one(self, group: dict[str, Any], parameter: torch.Tensor) -> None:
        packed, inner = self.state[parameter], self._optimizer
        whole = {key: _whole(value, parameter) for key, value in packed.items()}
        inner.param_groups, inner.state = [group | {"params": [parameter]}], defaultdict(dict, {parameter: whole})
        inner.step()
        for key, value in inner.state.pop(parameter).items():
            _keep(packed, key, value, parameter, group[KEPT])


def _whole(value: Any, parameter: torch.Tensor) -> Any:
    return value.whole(parameter) if isinstance(value, _Packed) else value


def _keep(state: dict[str, Any], key: str, value: Any, parameter: torch.Tensor, kept: OptimizerState) -> None:
    """Store a value in a parameter's state. If `kept` is "host" or "8bit" and the value is an fp32 tensor of the
    parameter's shape, it is packed; otherwise it is stored unchanged."""
    is_large = isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dtype == torch.float32
    if kept == "device" or not is_large:
        state[key] = value
        return
    if not isinstance(state.get(key), _Packed):
        state[key] = _Packed.like(value, kept, is_signed=key == "exp_avg")
    state[key].take(value)


def kept_state(optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Return the place where an optimizer's state is kept between two steps: "device", "host" or "8bit"."""
    kept: OptimizerState = optimizer.param_groups[0].get(KEPT, "device")
    return kept


def _check_8bit(optimizer: torch.optim.Optimizer) -> None:
    """Raise MachineError unless the optimizer is AdamW and torchao can be imported, because only torchao keeps moments
    in 8 bits a value, and only AdamW's."""
    if not isinstance(optimizer, torch.optim.AdamW):
        raise MachineError(
            "--optimizer-state 8bit: only AdamW's moments can be kept in 8 bits; the run has another inner optimizer.",
            "Use --optimizer-state host, which keeps any optimizer's state in main memory.",
        )
    try:
        import torchao.optim.subclass_8bit  # noqa: F401
    except Exception as error:  # a torchao built for another torch may raise any error
        raise MachineError(
            f"--optimizer-state 8bit: torchao cannot be imported: {first_line(error)}", INSTALL_TORCHAO
        ) from error


# State in files -------------------------------------------------------------------------------------------------------
def write_state(
    path: Path,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    shards: Shards,
    metadata: dict[str, str],
    has_room: bool = True,
) -> Callable[[], None]:
    """Return a function that writes an optimizer's state, as of this call, to a file. Each worker writes its rows of
    the sharded tensors, and the first worker writes all other tensors.

    Training may go on before and during the call. The file has its full length at once, and no digest yet. Unless main
    memory `has_room` for a copy of the state, the state is written now and the returned function does nothing.

    Raises: SnapshotError when there is no state, or a file cannot hold it; OSError. The returned function raises
    OSError.
    """
    tensors = _StateTensors(optimizer, parameters)
    if not tensors:
        raise SnapshotError(NO_STEP)
    layout = Layout(tensors.shapes)
    header = header_of(layout, metadata | {"format": FORMAT, "torch": _torch_version(), "digest": UNSEALED})
    ways = list(_ways(layout, parameters, shards, reads=False))
    if not has_room:
        flat = _created(path, header, layout, shards.rank)
        for way in ways:
            way.store(tensors, flat)
        return lambda: None
    copied: Vector = np.empty(layout.size, np.float32)  # unwritten pages (other workers' rows) use no memory
    for way in ways:
        way.store(tensors, copied)
    parts = [part for way in ways for part in way.slices()]

    def write() -> None:
        flat = _created(path, header, layout, shards.rank)
        for part in parts:
            flat[part] = copied[part]

    return write


def read_state(
    path: Path,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    shards: Shards,
    metadata: dict[str, str],
) -> Mapping[str, str]:
    """Load an optimizer's state from a file, whose metadata must include `metadata`. Return all metadata of the file.

    Raises: SnapshotError, without a change, when the file is of another optimizer or model; OSError.
    """
    try:
        with path.open("rb") as file:
            found, layout, start = read_header(file)
    except ValueError as error:
        raise SnapshotError(str(error)) from error
    for key, wanted in (metadata | {"format": FORMAT, "torch": _torch_version()}).items():
        if found.get(key) != wanted:
            raise SnapshotError(f"its {key} is {found.get(key)!r}, not {wanted!r}")
    for tensor in layout:
        name = tensor.name.rpartition("/")[0]
        if name not in parameters or len(tensor.shape) > parameters[name].ndim:
            raise SnapshotError(f"it has {tensor.name!r} of shape {tensor.shape}, which no parameter here can have")
    flat = _mapped(path, start, layout, "c")  # copy-on-write, because torch requires writable memory
    group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    optimizer.zero_grad(set_to_none=True)
    optimizer.state.clear()
    for tensor in layout:
        name, _, key = tensor.name.rpartition("/")
        parameter, group = parameters[name], group_of[id(parameters[name])]
        if tensor.shape == tuple(parameter.shape):
            value = torch.empty_like(parameter, requires_grad=False)
        else:  # torch keeps the step count in main memory, except for fused and capturable optimizers
            is_counted = key != "step" or group.get("fused") or group.get("capturable")
            value = torch.empty(tensor.shape, device=parameter.device if is_counted else "cpu")
        for way in _ways(layout.part({tensor.name}), parameters, shards, reads=True):
            way.load(flat, {tensor.name: value})
        _keep(optimizer.state[parameter], key, value, parameter, kept_state(optimizer))
    return found


class _StateTensors(Mapping[str, torch.Tensor]):
    """A mapping from names in a file to the tensors of an optimizer's state. A packed tensor is unpacked on each
    access, to save memory."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._values: dict[str, torch.Tensor | _Packed] = {}
        for name, parameter in parameters.items():
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if value is not None:
                    _check_kept(key, value, parameter)
                    self._values[f"{name}/{key}"] = value

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(value.shape)) for name, value in self._values.items()]

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = _whole(self._values[name], self._parameters[name.rpartition("/")[0]])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _check_kept(key: str, value: object, parameter: torch.Tensor) -> None:
    """Raise SnapshotError when a file cannot hold this value of an optimizer's state."""
    if isinstance(value, _Packed):
        return
    is_part = isinstance(value, DTensor) and value.shape != parameter.shape
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or is_part:
        raise SnapshotError(f"its inner optimizer's {key} is a {type(value).__name__}, which no file can hold")


def _ways(layout: Layout, parameters: Mapping[str, torch.Tensor], own: Shards, reads: bool) -> Iterator[Shards]:
    """Yield the `Shards` that copy the tensors in `layout` to or from a file: one for the tensors that are sharded as
    their parameters are, then one for all others.

    The others are the same on all workers, so only the first worker writes them.
    """
    cut = set()
    for tensor in layout:
        parameter = parameters[tensor.name.rpartition("/")[0]]
        if isinstance(parameter, DTensor) and tensor.shape == tuple(parameter.shape):
            cut.add(tensor.name)
    yield own.of(layout.part(cut))
    if reads or own.rank == 0:
        yield Shards(layout.part({tensor.name for tensor in layout} - cut), staging=own.staging)


def _created(path: Path, header: bytes, layout: Layout, rank: int) -> Vector:
    """Create a file with space for all values, unless another worker has already created it. Return its values as a
    writable memory map."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, len(header) + VALUE_BYTES * layout.size)
        if rank == 0:
            os.pwrite(descriptor, header, 0)
    finally:
        os.close(descriptor)
    return _mapped(path, len(header), layout, "r+")


def _mapped(path: Path, start: int, layout: Layout, mode: Any) -> Vector:
    values: Vector = np.memmap(path, np.float32, mode, start, (layout.size,))
    return values


def _torch_version() -> str:
    """Return torch's major and minor version, on which the tensor names in its optimizers' state depend."""
    return ".".join(torch.__version__.split(".")[:2])
