"""The outer state of a run with several fragments: each has a base, contributions and outer steps of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from opendiloco import kernels
from opendiloco.config.run_config import RunConfig
from opendiloco.model.build import sized_skeleton, with_sizes_named
from opendiloco.model.parameters import layout_of
from opendiloco.shared_memory import Vector
from opendiloco.training.outer import LocalState, OuterState, OuterStatistics, OuterStepTaken
from opendiloco.volunteer.local_workload import LocalWorkload
from peers.errors import ManifestError
from peers.values.workload import BadBlocksError, Reduction, Workload
from tests.opendiloco.volunteer.test_local_workload import StateOnly

FRAGMENTS = (slice(0, 1500), slice(2048, 2050), slice(3072, 4500))
SIZE = FRAGMENTS[-1].stop


@pytest.fixture
def workload(small_config: RunConfig) -> LocalWorkload:
    return LocalWorkload(StateOnly(SIZE, FRAGMENTS), small_config)


def encoded(difference: Vector) -> bytes:
    payload = kernels.Payload(kernels.INT8, difference.size)
    kernels.quantize(difference, payload)
    return bytes(payload.buffer)


def step(workload: LocalWorkload, fragment: int, value: float, index: int = 0) -> Any:
    part = FRAGMENTS[fragment]
    payload = encoded(np.full(part.stop - part.start, value, np.float32))
    return workload.apply(payload, index, fragment, keeps_work=True)


def test_each_fragment_has_payloads_of_its_own(workload: LocalWorkload) -> None:
    as_seen_by_peers: Workload = workload
    sizes = [part.stop - part.start for part in FRAGMENTS]
    assert [blocked.block_count for blocked in as_seen_by_peers.fragments] == [1, 1, 1]
    for fragment, (part, size) in enumerate(zip(FRAGMENTS, sizes, strict=True)):
        workload.trainer.vectors.local[part] = np.arange(size)
        contribution = bytes(asyncio.run(workload.contribution(fragment)))
        assert contribution == encoded(1 - np.arange(size, dtype=np.float32))
        average = asyncio.run(workload.reduce(Reduction([(contribution, 3.0)], 0, fragment=fragment)))
        assert bytes(average) == contribution
        assert workload.squared_norm(contribution, 0, fragment) > 0
    with pytest.raises(BadBlocksError):
        workload.squared_norm(contribution, 0, 1)


def test_an_outer_step_is_of_one_fragment(workload: LocalWorkload, small_config: RunConfig) -> None:
    theta = np.ones(SIZE, np.float32)
    expected = OuterState(theta, small_config.outer_optimizer, FRAGMENTS)
    for index, fragment in ((0, 1), (0, 0), (0, 2), (1, 1)):
        size = FRAGMENTS[fragment].stop - FRAGMENTS[fragment].start
        asyncio.run(step(workload, fragment, 0.5 + fragment, index))
        expected.apply(
            kernels.Payload(kernels.INT8, size, encoded(np.full(size, 0.5 + fragment, np.float32))), index, fragment
        )
        assert asyncio.run(workload.state_digest()) == expected.digest()
    assert (theta[1500:2048] == 1).all()
    before = asyncio.run(workload.state_digest())
    with pytest.raises(BadBlocksError):
        asyncio.run(workload.apply(encoded(np.ones(3, np.float32)), 1, 1))
    assert asyncio.run(workload.state_digest()) == before


def test_work_on_a_fragment_counts_from_its_own_base(workload: LocalWorkload) -> None:
    async def story() -> None:
        local = workload.trainer.vectors.local
        local[:] = 0
        await step(workload, 0, 8.0)  # made without us
        await step(workload, 1, 8.0)
        assert (await workload.contribution(0)) == encoded(np.ones(1500, np.float32))
        await step(workload, 0, 8.0, 1)  # nothing on it is left to be encoded
        assert (await workload.contribution(0)) == encoded(workload.trainer.vectors.theta[FRAGMENTS[0]])
        assert (await workload.contribution(1)) == encoded(np.ones(2, np.float32))
        assert (await workload.contribution(2)) == encoded(np.ones(1428, np.float32))

    asyncio.run(story())


def test_a_state_without_workers_has_the_same_fragments(small_content: dict[str, Any]) -> None:
    config = RunConfig.from_manifest_content(small_content | {"streaming": {"layers_per_fragment": 1}})
    assert config.streaming.fragments is None
    named = with_sizes_named(config)
    fragments = named.streaming.fragments
    assert fragments == layout_of(sized_skeleton(config), config.streaming).fragments
    assert with_sizes_named(named) == named
    assert fragments is not None
    assert len(fragments) == 2
    assert len(LocalState(np.zeros(fragments[-1].stop, np.float32), config, fragments).fragments) == 2
    plain = RunConfig.from_manifest_content(small_content)
    assert with_sizes_named(plain) == plain
    assert plain.streaming.fragments is None


def test_fragments_of_other_sizes_than_the_run_says_are_refused(small_content: dict[str, Any]) -> None:
    streaming = {"layers_per_fragment": 1, "sizes": [5, 7]}
    config = RunConfig.from_manifest_content(small_content | {"streaming": streaming})
    with pytest.raises(ManifestError, match=r"streaming\.sizes: the run's fragments have \(5, 7\) values") as refused:
        with_sizes_named(config)
    assert "remove streaming.sizes" in str(refused.value.remedy)


def test_an_outer_step_is_told_of_when_all_of_its_fragments_are_measured(workload: LocalWorkload) -> None:
    told = list[OuterStepTaken]()

    async def story() -> None:
        workload.measuring.on_outer_step = told.append
        for index, order in ((0, (1, 0, 2)), (1, (0, 2, 1))):
            for fragment in order:
                workload.trainer.vectors.local[:] = workload.trainer.vectors.theta - 1
                own = bytes(await workload.contribution(fragment))
                await workload.apply(own, index, fragment)
        await workload.contribution(0)

    asyncio.run(story())
    assert [taken.index for taken in told] == [0, 1]
    values = sum(part.stop - part.start for part in FRAGMENTS)
    for taken in told:
        assert taken.statistics.average_norm == pytest.approx(values**0.5, rel=1e-2)
        assert taken.statistics.cosine == pytest.approx(1, rel=1e-5)


def test_statistics_of_fragments_are_those_of_the_whole() -> None:
    average, own = np.random.default_rng(0).standard_normal((2, 100))
    parts = [
        OuterStatistics(
            float(np.linalg.norm(a)),
            3.0,
            float(np.linalg.norm(o)),
            float(a @ o / np.linalg.norm(a) / np.linalg.norm(o)),
        )
        for a, o in zip(np.split(average, [30, 70]), np.split(own, [30, 70]), strict=True)
    ]
    whole = OuterStatistics.together(parts)
    assert whole.average_norm == pytest.approx(np.linalg.norm(average))
    assert whole.pseudo_gradient_norm == pytest.approx(np.linalg.norm(own))
    assert whole.momentum_norm == pytest.approx(27**0.5)
    assert whole.cosine == pytest.approx(average @ own / np.linalg.norm(average) / np.linalg.norm(own))


def test_fragments_of_large_models_can_be_named(small_content: dict[str, Any]) -> None:
    """Regression: no size over a million could be read again, so that a run was signed that nobody could join."""
    small = small_content["model"]["config"]
    large = small | {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
    content = small_content | {"model": small_content["model"] | {"config": large}}
    named = with_sizes_named(RunConfig.from_manifest_content(content | {"streaming": {"layers_per_fragment": 1}}))
    assert max(named.streaming.sizes or ()) > 1_000_000
    assert RunConfig.from_manifest_content(named.to_manifest_content()) == named
