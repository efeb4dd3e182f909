"""What a peer takes of main memory: the formula, and the table in the documentation that states it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from opendiloco.host_memory import HostMemory, WorkerMemory
from opendiloco.kernels import INT8, UINT4
from opendiloco.quantities import OptimizerState

MIB = 1 << 20
BILLION = HostMemory(10**9, INT8)
DOCUMENTED = Path(__file__).parent.parent.parent / "docs/training.md"


def test_a_volunteer_with_a_billion_parameters_trains_beside_24_gigabytes() -> None:
    assert BILLION.most <= 20e9
    assert HostMemory(10**9, UINT4).most < BILLION.most


def test_small_models_keep_payloads_within_a_budget_and_snapshots_in_memory() -> None:
    small = HostMemory(1024 * 1000, INT8)
    assert small.kept == 64 * MIB // 1_028_000 * 1_028_000
    assert small.snapshot == 8 * 1024 * 1000
    assert HostMemory(0, INT8).kept == 0


@pytest.mark.parametrize(
    ("memory", "training"),
    [
        (WorkerMemory(10, 10), 160),
        (WorkerMemory(10, 8), 136),
        (WorkerMemory(10, 10, largest=4), 160 + 32),
        (WorkerMemory(10, 10, largest=4, is_fused=True), 160),
        (WorkerMemory(10, 10, largest=4, is_fused=True, copied=10), 160 + 40),
        (WorkerMemory(10, 10, head=4), 160 + 16),
        (WorkerMemory(10, 10, head=4, copied=10), 160 + 20 + 24),
        (WorkerMemory(10, 10, head=4, logits=5), 160 + 16 + 60),
        (WorkerMemory(10, 10, head=4, tied=4, copied=4), 160 + 16 + 48),
        (WorkerMemory(10, 10, head=4, embedding=8, copied=10), 160 + 40 + 32),
        (WorkerMemory(10, 10, head=4, tied=4, logits=5), 160 + 16 + 60),
        (WorkerMemory(10, 10, largest=4, gathered=5), 160 + 40),
        (WorkerMemory(10, 10, gathered=5, gathering_on_cpu=1), 160 + 40),
        (WorkerMemory(10, 10, gathered=5, whole_gradients=20), 160 + 20 + 80),
        (WorkerMemory(10, 10, gathered=5, gathering_on_cpu=3), 160 + 40 + 2 * 250),
        (WorkerMemory(10, 10, largest=4, optimizer_state="host"), 80 + 32 + 32),
        (WorkerMemory(10, 10, largest=4, optimizer_state="host", is_fused=True), 80 + 32),
        (WorkerMemory(10, 10, largest=4, optimizer_state="host", is_fused=True, copied=10), 80 + 40),
        (WorkerMemory(10, 10, largest=4, optimizer_state="8bit", is_fused=True), 80 + 20 + 32 + 4 * 41),
        (WorkerMemory(10, 10, largest=1 << 23, optimizer_state="8bit", is_fused=True), 100 + (8 << 23) + (41 << 21)),
    ],
)
def test_workers_take_weights_gradients_moments_and_what_a_step_or_a_pass_needs(
    memory: WorkerMemory, training: int
) -> None:
    assert memory.training == training
    assert memory.evaluating == 40


def test_moments_are_in_main_memory_if_they_are_kept_there() -> None:
    kept: tuple[OptimizerState, ...] = get_args(OptimizerState)
    assert [WorkerMemory(10, 8, optimizer_state=each).on_host for each in kept] == [0, 64, 0]


def test_the_documentation_states_what_the_formula_gives() -> None:
    """The last column of its table, in GB for a billion parameters."""
    table = DOCUMENTED.read_text(encoding="utf-8").split("for 10⁹ parameters, GB |", 1)[1].split("\n\n", 1)[0]
    stated = [float(cell) for cell in re.findall(r"\| ([0-9.]+) \|$", table, re.MULTILINE)]
    taken = [
        BILLION.training,
        BILLION.late,
        BILLION.joining,
        BILLION.beginning_to_follow,
        BILLION.following,
        BILLION.evaluating,
        BILLION.archive,
    ]
    assert stated == [round(each / 1e9, 1) for each in taken]
