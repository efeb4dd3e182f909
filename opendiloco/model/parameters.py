"""A model's parameters in flat vectors: in which fragments they are averaged, and which part a worker has of each."""

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
    """Those that are trained, by name; tied ones once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def is_all_trained(model: torch.nn.Module) -> bool:
    """Whether theta has all of the model's parameters."""
    return all(parameter.requires_grad for parameter in model.parameters())


def multiplied_weights(model: Any) -> int:
    """Return how many trained weights are multiplied with each token: those of matrices, without embeddings that are
    looked up only. A tied embedding is the head's matrix, too, and counts once."""
    head = model.get_output_embeddings()
    looked_up = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) and (head is None or module.weight is not head.weight)
    }
    trained = trainable(model).values()
    return sum(each.numel() for each in trained if each.ndim > 1 and id(each) not in looked_up)


def layout_of(model: torch.nn.Module, streaming: StreamingSection = PLAIN) -> Layout:
    """The model's trainable parameters as a `Layout`, in the fragments of a run.

    Raises: ManifestError when these are not as large as the run says; see also `_assign_fragments`.
    """
    trained = trainable(model)
    shapes = [(name, tuple(parameter.shape)) for name, parameter in trained.items()]
    layout = Layout(shapes, _assign_fragments(model, trained, streaming))
    sizes = tuple(part.stop - part.start for part in layout.fragments)
    if streaming.sizes not in (None, sizes):
        raise ManifestError(
            f"streaming.sizes: the run's fragments have {streaming.sizes} values, those of its model here {sizes}.",
            "Compare the version of transformers with other peers'. Who creates a run leaves `sizes` out.",
        )
    return layout


def transformer_blocks(model: Any) -> list[Any]:
    """Return the members of the model's lists of layers that transformers, too, would keep on one device.

    They are the same before and after sharding, which makes each block's class a subclass of what it was.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return [block for blocks in lists for block in blocks if names & {kind.__name__ for kind in type(block).__mro__}]


# Fragments ------------------------------------------------------------------------------------------------------------
# Which parameters are synchronised together: the fragments of Streaming DiLoCo (arXiv 2501.18512, section 2.2).
#
# With n blocks to a fragment, L blocks make ceil(L / n) fragments (the paper's 24, 48 and 108 blocks with n = 3 make 8,
# 16 and 36). What the paper says, and what is ours:
#
# - "strided", its default: fragment p has the blocks p, p + P, p + 2P …, P being the number of the blocks' fragments.
# - "sequential": fragment p has the n consecutive blocks from n·p on.
# - "balanced" is ours: whole tensors, embeddings among them, are dealt out by size, the largest first, each to the
#   fragment that is smallest so far. So many fragments as there would be of blocks.
# - Embeddings: the paper shows "all fragments but the embedding" and the "embedding fragment" apart (figure 17), and
#   synchronises some fragment every 11, 5 and 2 of 100 inner steps (appendix), which is 100 / 9, 100 / 17 and 100 / 37,
#   one fragment more than those of blocks. So "apart" is the default. It does not say where the head and the last norm
#   are. Here they go with the embeddings, which also keeps tied ones together. This fragment is the last.
# - "ends" is ours: what comes before the blocks goes with their first fragment, what comes after them with the last.
#
# Fragments are numbered as they are synchronised within a cycle; the last one closes it. What is not trained is in
# none, and a fragment of which nothing is trained does not exist.


def _assign_fragments(
    model: torch.nn.Module, trained: Mapping[str, torch.nn.Parameter], streaming: StreamingSection
) -> tuple[int, ...]:
    """Return the fragment of each trained parameter. Raises: ManifestError when the model has no blocks to cut."""
    layers, parameters = streaming.layers_per_fragment, list(trained.values())
    if layers is None:
        return (0,) * len(parameters)
    blocks = [list(block.parameters()) for block in transformer_blocks(model)]
    if not blocks:
        raise ManifestError(
            "streaming.layers_per_fragment: this model has no transformer blocks that can be told apart.",
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
    """Deal tensors out, the largest first, each to the smallest fragment; the model's order breaks ties."""
    filled, numbers = [0] * fragments, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        numbers[place] = filled.index(min(filled))
        filled[numbers[place]] += sizes[place]
    return numbers


def _numbered(numbers: Sequence[int]) -> tuple[int, ...]:
    """Number fragments without gaps, in the same order."""
    present = sorted(set(numbers))
    return tuple(present.index(number) for number in numbers)


