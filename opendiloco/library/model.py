"""The model of the caller's own loop: checks of the model, the run's initial weights for it, the exchange of its
weights with flat vectors, and the count of its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.hooks import RemovableHandle

from opendiloco.config.model import check_initial_weights
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import build_tokenizer
from opendiloco.errors import LoopError
from opendiloco.library.ranks import Ranks
from opendiloco.model.build import build_model
from opendiloco.model.layout import Layout
from opendiloco.model.parameters import Shards, layout_of, local_part, merge, trainable
from opendiloco.shared_memory import SharedVectors, Vector
from peers.errors import ManifestError

EXACT = (torch.float32, torch.float64)
"""Types that hold theta exactly."""
ROUNDING = (torch.bfloat16, torch.float16)
"""Types to which theta is rounded."""


def check_own_model(model: torch.nn.Module) -> None:
    """Raise LoopError if the model is sharded in an unsupported way, or if the type of its parameters cannot hold
    theta."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise LoopError(
            "the model is wrapped in FSDP.", "Share it by FSDP2: torch.distributed.fsdp.fully_shard(model)."
        )
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    for name, parameter in trainable(model).items():
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() != processes:
            raise LoopError(
                f"the model's parameter {name} is shared by {parameter.device_mesh.size()} of {processes} processes.",
                "Share the whole model among all processes, by FSDP2 or DistributedDataParallel.",
            )
        if parameter.is_meta:
            raise LoopError(f"the model's parameter {name} has no memory.", "Use `model.to_empty(device=…)` first.")
        if parameter.dtype not in EXACT + ROUNDING:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise LoopError(
                f"the model's parameter {name} is {kind}, which cannot be trained.",
                "Keep the weights in float32 (model.float()), or in bfloat16 or float16.",
            )


def initial_weights(config: RunConfig, layout: Layout) -> tuple[Layout, SharedVectors]:
    """Return the layout of the caller's model in the run's flat vectors, and new vectors with the run's initial
    weights. Raises: ManifestError if the run's model has other parameters; MachineError if memory is insufficient; see
    also `check_initial_weights`."""
    model = build_model(config, build_tokenizer(config.tokenizer))
    runs = layout_of(model, config.streaming)
    remedy = "Build the model that the run's manifest names: `diloco-peer run show` prints it."
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


# The model as a replica -----------------------------------------------------------------------------------------------
SAME = 1e-9
"""Largest difference between the sums of two copies, as a share of the sum of all magnitudes. Different GPUs may round
differently; copies that were trained separately differ by more."""


