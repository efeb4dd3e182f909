"""A model's parameters in flat vectors: the fragments in which they are averaged, and each worker's part of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from opendiloco.config.run_config import StreamingSection
from opendiloco.model.layout import Layout, Parameter
from opendiloco.shared_memory import Vector
from peers.errors import ManifestError

PLAIN = StreamingSection()


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the model's trained parameters by name. Tied parameters occur once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def is_all_trained(model: torch.nn.Module) -> bool:
    """Return True if all parameters of the model are trained, so that theta contains all of them."""
    return all(parameter.requires_grad for parameter in model.parameters())


def multiplied_weights(model: Any) -> int:
    """Return the number of trained weights by which each token is multiplied: those of matrices, except embeddings that
    are only looked up. An embedding that is tied to the head counts once."""
    head = model.get_output_embeddings()
    looked_up = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) and (head is None or module.weight is not head.weight)
    }
    trained = trainable(model).values()
    return sum(each.numel() for each in trained if each.ndim > 1 and id(each) not in looked_up)


def layout_of(model: torch.nn.Module, streaming: StreamingSection = PLAIN) -> Layout:
    """Return the layout of the model's trainable parameters in the run's fragments. Raises: ManifestError if the
    fragments' sizes differ from those in the run's settings, or as `_assign_fragments` does."""
    trained = trainable(model)
    shapes = [(name, tuple(parameter.shape)) for name, parameter in trained.items()]
    layout = Layout(shapes, _assign_fragments(model, trained, streaming))
    sizes = tuple(part.stop - part.start for part in layout.fragments)
    if streaming.sizes not in (None, sizes):
        raise ManifestError(
            f"streaming.sizes: the run's fragments have {streaming.sizes} values, those of its model here {sizes}.",
            "Use the version of transformers that other peers use. To create a run, remove streaming.sizes.",
        )
    return layout


def transformer_blocks(model: Any) -> list[Any]:
    """Return the model's transformer blocks: the members of its module lists that transformers would not split between
    devices. Sharding, which replaces each block's class by a subclass, does not change the result."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return [block for blocks in lists for block in blocks if names & {kind.__name__ for kind in type(block).__mro__}]


# Fragments ------------------------------------------------------------------------------------------------------------
# A fragment has the parameters that are averaged together (Streaming DiLoCo, arXiv 2501.18512, section 2.2).
#
# With n blocks in a fragment, L blocks make P = ceil(L / n) fragments. The paper's 24, 48 and 108 blocks with n = 3
# make 8, 16 and 36 fragments. The patterns:
#
# - "strided", the paper's default: fragment p has the blocks p, p + P, p + 2P …
# - "sequential", from the paper: fragment p has the n consecutive blocks from n·p on.
# - "balanced", not from the paper: there are P fragments. From the largest tensor to the smallest, embeddings included,
#   each goes to the fragment that is smallest so far.
#
# The parameters outside of the blocks, except with "balanced":
#
# - "apart", the default: they are a fragment of their own, the last one. The paper shows the embeddings as a fragment
#   (figure 17). In an outer step of 100 inner steps, its three models synchronise a fragment every 11, 5 and 2 inner
#   steps (appendix). This fits 9, 17 and 37 fragments: those of the blocks and one more. The paper does not place the
#   head and the last norm. They go with the embeddings, so that tied weights stay together.
# - "ends", not from the paper: those before the blocks go with the first fragment, those after the blocks with the
#   last.
#
# Fragments are numbered in the order in which a cycle averages them. Parameters that are not trained are in no
# fragment, and a fragment without trained parameters does not exist.


