"""The model of a loop of one's own: whether it can be a peer's, the weights that a run begins with, the model as a
replica of the run's, and the tokens that pass through it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from opendiloco.config.model import check_initial_weights
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import build_tokenizer
from opendiloco.errors import LoopError
from opendiloco.model.build import build_model
from opendiloco.model.layout import Layout
from opendiloco.model.parameters import Shards, layout_of, merge, trainable
from opendiloco.shared_memory import SharedVectors, Vector
from peers.errors import ManifestError

EXACT = (torch.float32, torch.float64)
"""The types that hold theta's values as they are."""
ROUNDING = (torch.bfloat16, torch.float16)
"""The types that theta's values are rounded to."""
JOIN = (
    "Train with `diloco-peer join`, which shares a model among all GPUs of a machine, or in one process on one device."
)


def check_own_model(model: torch.nn.Module) -> None:
    """Raises: LoopError when the model is shared with other processes, or cannot hold theta."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise LoopError(
            f"this is process {dist.get_rank()} of {dist.get_world_size()}; each would join as a peer of its own.",
            JOIN,
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise LoopError("the model is wrapped in FSDP.", JOIN)
    for name, parameter in trainable(model).items():
        if isinstance(parameter, DTensor):
            raise LoopError(f"the model's parameter {name} is a shard (FSDP2, or a DTensor of another kind).", JOIN)
        if parameter.is_meta:
            raise LoopError(f"the model's parameter {name} has no memory.", "Use `model.to_empty(device=…)` first.")
        if parameter.dtype not in EXACT + ROUNDING:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise LoopError(
                f"the model's parameter {name} is {kind}, which cannot be trained.",
                "Keep the weights in float32 (model.float()), or in bfloat16 or float16.",
            )


def initial_weights(config: RunConfig, layout: Layout) -> tuple[Layout, SharedVectors]:
    """Return the weights that the run begins with, and where a model of this layout finds its own in them.

    Raises: ManifestError when the run's model has another; MachineError without memory; see `check_initial_weights`.
    """
    model = build_model(config, build_tokenizer(config.tokenizer))
    runs = layout_of(model, config.streaming)
    remedy = "Build the model as the run's manifest says: `diloco-peer run show` prints it."
    for ours, theirs in zip(layout, runs, strict=False):
        if ours.shape != theirs.shape:
            raise ManifestError(
                f"the model's parameter {ours.name} has the shape {ours.shape}; the run's {theirs.name} has "
                f"{theirs.shape}.",
                remedy,
            )
    if layout.parameter_count != runs.parameter_count:
        raise ManifestError(
            f"the model has {layout.parameter_count} trainable values; the run's has {runs.parameter_count}.", remedy
        )
    vectors = SharedVectors.create(runs.size)
    Shards(runs).store(trainable(model), vectors.theta)
    check_initial_weights(vectors.theta, config.model)
    return Layout([(parameter.name, parameter.shape) for parameter in layout], runs.fragment_of), vectors


# The replica ----------------------------------------------------------------------------------------------------------
class LoopReplica:
    """A loop's model as a replica of the run's: theta goes into it, and what it has trained comes out.

    Weights in half precision have a *master* in fp32 in main memory: the values that were loaded. What training has
    changed since is the difference between the weights now and the rounded master, and counts on top of the master. So
    theta's rounding never counts as trained.
    """

    def __init__(self, model: torch.nn.Module, layout: Layout) -> None:
        self._model = model
        self._layout = layout
        self._masters = {
            name: torch.zeros(parameter.shape)
            for name, parameter in trainable(model).items()
            if parameter.dtype in ROUNDING
        }

    @property
    def rounds(self) -> bool:
        """Return whether the model cannot hold theta as it is."""
        return bool(self._masters)

    @torch.no_grad()
    def load(self, flat: Vector) -> None:
        """Replace all weights by those of a flat vector."""
        for name, own, values in self._parts(flat):
            self._set(name, own, values)

    @torch.no_grad()
    def store(self, flat: Vector, fragment: int) -> None:
        """Write a fragment's weights, as trained, into a flat vector."""
        for name, own, values in self._parts(flat, fragment):
            values.copy_(self._trained(name, own))

    @torch.no_grad()
    def merge(self, flat: Vector, fragment: int, alpha: float) -> None:
        """Merge a flat vector into a fragment's weights, which keep a share of `alpha`; see `merge`."""
        for name, own, values in self._parts(flat, fragment):
            local = self._trained(name, own)
            merge(local, values.to(local.device), alpha)
            if local is not own:
                self._set(name, own, local)

    @contextmanager
    def showing(self, flat: Vector, comes_back: bool) -> Iterator[torch.nn.Module]:
        """Have the model show other weights for a while. With `comes_back` it then has those of now again, of which it
        keeps a copy; else it is to be loaded before it trains."""
        tensors = trainable(self._model)
        kept = {name: tensor.detach().clone() for name, tensor in tensors.items()} if comes_back else {}
        with torch.no_grad():
            for _, own, values in self._parts(flat):
                own.copy_(values)
        try:
            yield self._model
        finally:
            with torch.no_grad():
                for name, values in kept.items():
                    tensors[name].copy_(values)

    def _parts(self, flat: Vector, fragment: int | None = None) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield the name of each trained parameter, or of a fragment's, with its tensor and its values in a flat
        vector."""
        tensors = trainable(self._model)
        for parameter in self._layout if fragment is None else self._layout.fragment(fragment):
            values = torch.from_numpy(flat[parameter.slice]).view(parameter.shape)
            yield parameter.name, tensors[parameter.name], values

    def _set(self, name: str, own: torch.Tensor, values: torch.Tensor) -> None:
        own.copy_(values)
        if name in self._masters:
            self._masters[name].copy_(values)

    def _trained(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """Return a parameter's weights as trained, in a precision that holds theta."""
        if name not in self._masters:
            return own
        master = self._masters[name]
        rounded = master.to(own.device, own.dtype)
        return master + (own.float() - rounded.float()).to(master.device)


# Tokens ---------------------------------------------------------------------------------------------------------------
class TokenCounter:
    """The tokens of an inner step: those that pass through the model in training mode, unless the loop says how many.

    Token ids are the model's first argument, or its `input_ids`. Padding, where an `attention_mask` of their shape is
    0, is not counted.
    """

    def __init__(self) -> None:
        self._passed: list[int | torch.Tensor] = []
        self._said: int | None = None

    def watch(self, model: torch.nn.Module) -> RemovableHandle:
        """Count what passes through a model, until the handle is removed."""
        return model.register_forward_pre_hook(self._count, with_kwargs=True)

    def say(self, tokens: int) -> None:
        """Take the number of tokens of the inner step under way from the loop. The last one counts."""
        self._said = tokens

    def take(self) -> int:
        """Return the tokens of the inner step that has ended, and begin to count anew. Waits for the device."""
        tokens = sum(map(int, self._passed)) if self._said is None else self._said
        self._passed, self._said = [], None
        return tokens

    def _count(self, model: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named.get("input_ids", arguments[0] if arguments else None)
        if not model.training or not torch.is_grad_enabled() or not isinstance(ids, torch.Tensor):
            return
        mask = named.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
            self._passed.append(mask.count_nonzero())  # read when the inner step ends, so that nothing waits here
        elif not ids.is_floating_point():
            self._passed.append(ids.numel())
