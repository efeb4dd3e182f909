"""How many inner steps after a fragment was taken a machine merges its average."""

from __future__ import annotations

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.errors import MachineError
from opendiloco.workers.control import InnerLoopDone
from opendiloco.workers.group import SEEN, Overlap
from opendiloco.workers.options import parse_overlap
from tests.opendiloco.workers.trainings import training_done


def config_with(small_config: RunConfig, overlap: int, inner_steps: int = 10) -> RunConfig:
    return small_config.changed({"streaming": {"overlap": overlap}, "training": {"inner_steps": inner_steps}})


@pytest.mark.parametrize(("own", "steps"), [(None, 2), ("auto", 2), ("1", 1), ("9", 9)])
def test_it_is_the_runs_or_the_owners(small_config: RunConfig, own: str | None, steps: int) -> None:
    assert Overlap(config_with(small_config, 2), own).steps == steps


def training(longest: float, waited: float = 0.0) -> InnerLoopDone:
    """Four inner steps that take half a second each, beside waiting."""
    return training_done(
        seconds=2.0 + waited, longest_average_seconds=longest, average_wait_seconds=waited, late_averages=waited > 0
    )


def test_auto_follows_what_averages_have_lately_taken(small_config: RunConfig) -> None:
    overlap = Overlap(config_with(small_config, 2), "auto")
    overlap.learn(training(0.4))
    assert overlap.steps == 1
    overlap.learn(training(2.2, waited=1.7))
    assert overlap.steps == 5
    for _ in range(SEEN - 1):
        overlap.learn(training(0.9))
        assert overlap.steps == 5
    overlap.learn(training(0.9))
    assert overlap.steps == 2


def test_auto_stays_within_a_cycle(small_config: RunConfig) -> None:
    overlap = Overlap(config_with(small_config, 2), "auto")
    overlap.learn(training(600.0, waited=598.0))
    assert overlap.steps == 9


def test_a_training_without_averages_says_nothing(small_config: RunConfig) -> None:
    overlap = Overlap(config_with(small_config, 2), "auto")
    overlap.learn(training(0.0))
    assert overlap.steps == 2


@pytest.mark.parametrize("own", [None, "4"])
def test_what_was_chosen_does_not_follow(small_config: RunConfig, own: str | None) -> None:
    overlap = Overlap(config_with(small_config, 2), own)
    before = overlap.steps
    overlap.learn(training(2.2, waited=1.7))
    assert overlap.steps == before


def test_in_a_run_that_waits_auto_waits_and_a_number_is_refused(small_config: RunConfig) -> None:
    waiting = Overlap(config_with(small_config, 0), "auto")
    waiting.learn(training(2.0, waited=2.0))
    assert waiting.steps == 0
    with pytest.raises(MachineError, match="--overlap 3: in this run peers wait for averages") as caught:
        Overlap(config_with(small_config, 0), "3")
    assert "Leave --overlap out" in caught.value.remedy


def test_an_overlap_as_long_as_a_cycle_is_refused(small_config: RunConfig) -> None:
    with pytest.raises(MachineError, match=r"--overlap 10 is not below the run's training.inner_steps = 10") as caught:
        Overlap(config_with(small_config, 2), "10")
    assert "Choose at most 9, or auto" in caught.value.remedy


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "two", "", "\u0663"])
def test_what_is_no_overlap_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="neither auto nor a number of inner steps"):
        parse_overlap(text)
