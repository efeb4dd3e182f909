"""A torch optimizer's state, to and from `Moments`."""

from __future__ import annotations

import torch

from opendiloco.layout import Layout
from opendiloco.moments import Moments


def step_count(optimizer: torch.optim.Optimizer) -> int:
    """Steps that it has made, or has copied."""
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)


@torch.no_grad()
def store_moments(optimizer: torch.optim.Optimizer, model: torch.nn.Module, layout: Layout, out: Moments) -> None:
    """optimizer → out. A parameter that has never had a gradient has moments of zero."""
    out.steps[0] = step_count(optimizer)
    for place in layout:
        state = optimizer.state.get(model.get_parameter(place.name), {})
        for name, vector in out.vectors.items():
            flat = torch.from_numpy(vector[place.slice]).view(place.shape)
            flat.copy_(state[name]) if state else flat.zero_()


@torch.no_grad()
def load_moments(optimizer: torch.optim.Optimizer, model: torch.nn.Module, layout: Layout, moments: Moments) -> None:
    """moments → optimizer. Drops gradients; the next step is the one that follows those counted in `moments`."""
    parameters = [(place, model.get_parameter(place.name)) for place in layout]
    _begin(optimizer, [parameter for _, parameter in parameters if parameter not in optimizer.state])
    for place, parameter in parameters:
        state = optimizer.state[parameter]
        state["step"].fill_(float(moments.steps[0]))
        for name, vector in moments.vectors.items():
            state[name].copy_(torch.from_numpy(vector[place.slice]).view(place.shape))


def _begin(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> None:
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
