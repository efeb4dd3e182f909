from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from opendiloco.optimizer_config import AdamWSection
from opendiloco.optimizers import build_inner_optimizer


class HandWrittenAdamW:
    """Loshchilov and Hutter's Algorithm 2 (arXiv 1711.05101), in float64."""

    def __init__(self, section: AdamWSection, decay: float, shape: tuple[int, ...]) -> None:
        self.section, self.decay, self.time = section, decay, 0
        self.first, self.second = np.zeros(shape), np.zeros(shape)

    def step(self, weights: NDArray[np.float64], gradient: NDArray[np.float64], rate: float) -> NDArray[np.float64]:
        self.time += 1
        beta1, beta2 = self.section.betas
        self.first = beta1 * self.first + (1 - beta1) * gradient
        self.second = beta2 * self.second + (1 - beta2) * gradient**2
        first = self.first / (1 - beta1**self.time)
        second = self.second / (1 - beta2**self.time)
        return weights - rate * (first / (np.sqrt(second) + self.section.epsilon) + self.decay * weights)


def test_adamw_steps_as_written_by_hand_and_spares_vectors_the_decay() -> None:
    torch.manual_seed(0)
    section = AdamWSection(learning_rate=0.02, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.3)
    layer = torch.nn.Linear(5, 3)
    optimizer = build_inner_optimizer(layer, section)
    by_hand = [HandWrittenAdamW(section, 0.3, (3, 5)), HandWrittenAdamW(section, 0.0, (3,))]
    expected = [parameter.detach().numpy().astype(np.float64) for parameter in (layer.weight, layer.bias)]
    for rate in (0.02, 0.01, 0.005):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        layer(torch.randn(7, 5)).square().sum().backward()
        for position, parameter in enumerate((layer.weight, layer.bias)):
            assert parameter.grad is not None
            gradient = parameter.grad.numpy().astype(np.float64)
            expected[position] = by_hand[position].step(expected[position], gradient, rate)
        optimizer.step()
    for parameter, values in zip((layer.weight, layer.bias), expected, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), values, rtol=2e-6, atol=1e-7)
