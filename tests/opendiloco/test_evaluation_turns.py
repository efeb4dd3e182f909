"""Peers evaluate theta in turn, before they train from it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import numpy as np
import pytest

from opendiloco.config.run_config import EvaluationSection, RunConfig
from opendiloco.evaluation_turns import is_our_turn
from opendiloco.run import Run
from opendiloco.view.run_view import RunView, held_out_lines
from opendiloco.volunteer.local_workload import LocalWorkload
from opendiloco.workers.control import Evaluated
from opendiloco.workers.group import WorkerGroup
from opendiloco.workers.telemetry import Telemetry
from peers.presence.heartbeat import HeldOutLoss
from peers.values.identity import Identity
from peers.values.leases import SampleRange
from peers.values.workload import InnerLoop, Progress, Trained
from tests.opendiloco.workers.trainings import NotingTracker
from tests.peers.heartbeats import beat
from tests.peers.logs import log_at


def test_each_time_another_peer_evaluates_and_all_know_which() -> None:
    section = EvaluationSection(every=2)
    turns = [[peer for peer in "abc" if is_our_turn(peer, log_at(index), section)] for index in range(9)]
    assert turns == [[], [], ["b"], [], ["c"], [], ["a"], [], ["b"]]


def test_nobody_evaluates_where_the_manifest_does_not_say_so() -> None:
    assert not any(is_our_turn(peer, log_at(6), EvaluationSection(every=0)) for peer in "abc")
    assert not is_our_turn("stranger", log_at(6), EvaluationSection(every=1))


@pytest.fixture
def run(small_config: RunConfig) -> Run:
    return Run.sign(small_config.model_copy(update={"outer_steps": 40}), Identity.generate())


def found(run: Run, *said: HeldOutLoss | None) -> RunView:
    """The view of a run whose peers, after outer step 17, have found these losses."""
    return RunView(
        run, [beat(peer, log_at(17), held_out=held_out) for peer, held_out in zip("abcd", said, strict=False)]
    )


def test_the_newest_finding_is_shown(run: Run) -> None:
    view = found(
        run, HeldOutLoss(index=8, loss=2.0), None, HeldOutLoss(index=16, loss=1.5), HeldOutLoss(index=0, loss=3.0)
    )
    assert held_out_lines(view) == ["held-out loss 1.500 (perplexity 4.5) after outer step 16"]
    [line] = held_out_lines(view, bytes_per_token=2.0)
    assert line == "held-out loss 1.500 (perplexity 4.5, 1.082 bits per byte) after outer step 16"
    assert held_out_lines(found(run, None)) == []


def test_one_peer_cannot_say_what_was_found_where_nothing_was_due(run: Run) -> None:
    said = (HeldOutLoss(index=8, loss=2.0), HeldOutLoss(index=9, loss=0.1), HeldOutLoss(index=8 * 10**6, loss=0.1))
    assert held_out_lines(found(run, *said)) == ["held-out loss 2.000 (perplexity 7.4) after outer step 8"]


@pytest.mark.parametrize("loss", [1e300, -1e300])
def test_whatever_others_claim_can_be_shown(run: Run, loss: float) -> None:
    assert len(held_out_lines(found(run, HeldOutLoss(index=8, loss=loss)))) == 1


class Workers(WorkerGroup):
    """Note what is asked of them."""

    def __init__(self) -> None:
        zeros = np.zeros(10, np.float32)
        self.fragments = [slice(0, zeros.size)]
        self.vectors = type("Vectors", (), {"theta": zeros, "local": zeros.copy()})()
        self.asked: list[str] = []
        self.telemetry = Telemetry(inner_steps=10)
        self.held_out_digest = "ab" * 32

    loss = 2.5

    async def evaluate(self, windows: int) -> Evaluated:
        self.asked.append(f"evaluate {windows}")
        return Evaluated(loss=self.loss, tokens=100)

    async def run_inner_loop(
        self,
        work: InnerLoop,
        on_progress: Callable[[Progress], None],
        on_captured: object = None,
        from_local: bool = False,
        goes_on: bool = False,
    ) -> Trained:
        self.asked.append(f"train {work.index}")
        return Trained(work.samples, 16, 1.0)


def test_who_has_the_turn_evaluates_theta_before_training_changes_anything(small_config: RunConfig) -> None:
    async def story() -> None:
        workers = Workers()
        workload = LocalWorkload(workers, small_config)
        found: list[HeldOutLoss] = []
        workload.on_evaluated = found.append
        tracker = NotingTracker()
        workers.telemetry.trackers.append(tracker)
        for turn in (False, True):
            workload.is_our_turn = lambda turn=turn: turn  # type: ignore[misc]
            await workload.run_inner_loop(InnerLoop(3 + turn, (SampleRange(0, 1),), 1, 0), lambda progress: None)
        assert workers.asked == ["train 3", f"evaluate {small_config.evaluation.windows}", "train 4"]
        assert found == [HeldOutLoss(index=4, loss=2.5)]
        assert tracker.records == [(40, {"held_out/loss": 2.5})]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("named", "replaced", "heard"),
    [(None, False, True), (None, True, False), ("ab" * 32, False, True), ("cd" * 32, False, False)],
)
def test_a_loss_of_other_text_is_called_so_and_kept_from_the_others(
    small_config: RunConfig, named: str | None, replaced: bool, heard: bool, caplog: pytest.LogCaptureFixture
) -> None:
    evaluation = small_config.evaluation.model_copy(update={"digest": named})

    async def story() -> None:
        workers, found, tracker = Workers(), list[HeldOutLoss](), NotingTracker()
        workers.telemetry.trackers.append(tracker)
        workload = LocalWorkload(workers, small_config.model_copy(update={"evaluation": evaluation}))
        workload.is_our_turn, workload.on_evaluated = lambda: True, found.append
        workers.reads_runs_text = not replaced
        await workload.run_inner_loop(InnerLoop(4, (SampleRange(0, 1),), 1, 0), lambda progress: None)
        assert found == [HeldOutLoss(index=4, loss=2.5)][:heard]
        assert tracker.records == [(40, {"held_out/loss" if heard else "own_held_out/loss": 2.5})]

    with caplog.at_level(logging.INFO):
        asyncio.run(story())
    assert ("on another text than the run's" in caplog.text) != heard


def test_nobody_is_told_of_a_loss_that_is_no_number(small_config: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: the answer could not be read, and the worker was taken for dead."""

    async def story() -> None:
        workers, found = Workers(), list[HeldOutLoss]()
        workers.loss = float("nan")
        workload = LocalWorkload(workers, small_config)
        workload.is_our_turn, workload.on_evaluated = lambda: True, found.append
        await workload.run_inner_loop(InnerLoop(4, (SampleRange(0, 1),), 1, 0), lambda progress: None)
        assert found == []
        assert workers.asked[-1] == "train 4"

    asyncio.run(story())
    assert "the held-out loss after outer step 4 is nan; it is not published" in caplog.text
