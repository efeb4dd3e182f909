"""A torch optimizer's state, to and from the files in which a machine keeps its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from opendiloco.inner.moments_file import FORMAT, UNSEALED, VALUE_BYTES, header_of, read_header
from opendiloco.model.layout import Layout, Parameter
from opendiloco.model.shards import Shards
from opendiloco.shared_memory import Vector
from peers.values.workload import SnapshotError

ByteRanges: TypeAlias = tuple[tuple[int, int], ...]


def write_state(
    path: Path,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    shards: Shards,
    metadata: dict[str, str],
    reserves: bool = True,
) -> ByteRanges:
    """Write an optimizer's state into a file: each worker its rows, the first all else. The file has its whole length
    at once, with `reserves` also the room for it, and no digest yet. Returns which bytes this worker has written, but
    for the first's header.

    Raises: SnapshotError when there is nothing to keep, or what a file cannot hold; OSError.
    """
    tensors = dict(_tensors(optimizer, parameters))
    if not tensors:
        raise SnapshotError("its inner optimizer has not made a step")
    layout = Layout([(name, tuple(tensor.shape)) for name, tensor in tensors.items()])
    header = header_of(layout, metadata | {"format": FORMAT, "torch": _torch_version(), "digest": UNSEALED})
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        size = len(header) + VALUE_BYTES * layout.size
        if reserves:
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.ftruncate(descriptor, size)
        if shards.rank == 0:
            os.pwrite(descriptor, header, 0)
    finally:
        os.close(descriptor)
    flat = _mapped(path, len(header), layout, "r+")
    ways = list(_ways(layout, parameters, shards, reads=False))
    for way in ways:
        way.store(tensors, flat)
    return tuple(chain.from_iterable(way.byte_ranges(len(header)) for way in ways))


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
    said, layout, start = _read_fitting_header(path, parameters, metadata)
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


def parts_to_read(
    path: Path, parameters: Mapping[str, torch.Tensor], shards: Shards, metadata: dict[str, str]
) -> ByteRanges:
    """Return which bytes `read_state` reads of a file, beside its header, which must be there. Raises: as it does."""
    _, layout, start = _read_fitting_header(path, parameters, metadata)
    ways = _ways(layout, parameters, shards, reads=True)
    return tuple(chain.from_iterable(way.byte_ranges(start) for way in ways))


def _read_fitting_header(
    path: Path, parameters: Mapping[str, torch.Tensor], metadata: dict[str, str]
) -> tuple[dict[str, str], Layout, int]:
    """Return what `read_header` does, of a file for these parameters. Raises: SnapshotError; OSError."""
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
    return said, layout, start


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
