"""The inner optimizer (AdamW) and the shape of its learning rate over the run."""

from __future__ import annotations

import torch

from opendiloco.config import InnerOptimizerSection, ScheduleSection


def build_inner_optimizer(model: torch.nn.Module, section: InnerOptimizerSection) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; only those with two or more dimensions decay."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=section.learning_rate, betas=section.betas, eps=section.epsilon)


def learning_rate_factor(schedule: ScheduleSection, step: int) -> float:
    """What the peak learning rate is multiplied by at inner step `step` of the run, counted from 0.

    Warmup rises linearly and reaches 1 at its last step; decay falls linearly and reaches `final_fraction` at its
    last step, where it stays ("warmup, stable, decay", arXiv 2404.06395).
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    decayed = step - schedule.warmup_steps - schedule.stable_steps + 1
    if decayed <= 0:
        return 1.0
    fraction = min(1.0, decayed / schedule.decay_steps) if schedule.decay_steps else 1.0
    return 1.0 - fraction * (1.0 - schedule.final_fraction)
