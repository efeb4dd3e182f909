"""A torch optimizer's state, to and from the files in which a machine keeps its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from opendiloco.model.layout import Layout, Parameter
from opendiloco.model.parameters import Shards
from opendiloco.shared_memory import Vector
from opendiloco.training.moments_file import FORMAT, UNSEALED, VALUE_BYTES, header_of, read_header
from peers.values.workload import SnapshotError


def write_state(
    path: Path,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    shards: Shards,
    metadata: dict[str, str],
) -> None:
    """Write an optimizer's state into a file: each worker its rows, the first all else. The file has its whole length
    and room at once, and no digest yet.

    Raises: SnapshotError when there is nothing to keep, or what a file cannot hold; OSError.
    """
    tensors = dict(_tensors(optimizer, parameters))
    if not tensors:
        raise SnapshotError("its inner optimizer has not made a step")
    layout = Layout([(name, tuple(tensor.shape)) for name, tensor in tensors.items()])
    header = header_of(layout, metadata | {"format": FORMAT, "torch": _torch_version(), "digest": UNSEALED})
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, len(header) + VALUE_BYTES * layout.size)
        if shards.rank == 0:
            os.pwrite(descriptor, header, 0)
    finally:
        os.close(descriptor)
    flat = _mapped(path, len(header), layout, "r+")
    for way in _ways(layout, parameters, shards, reads=False):
        way.store(tensors, flat)


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
    for tensor in layout:
        name, _, _ = tensor.name.rpartition("/")
        if name not in parameters or len(tensor.shape) > parameters[name].ndim:
            raise SnapshotError(f"it has {tensor.name!r} of shape {tensor.shape}, which no parameter here can have")
    state: dict[str, dict[str, torch.Tensor]] = {}
    tensors = {}
    for tensor in layout:
        name, _, key = tensor.name.rpartition("/")
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
    cut = {tensor.name for tensor in layout if _is_cut(tensor, parameters[tensor.name.rpartition("/")[0]])}
    yield own.of(layout.part(cut))
    if reads or own.rank == 0:
        yield Shards(layout.part({tensor.name for tensor in layout} - cut), staging=own.staging)


def _is_cut(tensor: Parameter, parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and tensor.shape == tuple(parameter.shape)


def _mapped(path: Path, start: int, layout: Layout, mode: Any) -> Vector:
    values: Vector = np.memmap(path, np.float32, mode, start, (layout.size,))
    return values


def _torch_version() -> str:
    """Return what decides how torch names its optimizers' state."""
    return ".".join(torch.__version__.split(".")[:2])
