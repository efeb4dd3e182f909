"""The inner optimizers, as torch has them, and their state to and from the files in which a machine keeps its own.

Where a replica is sharded (its parameters are DTensors), all work but Adafactor and Rprop, which torch cannot compute
on shards. The others step value by value, apart from Muon: it orthogonalizes whole matrices, which torch gathers for
that at each of its products, so that it agrees with an unsharded replica up to the rounding of bfloat16.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from opendiloco.model.layout import Layout
from opendiloco.model.parameters import Shards
from opendiloco.quantities import VALUE_BYTES
from opendiloco.shared_memory import Vector, available_memory
from opendiloco.training.moments_file import FORMAT, NO_STEP, UNSEALED, header_of, read_header
from peers.errors import ManifestError
from peers.values.wire import printable
from peers.values.workload import SnapshotError

# LBFGS wants the loss again and again, SparseAdam sparse gradients, Muon matrices only.
UNUSABLE = frozenset({torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Muon})
UNSHARDABLE = (torch.optim.Adafactor, torch.optim.Rprop)
# Given elsewhere in run.toml, or about how this machine computes instead of what.
RESERVED = frozenset({"params", "lr", "foreach", "fused", "capturable", "differentiable", "maximize"})

FUSED_ON = {"cuda"}
"""Devices on which AdamW makes its step in one kernel. The others' steps take memory for themselves: on the CPU for one
parameter at a time; on a GPU, where torch would step all parameters together, for a whole copy of them."""

ROOM_OF_COPY = 2
"""Times the bytes of a copy of the state, which are to be free before it is made: the peer process takes some, too."""

Groups = list[dict[str, Any]]


def build_inner_optimizer(model: torch.nn.Module, section: InnerOptimizerSection) -> torch.optim.Optimizer:
    """Return the optimizer over the trainable parameters. Each group has its peak learning rate as `initial_lr`.

    Raises: ManifestError when torch knows no such optimizer or option; MachineError when it cannot step on shards.
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
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def steps_without_waiting(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step_if` can have this optimizer leave a step out. torch's fused AdamW can."""
    return type(optimizer) is torch.optim.AdamW and all(group["fused"] for group in optimizer.param_groups)


def step_if(optimizer: Any, is_wanted: torch.Tensor) -> None:
    """Take a step, which changes nothing unless `is_wanted`: a bool on the device, for which the host does not wait."""
    optimizer.found_inf = (~is_wanted).float()  # torch's name for it: with a 1, fused kernels write nothing
    optimizer.step()
    del optimizer.found_inf


def check_inner_optimizer(section: InnerOptimizerSection) -> None:
    """Raise ManifestError unless torch has this optimizer with these options."""
    build_inner_optimizer(torch.nn.Linear(1, 1), section)


def _groups(parameters: Sequence[torch.nn.Parameter], weight_decay: float, vectors_decay: bool = False) -> Groups:
    """Return two groups: parameters with two or more dimensions, which decay, and vectors, which do if told so."""
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
    output_embeddings = getattr(model, "get_output_embeddings", None)  # as models of transformers have it
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
        said = printable(f"inner_optimizer.options.{key} = {value!r}")
        if key not in known:
            allowed = f"It has: {', '.join(known)}."
            raise ManifestError(f"{said}: torch.optim.{section.name} has no such option for a run.", allowed)
        if not _fits(value, known[key].default):
            raise ManifestError(f"{said}: not of the right kind.", f"Its default is {known[key].default!r}.")
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
    """Only what torch.optim itself has: a manifest's author is a stranger, and names no code of their choice."""
    known = {
        key: kind
        for key, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind not in UNUSABLE
    }
    if name not in known:
        raise ManifestError(
            f"inner_optimizer.name = {name!r}: no optimizer of torch.optim that a run can use.",
            f"Use one of: {', '.join(sorted(known))}.",
        )
    return known[name]


def _fits(value: Any, default: Any) -> bool:
    """Return whether a value from TOML is of the kind that an option's default is."""
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, tuple):
        return isinstance(value, list) and len(value) == len(default) and all(_fits(each, 0.0) for each in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


class _JointOptimizer(torch.optim.Optimizer):
    """Several optimizers of disjoint parameters as one, which has the groups and the state of all of them."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: Any = None) -> Any:
        """One step of each. A closure is not called."""
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Have the parts look at our groups and our state, not at copies."""
        first = 0
        for part in self._parts:
            last = first + len(part.param_groups)
            part.param_groups, part.state, first = self.param_groups[first:last], self.state, last


# State in files -------------------------------------------------------------------------------------------------------
def write_state(
    path: Path,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    shards: Shards,
    metadata: dict[str, str],
) -> Callable[[], None]:
    """Return a function that writes an optimizer's present state into a file: each worker its rows, the first all else.
    Training may go on before it is called, and beside it. The file has its whole length and room at once, and no digest
    yet. Where main memory has no room for a copy of the state, it is written now, and nothing is left to do.

    Raises: SnapshotError when there is nothing to keep, or what a file cannot hold; OSError. So does the function.
    """
    tensors = dict(_tensors(optimizer, parameters))
    if not tensors:
        raise SnapshotError(NO_STEP)
    layout = Layout([(name, tuple(tensor.shape)) for name, tensor in tensors.items()])
    header = header_of(layout, metadata | {"format": FORMAT, "torch": _torch_version(), "digest": UNSEALED})
    ways = list(_ways(layout, parameters, shards, reads=False))
    if ROOM_OF_COPY * VALUE_BYTES * layout.size > available_memory():
        flat = _created(path, header, layout, shards.rank)
        for way in ways:
            way.store(tensors, flat)
        return lambda: None
    copied: Vector = np.empty(
        layout.size, np.float32
    )  # takes memory where something is written, for this worker's rows
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
    """Have an optimizer go on with what a file has, which must say `metadata` of itself. Returns all that it says.

    Raises: SnapshotError, and changes nothing, when it is of another optimizer, or of another model; OSError.
    """
    try:
        with path.open("rb") as file:
            said, layout, start = read_header(file)
    except ValueError as error:
        raise SnapshotError(str(error)) from error
    for key, wanted in (metadata | {"format": FORMAT, "torch": _torch_version()}).items():
        if said.get(key) != wanted:
            raise SnapshotError(f"its {key} is {said.get(key)!r}, not {wanted!r}")
    state: dict[str, dict[str, torch.Tensor]] = {}
    tensors = {}
    for tensor in layout:
        name, _, key = tensor.name.rpartition("/")
        if name not in parameters or len(tensor.shape) > parameters[name].ndim:
            raise SnapshotError(f"it has {tensor.name!r} of shape {tensor.shape}, which no parameter here can have")
        like = parameters[name]
        made = torch.empty_like(like) if tensor.shape == tuple(like.shape) else torch.empty(tensor.shape)
        state.setdefault(name, {})[key] = tensors[tensor.name] = made
    flat = _mapped(path, start, layout, "c")  # torch wants memory that could be written to
    for way in _ways(layout, parameters, shards, reads=True):
        way.load(flat, tensors)
    places = {id(one): place for place, one in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    by_place = {places[id(parameters[name])]: values for name, values in state.items()}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.zero_grad(set_to_none=True)
    optimizer.load_state_dict({"state": by_place, "param_groups": groups})
    return said


def _tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what the optimizer knows of each parameter. Raises: SnapshotError when a file cannot hold it."""
    for name, parameter in parameters.items():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if value is None:
                continue
            is_part = isinstance(value, DTensor) and value.shape != parameter.shape
            if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or is_part:
                raise SnapshotError(f"its inner optimizer's {key} is a {type(value).__name__}, which cannot be kept")
            yield f"{name}/{key}", value


def _ways(layout: Layout, parameters: Mapping[str, torch.Tensor], own: Shards, reads: bool) -> Iterator[Shards]:
    """Yield the ways of tensors to or from the file: of those that are cut as parameters are, and of the others, which
    are the same on all workers, so that the first alone writes them."""
    cut = set()
    for tensor in layout:
        parameter = parameters[tensor.name.rpartition("/")[0]]
        if isinstance(parameter, DTensor) and tensor.shape == tuple(parameter.shape):
            cut.add(tensor.name)
    yield own.of(layout.part(cut))
    if reads or own.rank == 0:
        yield Shards(layout.part({tensor.name for tensor in layout} - cut), staging=own.staging)


def _created(path: Path, header: bytes, layout: Layout, rank: int) -> Vector:
    """Return the values of a new file, or of one that another worker has made."""
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
    """Return what decides how torch names its optimizers' state."""
    return ".".join(torch.__version__.split(".")[:2])
