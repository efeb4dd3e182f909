"""Attention that computes nothing of other documents, where documents are masked: PyTorch's flex attention, on GPUs.

With the mask that transformers makes otherwise, all pairs of tokens are computed and most are then left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from opendiloco.errors import first_line
from opendiloco.inner.device_facts import compiling_lacks
from opendiloco.inner.team import Team
from opendiloco.stages import at_stage

if TYPE_CHECKING:
    from opendiloco.inner.replica import ModelReplica

FLEX = "flex_attention"
"""Its name in transformers."""
FLEX_ON = {"cuda"}
TOLERANCE = 0.01
"""The share by which the trial's loss may differ: both ways are right, but round differently in bf16."""


@contextmanager
def attending_by(model: Any, attention: str | None) -> Iterator[None]:
    """Have a transformers model compute attention by the implementation of this name; None leaves it as it is."""
    if attention is None:
        yield
        return
    config = model.config
    before, config._attn_implementation = config._attn_implementation, attention
    try:
        yield
    finally:
        config._attn_implementation = before


def document_attention(replica: ModelReplica, team: Team, end: int) -> str | None:
    """Return the attention to train with, where documents end with `end`; None for the one that the model has.

    Flex attention is tried once, where it can be compiled. It is taken if it works on all workers and gives the loss
    that the model gives without it. Workers call this together.
    """
    if team.device.type not in FLEX_ON or compiling_lacks(team.device) is not None:
        return None
    at_stage("trying attention within documents alone")
    problem = _problem_with_flex(replica, team.device, end)
    if team.smallest(problem is None):
        return FLEX
    at_stage(f"attention is computed between documents, too, and masked: {problem or 'another worker needs it.'}")
    return None


def _problem_with_flex(replica: ModelReplica, device: torch.device, end: int) -> str | None:
    """Return in a line why a window of two documents cannot be trained with flex attention; None if it can."""
    ids = torch.arange(replica.window_length, device=device).remainder(replica.model.config.vocab_size)
    ids[len(ids) // 2] = end
    try:
        with torch.no_grad():
            expected = float(replica.loss(ids.unsqueeze(0)))
        with attending_by(replica.model, FLEX):
            loss = replica.loss(ids.unsqueeze(0))
            loss.backward()
    except Exception as error:  # PyTorch's compiler, Triton and transformers each have their own
        return first_line(error)
    finally:
        replica.model.zero_grad(set_to_none=True)
    found = float(loss.detach())
    if math.isclose(found, expected, rel_tol=TOLERANCE):
        return None
    return f"flex attention gives a loss of {found:.4f} instead of {expected:.4f}."
