"""Attention that computes nothing of other documents, where documents are masked: PyTorch's flex attention, on GPUs.

With the mask that transformers makes otherwise, all pairs of tokens are computed and most are then left out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from opendiloco.errors import first_line
from opendiloco.stages import TRYING_ATTENTION, at_stage
from opendiloco.training.device_facts import compiling_lacks
from opendiloco.training.team import Team
from opendiloco.training.trials import Trial, trial_windows

if TYPE_CHECKING:
    from opendiloco.training.replica import ModelReplica

FLEX = "flex_attention"
"""Its name in transformers."""
FLEX_ON = {"cuda"}
TOLERANCE = 0.01
"""The share by which the trial's loss may differ: both ways are right, but round differently in bf16."""


def document_attention(replica: ModelReplica, team: Team, end: int) -> str | None:
    """Return the attention to train with, where documents end with `end`; None for the one that the model has.

    Flex attention is tried once, where it can be compiled. It is taken if it works on all workers and gives the loss
    that the model gives without it. Workers call this together.
    """
    if team.device.type not in FLEX_ON or compiling_lacks(team.device) is not None:
        return None
    at_stage(TRYING_ATTENTION)
    problem = _problem_with_flex(replica, team.device, end)
    if team.smallest(problem is None):
        return FLEX
    at_stage(f"attention is computed between documents, too, and masked: {problem or 'another worker needs it.'}")
    return None


def _problem_with_flex(replica: ModelReplica, device: torch.device, end: int) -> str | None:
    """Return in a line why windows of two documents cannot be trained with flex attention; None if they can."""
    trial, wrong = Trial(replica, FLEX), None
    for windows in trial_windows(replica, device):  # workers make as many passes each, whatever they find
        windows[:, windows.shape[1] // 2] = end
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # that is compiled for training alone
            expected = float(replica.loss(windows))
        found = trial.loss(windows)
        if not math.isclose(found, expected, rel_tol=TOLERANCE):
            wrong = f"flex attention gives a loss of {found:.4f} instead of {expected:.4f}."
    return wrong if trial.error is None else first_line(trial.error)