# Shards ---------------------------------------------------------------------------------------------------------------
# Each worker's part of the parameters, and the way between it and flat vectors.
#
# FSDP2 cuts tensors along their first dimension, in pieces as `torch.chunk` makes them. A worker's part of a
# parameter is thus one consecutive slice of the flat vector, and each worker copies its own: nothing is gathered.
# That holds for anything shaped like the parameters, an optimizer's moments for example.

STAGED_VALUES = 2**24
"""Length of the pinned buffer between a GPU and memory that is not pinned."""


class Shards:
    """Worker `rank`'s part of each parameter, where `workers` share them.

    With a `staging` buffer (fp32, of one dimension) values pass through it between a GPU and memory that is not pinned:
    to and from that, copies are slow.
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

    def slices(self) -> list[slice]:
        """Return where this worker's parts of all parameters lie in a flat vector."""
        return [self.slice_of(parameter) for parameter in self._layout]

    @torch.no_grad()
    def load(self, flat: Vector, tensors: Mapping[str, torch.Tensor]) -> None:
        """flat → tensors, which have the parameters' names and shapes: whole tensors, or this worker's DTensors."""
        with self._stage_for(flat) as stage:
            for values, own in self._pairs(flat, tensors):
                own.copy_(values if stage is None else stage[: len(values)].copy_(values), non_blocking=stage is None)

    @torch.no_grad()
    def store(self, tensors: Mapping[str, torch.Tensor], flat: Vector) -> None:
        """tensors → flat: this worker's part of it, and nothing else."""
        with self._stage_for(flat) as stage:
            for values, own in self._pairs(flat, tensors):
                values.copy_(own if stage is None else stage[: len(values)].copy_(own), non_blocking=stage is None)

    @torch.no_grad()
    def merge(self, flat: Vector, tensors: Mapping[str, torch.Tensor], alpha: float) -> None:
        """Merge flat into tensors, which keep a share of `alpha`, as `merge` does."""
        with self._stage_for(flat) as stage:
            for values, own in self._pairs(flat, tensors):
                staged = values if stage is None else stage[: len(values)].copy_(values)
                merge(own, staged.to(own.device, non_blocking=stage is None), alpha)

    @contextmanager
    def _stage_for(self, flat: Vector) -> Iterator[torch.Tensor | None]:
        """Yield the buffer through which values have to pass; None where they need none. Copies are done in the end."""
        if self.staging is None or not _is_pinned(flat):
            yield self.staging
            return
        try:
            yield None
        finally:
            _wait_for_gpu()

    def _pairs(self, flat: Vector, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the vector and of the tensors, of one shape each; none longer than the staging buffer."""
        for parameter in self._layout:
            values = torch.from_numpy(flat[self.slice_of(parameter)])
            own = local_part(tensors[parameter.name])
            if self.staging is None:
                yield values.view(own.shape), own
            else:
                yield from zip(values.split(len(self.staging)), own.view(-1).split(len(self.staging)), strict=True)


_pinned: list[Vector] = []  # so that none of it is ever unmapped


def pin(memory: Vector, device: torch.device) -> None:
    """Let a GPU read and write this memory by itself, which stays mapped for as long as the process lives. Where the
    driver refuses, nothing changes, and values pass through staging buffers."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
        _pinned.append(memory)
    except RuntimeError:
        with suppress(RuntimeError):  # CUDA also keeps the error for the next kernel's launch, which would fail
            torch.zeros(1, device=device)


def _is_pinned(flat: Vector) -> bool:
    return torch.from_numpy(flat).is_pinned()


def _wait_for_gpu() -> None:
    torch.cuda.current_stream().synchronize()


def shard_rows(rows: int, rank: int, workers: int) -> slice:
    """Worker `rank`'s part of so many rows, as FSDP2 cuts them: the last workers may have fewer, or none."""
    share = math.ceil(rows / workers)
    return slice(min(rows, share * rank), min(rows, share * (rank + 1)))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's part of a tensor, in place; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# Merging --------------------------------------------------------------------------------------------------------------
# How what all peers learned comes back into weights that went on training: line 21 of Algorithm 2 (arXiv 2501.18512).
#
#     local = alpha * local + (1 - alpha) * theta
#
# Two products and a sum, each rounded to fp32: numpy and torch give the same bits, on a CPU as on a GPU, since no
# product is contracted with the sum.

Values = TypeVar("Values", Vector, "torch.Tensor")


def merge(local: Values, theta: Values, alpha: float) -> None:
    """Merge theta into local, in place: fp32 values of one shape, on one device.

    With alpha = 0 they are theta's to the bit, signs of zeros included, and with alpha = 1 they stay local's.
    """
    if alpha == 0:
        local[...] = theta
    elif alpha < 1:
        local *= alpha
        local += theta * (1 - alpha)
