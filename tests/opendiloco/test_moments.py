"""Another peer's moments: what is let in, and what becomes of an optimizer that goes on with them."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from opendiloco.config.optimizers import AdamWSection
from opendiloco.config.run_config import RunConfig
from opendiloco.inner.moments import STEPS_LIMIT, Moments, check_moments, largest_ratio, moments_size
from opendiloco.outer import inner_state as inner_state_module
from opendiloco.outer.inner_state import InnerState
from opendiloco.workers.moments import WorkersMoments
from peers.values.leases import SampleRange
from peers.values.workload import SnapshotError
from tests.opendiloco.test_replica import make_replica

VALUES = 50
STEPS = 200
SECTION = AdamWSection(learning_rate=0.01)
CLIP = 5.0
LEASE, NEXT = (SampleRange(0, 24),), (SampleRange(24, 30),)


def empty(values: int = VALUES) -> tuple[memoryview, Moments]:
    data = memoryview(bytearray(moments_size(values)))
    return data, Moments(data)


def sound() -> tuple[memoryview, Moments]:
    data, moments = empty()
    moments.steps[0] = 7
    moments.vectors["exp_avg"][:] = np.linspace(-1, 1, VALUES)
    moments.vectors["exp_avg_sq"][:] = np.linspace(-1, 1, VALUES) ** 2
    return data, moments


# What is let in -------------------------------------------------------------------------------------------------
def test_sound_moments_are_let_in() -> None:
    data, moments = sound()
    check_moments(data, SECTION, CLIP)
    moments.vectors["exp_avg"][:] *= np.float32(0.99 * largest_ratio(*SECTION.betas))
    check_moments(data, SECTION, CLIP)


@pytest.mark.parametrize("place", [0, VALUES - 1])
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("exp_avg", math.nan, "NaN or infinity"),
        ("exp_avg", math.inf, "NaN or infinity"),
        ("exp_avg_sq", math.nan, "NaN or infinity"),
        ("exp_avg_sq", math.inf, "NaN or infinity"),
        ("exp_avg_sq", -1e-3, "negative"),
        ("exp_avg", 1e30, "larger than"),
        ("exp_avg", -1.3, "larger than"),
        ("exp_avg_sq", 0.0, "larger than"),
        ("exp_avg_sq", 1e30, "larger than gradient_clip"),
        ("exp_avg_sq", CLIP**2, "larger than gradient_clip"),
    ],
)
def test_garbage_is_not(name: str, value: float, reason: str, place: int) -> None:
    data, moments = sound()
    moments.vectors[name][place] = value
    with pytest.raises(SnapshotError, match=reason):
        check_moments(data, SECTION, CLIP)


@pytest.mark.parametrize("steps", [0, STEPS_LIMIT + 1, 2**64 - 1])
def test_nor_is_a_step_count_that_cannot_be(steps: int) -> None:
    data, moments = sound()
    moments.steps[0] = steps
    with pytest.raises(SnapshotError, match=f"has made {steps} steps"):
        check_moments(data, SECTION, CLIP)


def test_what_lies_beyond_the_first_piece_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendiloco.inner.moments.PIECE", 8)
    data, moments = sound()
    check_moments(data, SECTION, CLIP)
    moments.vectors["exp_avg"][VALUES - 1] = math.nan
    with pytest.raises(SnapshotError):
        check_moments(data, SECTION, CLIP)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.9), (0.5, 0.5)])
def test_no_gradients_lead_to_a_larger_ratio_and_some_come_close(betas: tuple[float, float]) -> None:
    limit, draw = largest_ratio(*betas), np.random.default_rng(5)
    histories = draw.standard_normal((STEPS, 20)) * 10 ** draw.uniform(-3, 3, (STEPS, 20))
    ages = np.arange(STEPS - 1, -1, -1)[:, None]
    worst = (betas[0] / betas[1]) ** ages
    ratios = ratios_after(np.hstack([histories, worst]), betas)
    assert ratios.max() <= limit * 1.0001
    assert ratios.max() >= limit * 0.99


def ratios_after(histories: NDArray[np.float64], betas: tuple[float, float]) -> NDArray[np.float64]:
    """As torch's AdamW computes its moments of gradients, a row for each step."""
    parameter = torch.nn.Parameter(torch.zeros(histories.shape[1], dtype=torch.float64))
    optimizer = torch.optim.AdamW([parameter], lr=0.0, betas=betas)
    for gradients in histories:
        parameter.grad = torch.from_numpy(gradients)
        optimizer.step()
    state = optimizer.state[parameter]
    ratios: NDArray[np.float64] = (state["exp_avg"].abs() / state["exp_avg_sq"].sqrt()).numpy()
    return ratios


# A replica's ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def donor(small_config: RunConfig) -> tuple[Any, Any, memoryview]:
    """A replica that has trained for some outer steps, theta, and its moments."""
    replica, theta = make_replica(small_config)
    replica.train(theta, 0, LEASE, 12)
    data, moments = empty(replica.layout.size)
    replica.store_moments(moments)
    return replica, theta, data


def weights(replica: Any) -> bytes:
    flat = np.empty(replica.layout.size, np.float32)
    replica.store(flat)
    return flat.tobytes()


def test_its_moments_are_in_thetas_order_and_sound(donor: tuple[Any, Any, memoryview]) -> None:
    replica, _, data = donor
    moments = Moments(data)
    check_moments(data, SECTION, 1.0)
    assert moments.steps[0] == 12
    for place in replica.layout:
        state = replica._optimizer.state[replica.model.get_parameter(place.name)]
        for name, vector in moments.vectors.items():
            assert np.array_equal(vector[place.slice], state[name].numpy().ravel())
            assert vector[place.slice].any()