def _assign_fragments(
    model: torch.nn.Module, trained: Mapping[str, torch.nn.Parameter], streaming: StreamingSection
) -> tuple[int, ...]:
    """Return the fragment's number for each trained parameter. Raises: ManifestError if the settings ask for fragments
    and the model has no transformer blocks."""
    layers, parameters = streaming.layers_per_fragment, list(trained.values())
    if layers is None:
        return (0,) * len(parameters)
    blocks = [list(block.parameters()) for block in transformer_blocks(model)]
    if not blocks:
        raise ManifestError(
            "streaming.layers_per_fragment: this model has no transformer blocks that can be distinguished.",
            "Remove the table [streaming].",
        )
    fragments = math.ceil(len(blocks) / layers)
    if streaming.pattern == "balanced":
        return _numbered(_balanced([parameter.numel() for parameter in parameters], fragments))
    of_block = {id(parameter): number for number, block in enumerate(blocks) for parameter in block}
    places = [of_block.get(id(parameter)) for parameter in parameters]
    is_strided, is_apart = streaming.pattern == "strided", streaming.embeddings != "ends"
    numbers, before = [], True
    for block in places:
        before = before and block is None
        if block is not None:
            numbers.append(block % fragments if is_strided else block // layers)
        else:
            numbers.append(fragments if is_apart else 0 if before else fragments - 1)
    return _numbered(numbers)


def _balanced(sizes: Sequence[int], fragments: int) -> list[int]:
    """Return a fragment's number for each tensor. From the largest tensor to the smallest, each goes to the fragment
    that is smallest so far. Tensors of one size keep the model's order."""
    filled, numbers = [0] * fragments, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        numbers[place] = filled.index(min(filled))
        filled[numbers[place]] += sizes[place]
    return numbers


def _numbered(numbers: Sequence[int]) -> tuple[int, ...]:
    """Return the fragment numbers, changed to 0, 1, 2, … in the same order, so that no number is missing."""
    present = sorted(set(numbers))
    return tuple(present.index(number) for number in numbers)


# Each worker's part of the parameters ---------------------------------------------------------------------------------
# FSDP2 cuts tensors along their first dimension, as `torch.chunk` does. So a worker's part of a parameter is one
# consecutive slice of the flat vector, and each worker copies its own slice without gathering the whole tensor. The
# same is true of other tensors with the parameters' shapes, such as an optimizer's moments.

STAGED_VALUES = 2**24
"""Length of the pinned buffer between a GPU and unpinned memory."""


class Shards:
    """The parts of all parameters that worker `rank` of `workers` stores. With a `staging` buffer (fp32, one
    dimension), values are copied through that buffer between a GPU and unpinned memory, because direct copies are
    slow."""

    def __init__(self, layout: Layout, rank: int = 0, workers: int = 1, staging: torch.Tensor | None = None) -> None:
        self._layout = layout
        self.rank = rank
        self.staging = staging
        self._workers = workers

    def of(self, layout: Layout) -> Shards:
        """Return the same worker's parts of the parameters in another layout."""
        return Shards(layout, self.rank, self._workers, self.staging)

    def slice_of(self, parameter: Parameter) -> slice:
        """Return the slice of the flat vector that is this worker's part of a parameter; the slice may be empty."""
        if self._workers == 1:
            return parameter.slice
        rows = shard_rows(parameter.shape[0], self.rank, self._workers)
        row_size = math.prod(parameter.shape[1:])
        return slice(parameter.offset + rows.start * row_size, parameter.offset + rows.stop * row_size)

    def slices(self) -> list[slice]:
        """Return, for each parameter, the slice of the flat vector that is this worker's part."""
        return [self.slice_of(parameter) for parameter in self._layout]

    @torch.no_grad()
    def load(self, flat: Vector, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy this worker's parts of a flat vector into tensors with the parameters' names and shapes: whole tensors,
        or DTensors."""
        with self._stage_for(flat) as stage:
            for values, own in self._pairs(flat, tensors):
                own.copy_(values if stage is None else stage[: len(values)].copy_(values), non_blocking=stage is None)

    @torch.no_grad()
    def store(self, tensors: Mapping[str, torch.Tensor], flat: Vector) -> None:
        """Copy this worker's parts of tensors, which are given by parameter name, into a flat vector."""
        with self._stage_for(flat) as stage:
            for values, own in self._pairs(flat, tensors):
                values.copy_(own if stage is None else stage[: len(values)].copy_(own), non_blocking=stage is None)

    @torch.no_grad()
    def merge(self, flat: Vector, tensors: Mapping[str, torch.Tensor], alpha: float) -> None:
        """Set the tensors to alpha * tensors + (1 - alpha) * flat, in this worker's parts, as the function `merge`
        does."""
        with self._stage_for(flat) as stage:
            for values, own in self._pairs(flat, tensors):
                staged = values if stage is None else stage[: len(values)].copy_(values)
                merge(own, staged.to(own.device, non_blocking=stage is None), alpha)

    @contextmanager
    def _stage_for(self, flat: Vector) -> Iterator[torch.Tensor | None]:
        """Yield the staging buffer if copies to or from `flat` must use it, else None. Copies have finished when the
        context ends."""
        if self.staging is None or not _is_pinned(flat):
            yield self.staging
            return
        try:
            yield None
        finally:
            _wait_for_gpu()

    def _pairs(self, flat: Vector, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs of views of the same shape, one of the vector and one of a tensor. No view is longer than the
        staging buffer."""
        for parameter in self._layout:
            values = torch.from_numpy(flat[self.slice_of(parameter)])
            own = local_part(tensors[parameter.name])
            if self.staging is None:
                yield values.view(own.shape), own
            else:
                yield from zip(values.split(len(self.staging)), own.view(-1).split(len(self.staging)), strict=True)


_pinned: list[Vector] = []  # references that keep pinned memory mapped


def pin(memory: Vector, device: torch.device) -> None:
    """Pin memory for copies to a GPU, for the life of the process. If the driver refuses, copies use staging
    buffers."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
        _pinned.append(memory)
    except RuntimeError:
        with suppress(RuntimeError):  # the next line clears CUDA's error, which a later call would otherwise raise
            torch.zeros(1, device=device)


def _is_pinned(flat: Vector) -> bool:
    return torch.from_numpy(flat).is_pinned()


def _wait_for_gpu() -> None:
    torch.cuda.current_stream().synchronize()


def shard_rows(rows: int, rank: int, workers: int) -> slice:
    """Return the slice of rows that FSDP2 gives to worker `rank` of a tensor with `rows` rows. The last workers may
    have fewer rows, or none."""
    share = math.ceil(rows / workers)
    return slice(min(rows, share * rank), min(rows, share * (rank + 1)))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this worker's part of a sharded tensor, without a copy; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# Merging --------------------------------------------------------------------------------------------------------------
# The averaged theta is merged into weights that were trained during the averaging: line 21 of Algorithm 2 (arXiv
# 2501.18512).
#
#     local = alpha * local + (1 - alpha) * theta
#
# Two products and a sum, each rounded to fp32: numpy and torch give the same bits on CPUs and GPUs, because no product
# is fused with the sum.

Values = TypeVar("Values", Vector, "torch.Tensor")


def merge(local: Values, theta: Values, alpha: float) -> None:
    """Set `local` to alpha * local + (1 - alpha) * theta, in place, for fp32 values of one shape on one device. With
    alpha = 0 the result is theta bit for bit, including the signs of zeros; with alpha = 1 `local` does not change."""
    if alpha == 0:
        local[...] = theta
    elif alpha < 1:
        local *= alpha
        local += theta * (1 - alpha)
