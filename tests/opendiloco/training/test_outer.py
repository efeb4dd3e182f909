from __future__ import annotations

import numpy as np
import pytest
import torch
from blake3 import blake3

from opendiloco import kernels
from opendiloco.config.optimizers import OuterOptimizerSection, OuterScheduleSection
from opendiloco.config.overrides import Overrides
from opendiloco.training.outer import OuterState
from peers.values.chunks import digest_of_state


def test_the_outer_step_is_torchs_nesterov_sgd_on_the_decoded_average() -> None:
    source = np.random.default_rng(0)
    theta = source.standard_normal(3000).astype(np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    state = OuterState(theta, OuterOptimizerSection(learning_rate=0.7, momentum=0.9))
    for index in range(4):
        payload = kernels.Payload(kernels.INT8, 3000)
        kernels.quantize(source.standard_normal(3000).astype(np.float32), payload)
        decoded = np.empty(3000, np.float32)
        kernels.dequantize(payload, decoded)
        state.apply(payload, index)
        parameter.grad = torch.from_numpy(decoded)
        optimizer.step()
    np.testing.assert_allclose(state.theta, parameter.detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_delayed_momentum_moves_theta_in_each_nth_outer_step_only(momentum: float) -> None:
    """Algorithm 3 of arXiv 2401.09135 with c = 0, whose momentum is a third of ours, in double precision."""
    source, every, rate = np.random.default_rng(0), 3, 0.7
    section = OuterOptimizerSection(learning_rate=rate, momentum=momentum, momentum_every=every)
    state = OuterState(source.standard_normal(3000).astype(np.float32), section)
    theta, velocity, seen = state.theta.astype(np.float64), np.zeros(3000), np.zeros(3000)
    for index in range(7):
        payload, decoded = kernels.Payload(kernels.INT8, 3000), np.empty(3000, np.float32)
        kernels.quantize(source.standard_normal(3000).astype(np.float32), payload)
        kernels.dequantize(payload, decoded)
        state.apply(payload, index)
        seen += decoded
        theta -= rate * decoded / every
        if (index + 1) % every == 0:
            velocity = momentum * velocity + seen / every
            theta -= rate * momentum * velocity
            seen[:] = 0
        if momentum and (index + 1) % every == 0:
            np.testing.assert_allclose(state.momentum, every * velocity, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state.theta, theta, rtol=1e-5, atol=1e-5)


def test_a_momentum_in_each_outer_step_is_nesterovs_to_the_bit() -> None:
    source = np.random.default_rng(0).standard_normal(3000).astype(np.float32)
    payload = kernels.Payload(kernels.INT8, 3000)
    kernels.quantize(source, payload)
    state, theta, velocity = OuterState(source.copy(), OuterOptimizerSection()), source.copy(), np.zeros_like(source)
    for index in range(2):
        state.apply(payload, index)
        kernels.outer_step(payload, theta, velocity, 0.7, 0.9)
    assert np.array_equal(state.theta, theta)
    assert np.array_equal(state.momentum, velocity)


def test_the_digest_covers_theta_and_momentum() -> None:
    state = OuterState(np.arange(5, dtype=np.float32), OuterOptimizerSection())
    chunk = blake3(state.momentum.tobytes() + state.theta.tobytes()).digest()
    assert state.digest() == blake3(chunk).digest()
    before = state.digest()
    state.momentum[4] = 1
    assert state.digest() != before


def test_a_copy_is_the_state_that_the_digest_is_of() -> None:
    state = OuterState(np.arange(5, dtype=np.float32), OuterOptimizerSection())
    state.momentum[:] = 7
    out = bytearray(40)
    state.copy_to(memoryview(out))
    assert out == b"".join(state.vectors)
    assert digest_of_state([out]) == state.digest()


def test_the_outer_learning_rate_is_that_of_the_steps_place_in_the_run() -> None:
    schedule = OuterScheduleSection(warmup_steps=2, stable_steps=1, decay_steps=2, decay_shape="sqrt")
    scheduled = OuterState(np.ones(5, np.float32), OuterOptimizerSection(learning_rate=0.5, schedule=schedule))
    assert [scheduled.learning_rate(index) for index in range(6)] == [0.25, 0.5, 0.5, 0.5 * (1 - 0.5**0.5), 0, 0]
    plain = OuterState(np.ones(5, np.float32), OuterOptimizerSection(learning_rate=0.25))
    payload = kernels.Payload(kernels.INT8, 5)
    kernels.quantize(np.arange(5, dtype=np.float32), payload)
    scheduled.apply(payload, 0)
    plain.apply(payload, 0)
    assert scheduled.digest() == plain.digest()
    before = scheduled.theta.copy()
    scheduled.apply(payload, 5)  # the schedule is over
    assert np.array_equal(scheduled.theta, before)


def test_an_amendment_stands_in_place_of_the_manifests_values_and_the_schedule_goes_on() -> None:
    schedule = OuterScheduleSection(warmup_steps=2, stable_steps=1, decay_steps=2)
    of_run = OuterState(np.ones(5, np.float32), OuterOptimizerSection(learning_rate=1.0, schedule=schedule))
    amended = OuterOptimizerSection(learning_rate=0.4, momentum=0.5, schedule=schedule)
    expected = OuterState(np.ones(5, np.float32), amended)
    overrides = Overrides(outer_learning_rate=0.4, outer_momentum=0.5)
    payload = kernels.Payload(kernels.INT8, 5)
    kernels.quantize(np.arange(5, dtype=np.float32), payload)
    for index in range(4):
        assert of_run.learning_rate(index, overrides) == expected.learning_rate(index)
        of_run.apply(payload, index, overrides=overrides)
        expected.apply(payload, index)
        assert of_run.digest() == expected.digest()
    of_run.apply(payload, 4)
    expected.apply(payload, 4)
    assert of_run.digest() != expected.digest()
