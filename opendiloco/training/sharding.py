"""The model as a volunteer's workers share it: FSDP2 (arXiv 2304.11277), one group per transformer block and the rest.

On a mesh of two dimensions, replicas and shards, each replica has the whole model, and gradients are summed over both.

A worker builds the model without memory for its weights, and takes memory block by block, keeping its part only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from opendiloco.config.run_config import TrainingSection
from opendiloco.model.parameters import local_part, shard_rows, transformer_blocks
from opendiloco.training.team import Team

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def shard_model(model: Any, team: Team, training: TrainingSection, whole_layers: bool = False) -> None:
    """Share a model, in place; what is on the meta device gets memory, but no values.

    The rest has the head, with which the loss is computed after the forward pass; so it stays gathered until the
    backward pass, which begins with it. With `whole_layers` all groups do.
    """
    policy = MixedPrecisionPolicy(DTYPES[training.precision], DTYPES[training.gradient_reduction])
    for module in (*transformer_blocks(model), model):
        _take_memory(module, team.device)
        is_freed = module is not model and not whole_layers
        fully_shard(module, mesh=team.mesh, mp_policy=policy, reshard_after_forward=is_freed)


def has_other_tensors(model: torch.nn.Module) -> bool:
    """Whether a model keeps tensors beside its parameters and buffers: nobody but its constructor can fill those."""
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