class LoopReplica:
    """The caller's model as a replica of the run's model: theta is loaded into the model from a flat vector, and
    trained weights are stored in a flat vector.

    If several processes share the model, they load, store and merge together. Only the first one has flat vectors,
    which are exchanged parameter by parameter.

    Weights in half precision have a *master* copy in fp32 in main memory: the loaded values. The difference between the
    present weights and the rounded master is the training's change, and is added to the master. So the rounding of
    theta never counts as training.
    """

    def __init__(self, model: torch.nn.Module, layout: Layout, ranks: Ranks) -> None:
        self._model = model
        self._layout = layout
        self._ranks = ranks
        self._masters = {
            name: torch.zeros(local_part(parameter).shape)
            for name, parameter in trainable(model).items()
            if parameter.dtype in ROUNDING
        }

    @property
    def rounds(self) -> bool:
        """True if some of the model's weights have a type that cannot hold theta exactly."""
        return bool(self._masters)

    @torch.no_grad()
    def load(self, flat: Vector | None) -> None:
        """Replace all weights of the model by those in `flat`. The first process passes `flat`, and sends its values to
        the others, which pass None."""
        for name, tensor, values in self._received(flat, self._layout):
            self._set(name, tensor, values)

    @torch.no_grad()
    def store(self, flat: Vector | None, fragment: int) -> None:
        """Write the trained weights of a fragment to `flat` in the first process; the others pass None. Raises:
        LoopError if the processes' copies of the weights differ."""
        tensors = self._tensors()
        self._check_copies([tensors[parameter.name] for parameter in self._layout.fragment(fragment)])
        for parameter in self._layout.fragment(fragment):
            whole = _whole(tensors[parameter.name], self._trained(parameter.name, tensors[parameter.name]))
            if flat is not None:
                torch.from_numpy(flat[parameter.slice]).view(parameter.shape).copy_(whole)

    @torch.no_grad()
    def merge(self, flat: Vector | None, fragment: int, alpha: float) -> None:
        """Set a fragment's weights to alpha * weights + (1 - alpha) * flat. The first process passes `flat`, and sends
        its values to the others, which pass None."""
        for name, tensor, values in self._received(flat, self._layout.fragment(fragment)):
            own, local = local_part(tensor), self._trained(name, tensor)
            merge(local, values.to(local.device), alpha)
            if local is not own:
                self._set(name, tensor, local)

    @contextmanager
    def showing(self, flat: Vector | None, comes_back: bool) -> Iterator[torch.nn.Module]:
        """Yield the model with the weights in the flat vector. With `comes_back`, the model's present weights are
        copied and later restored; otherwise the caller must load weights before it trains."""
        tensors = {name: local_part(tensor).detach() for name, tensor in self._tensors().items()}
        kept = {name: own.clone() for name, own in tensors.items()} if comes_back else {}
        with torch.no_grad():
            for _, tensor, values in self._received(flat, self._layout):
                local_part(tensor).copy_(values)
        try:
            yield self._model
        finally:
            for name, values in kept.items():
                tensors[name].copy_(values)

    def _check_copies(self, tensors: Sequence[torch.Tensor]) -> None:
        copies = [tensor.detach() for tensor in tensors if not isinstance(tensor, DTensor)]
        if self._ranks.size == 1 or not copies:
            return
        total = sum(float(copy.sum(dtype=torch.float64)) for copy in copies)
        scale = sum(float(copy.abs().sum(dtype=torch.float64)) for copy in copies)
        difference = self._ranks.spread(total)
        if not math.isfinite(scale):
            raise LoopError("the trained weights hold NaN or infinity.", "Lower the learning rate, or clip gradients.")
        if not difference <= SAME * scale:
            raise LoopError(
                f"the {self._ranks.size} processes of the loop no longer have the same weights.",
                "Average gradients: wrap the model in DistributedDataParallel, or share it by FSDP2.",
            )

    def _tensors(self) -> dict[str, torch.nn.Parameter]:
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # FSDP2 leaves weights unsharded after a forward pass without a backward pass
        return trainable(self._model)

    def _received(self, flat: Vector | None, layout: Layout) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield each parameter's name, its tensor, and this process's part of its values in the flat vector, which the
        first process sends."""
        tensors = self._tensors()
        for parameter in layout:
            tensor = tensors[parameter.name]
            values = None if flat is None else torch.from_numpy(flat[parameter.slice]).view(parameter.shape)
            if self._ranks.size > 1 or isinstance(tensor, DTensor):
                device = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device
                whole = torch.empty(parameter.shape, device=device)
                if values is not None:
                    whole.copy_(values)
                self._ranks.take_from_first(whole)
                values = _part(tensor, whole)
            assert values is not None, "a single process has the flat vectors"
            yield parameter.name, tensor, values

    def _set(self, name: str, tensor: torch.Tensor, values: torch.Tensor) -> None:
        local_part(tensor).copy_(values)
        if name in self._masters:
            self._masters[name].copy_(values)

    def _trained(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a parameter's trained weights, in fp32 or fp64. For weights in half precision,
        this is theta without rounding, plus the change by training."""
        own = local_part(tensor)
        if name not in self._masters:
            return own
        master = self._masters[name]
        rounded = master.to(own.device, own.dtype)
        return master + (own.float() - rounded.float()).to(master.device)


def _part(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this process's part of the tensor `whole`, sharded like `tensor`, or all of `whole` if `tensor` is not
    sharded."""
    if not isinstance(tensor, DTensor):
        return whole
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()


def _whole(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, gathered from the parts of all processes, or `part` itself if `tensor` is not
    sharded."""
    if not isinstance(tensor, DTensor):
        return part
    part, mesh = part.to(tensor.device_mesh.device_type), tensor.device_mesh
    shared = DTensor.from_local(part, mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride())
    return shared.full_tensor()


# Counting tokens ------------------------------------------------------------------------------------------------------
class TokenCounter:
    """Counts the tokens that one inner step trains. These are the tokens that pass through the model in training mode,
    unless the loop gives their number.

    Token ids are the model's first argument, or its `input_ids`. Padding does not count: positions where an
    `attention_mask` of the same shape is 0.
    """

    def __init__(self) -> None:
        self._passed: list[int | torch.Tensor] = []
        self._given: int | None = None

    def watch(self, model: torch.nn.Module) -> RemovableHandle:
        """Count the tokens that pass through a model. Return a handle whose `remove` ends the counting."""
        return model.register_forward_pre_hook(self._count, with_kwargs=True)

    def say(self, tokens: int) -> None:
        """Set the number of tokens of the present inner step, in place of the counted tokens and of earlier calls."""
        self._given = tokens

    def take(self) -> int:
        """Return the number of tokens of the inner step that has ended, and set the counter to 0. Waits for the
        device."""
        tokens = sum(map(int, self._passed)) if self._given is None else self._given
        self._passed, self._given = [], None
        return tokens

    def _count(self, model: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named.get("input_ids", arguments[0] if arguments else None)
        if not model.training or not torch.is_grad_enabled() or not isinstance(ids, torch.Tensor):
            return
        mask = named.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
            self._passed.append(mask.count_nonzero())  # `take` reads this count later, to avoid a wait for the device
        elif not ids.is_floating_point():
            self._passed.append(ids.numel())
