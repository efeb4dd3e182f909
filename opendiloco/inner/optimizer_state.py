"""A torch optimizer's state, to and from `Moments`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from opendiloco.inner.moments import Moments
from opendiloco.model.shards import Shards


def step_count(optimizer: torch.optim.Optimizer) -> int:
    """Steps that it has made, or has copied."""
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)


def store_moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], shards: Shards, out: Moments
) -> None:
    """optimizer → out: this worker's part. A parameter that has never had a gradient has moments of zero."""
    out.steps[0] = step_count(optimizer)
    for moment, vector in out.vectors.items():
        moments = {name: optimizer.state.get(parameter, {}).get(moment) for name, parameter in parameters.items()}
        present = {
            name: torch.zeros_like(parameters[name]) if values is None else values for name, values in moments.items()
        }
        shards.store(present, vector)


@torch.no_grad()
def load_moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], shards: Shards, moments: Moments
) -> None:
    """moments → optimizer. Drops gradients; the next step is the one that follows those counted in `moments`."""
    _begin(optimizer, [parameter for parameter in parameters.values() if parameter not in optimizer.state])
    for parameter in parameters.values():
        optimizer.state[parameter]["step"].fill_(float(moments.steps[0]))
    for moment, vector in moments.vectors.items():
        shards.load(vector, {name: optimizer.state[parameter][moment] for name, parameter in parameters.items()})


def _begin(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    """Have torch make the state of these as it does in their first step: here one of size zero, which moves nothing."""
    optimizer.zero_grad(set_to_none=True)
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
