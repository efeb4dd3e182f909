"""What a run would come to for a machine: how that is worked out, and what it means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.doctor.facts import Bandwidth, Gpu, Outlook, Speed
from opendiloco.doctor.findings import Finding, Verdict
from opendiloco.doctor.run_checks import check_round, check_run, check_speed
from opendiloco.doctor.trial import estimated_speed, outlook_of, speed_of, taken_by
from opendiloco.model.build import sized_skeleton
from opendiloco.workers.needs import UTILISATION, needs_of
from peers.values.workload import Progress
from tests.swarm.cli_processes import SMALL_RUN

PASS, WARN, FAIL, SKIPPED = Verdict
OUTLOOK = Outlook(
    inner_steps=100,
    training_seconds=300.0,
    round_seconds=12.0,
    cycle_seconds=312.0,
    sent=10**9,
    joining_seconds=90.0,
    cycles=1,
    peers=3,
    is_supposed=False,
)
TOO_SLOW, NEVER_THERE = replace(OUTLOOK, cycles=0), replace(OUTLOOK, joining_seconds=None)


@pytest.mark.parametrize(
    ("finding", "verdict", "says"),
    [
        (check_run("tiny-x", 1, 3, 12), PASS, "tiny-x: 1 peer there, outer step 3 of 12"),
        (check_run("tiny-x", 2, 12, 12), WARN, "finished"),
        (check_run("tiny-x", 0, 0, 12), PASS, "0 peers"),
        (check_speed(Speed(1234.5, 7)), PASS, "1,234 tokens/s, measured over 7 inner steps"),
        (check_speed(Speed(1e6, 0)), PASS, "estimated"),
        (check_speed(None, "see memory"), SKIPPED, "see memory"),
        (check_round(OUTLOOK), PASS, "5.2 min with 2 others"),
        (check_round(OUTLOOK), PASS, "1 GB up and as much down in each, 277 GB a day; joining takes 90 s"),
        (check_round(replace(OUTLOOK, is_supposed=True, peers=2)), PASS, "one peer like this machine"),
        (check_round(replace(OUTLOOK, cycles=2)), WARN, "one of 2 outer steps"),
        (check_round(TOO_SLOW, is_measured=True), FAIL, "too slow"),
        (check_round(TOO_SLOW, is_measured=False), WARN, "too slow"),
        (check_round(NEVER_THERE, is_measured=True), FAIL, "never catch up"),
        (check_round(None, why_not="the speed is not known"), SKIPPED, "the speed"),
    ],
)
def test_what_facts_mean(finding: Finding, verdict: Verdict, says: str) -> None:
    assert finding.verdict is verdict, finding
    assert says in f"{finding.found}\n{finding.remedy}"
    assert bool(finding.remedy) == (verdict in (WARN, FAIL)), "a remedy where there is something to do"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    path = tmp_path_factory.mktemp("run") / "run.toml"
    path.write_text(SMALL_RUN.format(source="corpus", outer_steps=10, inner_steps=20, peers=1))
    return RunConfig.from_toml(path)


@pytest.fixture(scope="module")
def skeleton(config: RunConfig) -> Any:
    return sized_skeleton(config)


def test_what_a_run_takes_is_what_join_goes_by(config: RunConfig, skeleton: Any) -> None:
    needs = needs_of(config, skeleton)
    on_cpu, on_gpu = taken_by(config, skeleton, 0), taken_by(config, skeleton, 1)
    assert (on_cpu.memory, on_cpu.gpu) == (needs.main_memory_on_cpu, None)
    assert (on_gpu.memory, on_gpu.gpu, on_gpu.disk) == (needs.main_memory, needs.device_memory, needs.disk)


def test_a_speed_is_estimated_from_a_peak_that_is_known(config: RunConfig, skeleton: Any) -> None:
    h100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80, 80, has_bf16=True)
    one, two = (estimated_speed(config, skeleton, [h100] * count) for count in (1, 2))
    flops = needs_of(config, skeleton).token_flops
    assert flops is not None
    assert one is not None
    assert two is not None
    assert one.tokens_per_second == pytest.approx(UTILISATION * 66.9e12 / flops)
    assert two.tokens_per_second == pytest.approx(2 * one.tokens_per_second)
    assert two.steps == 0
    assert estimated_speed(config, skeleton, [replace(h100, name="Something else")]) is None
    assert estimated_speed(config, skeleton, []) is None


def test_the_first_inner_step_does_not_count_unless_it_is_alone() -> None:
    told = [Progress(1, 5.0, 10.0), Progress(2, 5.0, 300.0)]
    assert speed_of([60.0, 61.0, 62.0], told, 32) == Speed(32.0, 2)
    assert speed_of([60.0], told[:1], 32) == Speed(10.0, 1)
    assert speed_of([], [], 32) is None


def outlook(config: RunConfig, skeleton: Any, speed: float, bits: float, *others: float) -> Outlook:
    return outlook_of(config, skeleton, Speed(speed, 5), Bandwidth(bits, bits, "a peer"), 0.05, others)


def test_an_outer_step_is_training_and_a_round(config: RunConfig, skeleton: Any) -> None:
    """20 inner steps of 32 tokens each; two peers send one payload each, of a byte a parameter and a little more."""
    alone = outlook(config, skeleton, 64.0, 1e6)
    assert (alone.is_supposed, alone.peers, alone.inner_steps, alone.cycles) == (True, 2, 20, 1)
    assert alone.training_seconds == pytest.approx(10.0)
    assert alone.cycle_seconds == pytest.approx(10.0 + alone.round_seconds)
    payload = needs_of(config, skeleton).payload
    assert alone.sent == pytest.approx(payload, rel=0.2)
    assert alone.sent_a_day == pytest.approx(alone.sent * 86_400 / alone.cycle_seconds)
    faster_link = outlook(config, skeleton, 64.0, 1e8)
    assert faster_link.round_seconds < alone.round_seconds


def test_others_count_with_the_speed_that_they_tell(config: RunConfig, skeleton: Any) -> None:
    equal, unsaid = (outlook(config, skeleton, 64.0, 1e6, other) for other in (64.0, 0.0))
    assert equal == unsaid
    assert not equal.is_supposed
    behind = outlook(config, skeleton, 64.0, 1e6, 128.0, 128.0)
    assert behind.peers == 3
    assert behind.inner_steps == 10, "half as fast, half as many steps"


def test_a_machine_that_is_far_too_slow_never_counts(config: RunConfig, skeleton: Any) -> None:
    """It makes the smallest lease that there is, and the others do not wait for it."""
    assert outlook(config, skeleton, 1.0, 1e6, 6400.0, 6400.0).cycles == 0