@pytest.mark.parametrize("own_steps", [0, 3])
def test_who_got_them_takes_the_same_next_steps_bit_for_bit(
    own_steps: int, small_config: RunConfig, donor: tuple[Any, Any, memoryview]
) -> None:
    _, theta, data = donor
    original, _ = make_replica(small_config)
    original.train(theta, 0, LEASE, 12)
    joiner, _ = make_replica(small_config)
    if own_steps:
        joiner.train(theta, 5, NEXT, own_steps)
    joiner.load_moments(Moments(data))
    for replica in (original, joiner):
        replica.train(theta, 6, NEXT, 3)
    assert weights(joiner) == weights(original)
    fresh, _ = make_replica(small_config)
    fresh.train(theta, 6, NEXT, 3)
    assert weights(fresh) != weights(original)


def test_they_come_between_two_inner_steps_and_end_the_rewarmup(
    small_config: RunConfig, donor: tuple[Any, Any, memoryview]
) -> None:
    """The weights stay as they are; only what follows is different."""
    _, theta, data = donor
    joiner, _ = make_replica(small_config)
    inner_steps = joiner.inner_steps(theta, 5, NEXT, 3)
    for step in inner_steps:
        if step.number == 1:
            before = weights(joiner)
            joiner.load_moments(Moments(data))
            assert weights(joiner) == before
    assert inner_steps.trained.tokens == 6 * 16
    out, moments = empty(joiner.layout.size)
    joiner.store_moments(moments)
    assert moments.steps[0] == 12 + 2
    check_moments(out, SECTION, 1.0)


def test_loading_before_the_first_step_moves_no_weight(
    small_config: RunConfig, donor: tuple[Any, Any, memoryview]
) -> None:
    joiner, _ = make_replica(small_config)
    before = weights(joiner)
    joiner.load_moments(Moments(donor[2]))
    assert weights(joiner) == before


def test_who_has_only_just_begun_gives_none(small_config: RunConfig) -> None:
    replica, theta = make_replica(small_config)
    _, moments = empty(replica.layout.size)
    with pytest.raises(SnapshotError, match="only just begun"):
        replica.store_moments(moments)
    warmup = small_config.inner_optimizer.rewarmup_steps
    replica.train(theta, 5, NEXT, 1)
    with pytest.raises(SnapshotError, match="only just begun"):
        replica.store_moments(moments)
    replica.train(theta, 5, (SampleRange(0, 2 * warmup),), warmup)
    replica.store_moments(moments)
    assert moments.steps[0] == 1 + warmup


def test_who_has_made_as_many_steps_keeps_its_own(small_config: RunConfig, donor: tuple[Any, Any, memoryview]) -> None:
    replica, _, data = donor
    with pytest.raises(SnapshotError, match="12 steps; ours as many"):
        replica.load_moments(Moments(data))
    replica.load_moments(with_steps(data, 13))


def test_who_forgets_them_is_as_one_who_has_never_trained(
    small_config: RunConfig, donor: tuple[Any, Any, memoryview]
) -> None:
    """With smaller steps again where it joins in the middle."""
    _, theta, data = donor
    forgetful, fresh = (make_replica(small_config)[0] for _ in range(2))
    forgetful.train(theta, 3, LEASE, 2)
    forgetful.load_moments(Moments(data))
    forgetful.forget_moments()
    for replica in (forgetful, fresh):
        replica.train(theta, 6, NEXT, 3)
    assert weights(forgetful) == weights(fresh)
    assert forgetful.learning_rate == fresh.learning_rate


def with_steps(data: memoryview, steps: int) -> Moments:
    moments = Moments(memoryview(bytearray(data)))
    moments.steps[0] = steps
    return moments


# On its way to the worker ---------------------------------------------------------------------------------------
class FakeWorker:
    def __init__(self) -> None:
        self.loaded: list[bytes] = []

    async def store(self, out: memoryview) -> None:
        out[:] = sound()[0]

    async def load(self, moments: memoryview) -> None:
        self.loaded.append(bytes(moments))


def state_of(worker: FakeWorker, config: RunConfig) -> InnerState:
    training = config.training.model_copy(update={"gradient_clip": CLIP})
    return InnerState(cast(WorkersMoments, worker), VALUES, config.model_copy(update={"training": training}))


def test_only_what_passes_the_checks_reaches_the_worker(small_config: RunConfig) -> None:
    worker = FakeWorker()
    state = state_of(worker, small_config)
    good, bad = sound()[0], empty()[0]

    async def scenario() -> None:
        for wrong in (bad, good[:-1], good[:8], memoryview(b"")):
            with pytest.raises(SnapshotError):
                await state.restore(wrong)
        await state.restore(good)

    asyncio.run(scenario())
    assert worker.loaded == [bytes(good)]


def test_without_memory_for_a_second_one_there_is_none(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = FakeWorker()
    state = state_of(worker, small_config)
    out = memoryview(bytearray(state.size))

    async def scenario() -> None:
        await state.copy(out)
        assert out == sound()[0]
        monkeypatch.setattr(inner_state_module, "available_memory", lambda: state.size - 1)
        with pytest.raises(SnapshotError, match="memory"):
            await state.copy(out)
        with pytest.raises(SnapshotError, match="memory"):
            await state.restore(sound()[0])

    asyncio.run(scenario())
    assert worker.loaded == []
