"""Error feedback: what payloads leave out is made up for."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from opendiloco import kernels
from opendiloco.config.run_config import RunConfig
from opendiloco.host_memory import HostMemory
from opendiloco.local_workload import LocalWorkload
from opendiloco.outer.residuals import Residuals
from tests.opendiloco.threaded_workers import ThreadedWorkers

PARTS = (slice(0, 3), slice(1024, 1026))


def test_a_share_of_what_was_left_out_comes_back() -> None:
    residuals = Residuals(0.5, PARTS)
    first, second = residuals.of(0), residuals.of(1)
    assert first is not None
    assert second is not None
    assert (first.tolist(), second.tolist()) == ([0, 0, 0], [0, 0])
    first[:], second[:] = (1, 2, 4), (8, 8)
    assert residuals.of(0) is first
    assert first.tolist() == [0.5, 1, 2]
    residuals.forget(0)
    assert (first.tolist(), second.tolist()) == ([0, 0, 0], [8, 8])
    residuals.forget_all()
    assert second.tolist() == [0, 0]


def test_without_it_there_is_none_and_it_takes_no_memory() -> None:
    residuals = Residuals(0.0, PARTS)
    residuals.forget_all()
    assert residuals.of(0) is None


def config_with(small_content: dict[str, Any], **codec: Any) -> RunConfig:
    return RunConfig.from_manifest_content(small_content | {"codec": {"kind": "e3m0"} | codec})


def test_it_takes_four_bytes_a_parameter(small_content: dict[str, Any]) -> None:
    without, feedback = config_with(small_content), config_with(small_content, error_feedback=0.5)
    more = HostMemory.of(1000, feedback.codec).most - HostMemory.of(1000, without.codec).most
    assert more == 4 * 1000


def told(workload: LocalWorkload, counts: bool) -> tuple[bytes, bytes]:
    """Return two contributions of the same difference; the first is in the average or not."""

    async def story() -> tuple[bytes, bytes]:
        vectors = workload.trainer.vectors
        difference = np.random.default_rng(0).standard_normal(vectors.theta.size).astype(np.float32)
        contributions = []
        for _ in range(2):
            vectors.local[:] = vectors.theta - difference
            contributions.append(bytes(await workload.contribution()))
            nothing = kernels.Payload(kernels.E3M0, difference.size)
            kernels.quantize(np.zeros_like(difference), nothing)
            await workload.apply(bytes(nothing.buffer), 0, counts=counts)
        return contributions[0], contributions[1]

    return asyncio.run(story())


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("counts", [True, False])
def test_what_did_not_count_is_not_made_up_for(small_content: dict[str, Any], share: float, counts: bool) -> None:
    async def made() -> LocalWorkload:
        config = config_with(small_content, error_feedback=share)
        return LocalWorkload(ThreadedWorkers(config), config)

    first, second = told(asyncio.run(made()), counts)
    assert (first != second) == (share > 0 and counts)


def test_what_a_fragment_left_out_is_in_the_payloads_that_follow(small_content: dict[str, Any]) -> None:
    """Four bits round small values to zero for ever; with feedback they come through on average."""
    theta, local = np.zeros(1024, np.float32), np.full(1024, -0.004, np.float32)
    local[0] = -1.0
    sent = np.zeros((200, 1024), np.float32)
    residual = np.zeros(1024, np.float32)
    for row in sent:
        payload = kernels.Payload(kernels.E3M0, 1024)
        kernels.quantize_difference(theta, local, payload, residual=residual)
        kernels.dequantize(payload, row)
    assert sent[:, 1:].mean() == pytest.approx(0.004, rel=0.05)
