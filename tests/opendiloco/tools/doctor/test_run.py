"""Checks of a run against a machine: what it would come to, and how that is worked out."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.model.build import sized_skeleton
from opendiloco.run import Run
from opendiloco.settings.join_settings import JoinSettings
from opendiloco.shared_memory import cap_memory
from opendiloco.tools.doctor import examination
from opendiloco.tools.doctor.examination import (
    Examination,
    _check_round,
    _check_run,
    _check_speed,
    _estimated_speed,
    _plan_among,
    _size,
    _Speed,
    _speed_of,
)
from opendiloco.tools.doctor.findings import Finding, Verdict
from opendiloco.tools.doctor.machine import check_disk, check_memory
from opendiloco.tools.doctor.network import Bandwidth
from opendiloco.tools.doctor.torch_probe import Gpu
from opendiloco.tools.plan import PeerGroup, Plan, forecast
from opendiloco.view.run_view import RunView
from opendiloco.workers.needs import UTILISATION, needs_of
from opendiloco.workers.options import WorkerOptions
from peers.errors import AdmissionError
from peers.presence.heartbeat import PeerState
from peers.values.identity import Identity
from peers.values.manifest import Invite
from peers.values.tickets import Ticket
from peers.values.workload import Progress
from tests.opendiloco.view.test_agreement import beat
from tests.swarm.cli_processes import SMALL_RUN

PASS, WARN, FAIL, SKIPPED = Verdict
GB, DAY = 10**9, 86_400
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 * GB, 80 * GB, has_bf16=True)


def assert_finding(finding: Finding, verdict: Verdict, says: str) -> None:
    assert finding.verdict is verdict, finding
    assert says in f"{finding.found}\n{finding.remedy}"
    assert bool(finding.remedy) == (verdict in (WARN, FAIL)), "a remedy where there is something to do"


@pytest.mark.parametrize(
    ("positions", "verdict", "says"),
    [
        ([3], PASS, ": 1 peer, outer step 3 of 12"),
        ([11, 12], WARN, "finished"),
        ([], PASS, "0 peers, outer step 0"),
        ([-7], PASS, "0 peers and 1 archive, outer step 7 of 12"),
        ([3, -4], PASS, "1 peer and 1 archive, outer step 4 of 12"),
        ([-12], WARN, "finished"),
    ],
)
def test_a_run(positions: list[int], verdict: Verdict, says: str, config: RunConfig) -> None:
    """Archives have negative positions."""
    run = Run.sign(config.model_copy(update={"outer_steps": 12}), Identity.generate())
    beats = [
        beat(f"peer{number}", abs(index), state=PeerState.ARCHIVING if index < 0 else PeerState.TRAINING)
        for number, index in enumerate(positions)
    ]
    assert_finding(_check_run(RunView(run, beats)), verdict, says)


def test_a_format_that_the_run_does_not_have(config: RunConfig) -> None:
    run = Run.sign(config, Identity.generate())
    allowed = config.codec.contributions
    assert_finding(_check_run(RunView(run, []), "e9m9"), FAIL, f"--contribution-format: {', '.join(allowed)}.")
    assert_finding(_check_run(RunView(run, []), allowed[-1]), PASS, "0 peers")


def test_a_run_that_only_an_archive_keeps_is_as_far_as_the_archive(config: RunConfig) -> None:
    """Regression: at outer step 174 `doctor` said 0."""
    run = Run.sign(config.model_copy(update={"outer_steps": 12}), Identity.generate())
    archive = beat("z", 7).model_copy(update={"state": PeerState.ARCHIVING})
    assert_finding(_check_run(RunView(run, [archive])), PASS, "0 peers and 1 archive, outer step 7 of 12")


@pytest.mark.parametrize(
    ("finding", "verdict", "says"),
    [
        (_check_speed(_Speed(1234.5, 7)), PASS, "1,234 tokens/s, measured over 7 inner steps"),
        (_check_speed(_Speed(1e6, 0)), PASS, "estimated"),
        (_check_speed(_Speed(9.0, 7, "no Python.h.")), WARN, "not compiling, which would be faster: no Python.h."),
        (_check_speed(None, "see memory"), SKIPPED, "see memory"),
    ],
)
def test_a_speed(finding: Finding, verdict: Verdict, says: str) -> None:
    assert_finding(finding, verdict, says)


def plan(mbit: float = 800.0, step_seconds: float = 3.0, latency: float = 0.0, others: int = 2) -> Plan:
    """A gigabyte of int8, and others that take three seconds a step."""
    own, other = (
        PeerGroup("", count, 1e6 * mbit, 1e6 * mbit, latency, step)
        for count, step in ((1, step_seconds), (others, 3.0))
    )
    return Plan(
        *((GB,), (own, other), 100, 1000),
        smallest_share=0.125,
        snapshot_every=4,
        bits=8,
        formats=("int8", "e2m1", "sparse"),
        thinner=(4.0, 0.25),
    )


def thin(up: float) -> Plan:
    """The same with 200 Mbit/s, and another uplink of this machine."""
    usual = plan(mbit=200.0, others=3)
    longer = replace(usual.timing, round_timeout=600.0)
    return replace(usual, timing=longer, peers=(replace(usual.peers[0], up=1e6 * up), *usual.peers[1:]))


@pytest.mark.parametrize(
    ("planned", "is_measured", "verdict", "says"),
    [
        (plan(), True, PASS, "5.25 min with 2 others"),
        (plan(), True, PASS, "1.33 GB up and 1.33 GB down in each, 365 GB up a day; its uplink"),
        (plan(), True, PASS, "; its uplink sends contributions in int8, 10.5 s of 21.1 s; joining"),
        (thin(90.0), True, PASS, "500 MB up and 1 GB down in each, "),
        (thin(90.0), True, PASS, "; its uplink sends contributions in e2m1, 46.8 s of 84.2 s; joining"),
        (thin(1.0), True, WARN, "the uplink is too thin"),
        (plan(step_seconds=36.0), True, WARN, "its work counts in one of 2 outer steps"),
        (plan(step_seconds=60.0), True, FAIL, "too slow"),
        (plan(step_seconds=60.0), False, WARN, "too slow"),
        (plan(mbit=0.1), True, FAIL, "never catch up"),
        (plan(mbit=0.1), False, WARN, "never catch up"),
    ],
)
def test_a_round(planned: Plan, is_measured: bool, verdict: Verdict, says: str) -> None:
    assert_finding(_check_round(planned, is_peer_assumed=False, is_speed_measured=is_measured), verdict, says)


@pytest.mark.parametrize(
    ("monthly", "verdict", "says"),
    [
        ((3650.0 * GB, None), WARN, "the limit of --monthly-upload is reached after 10.0 days"),
        ((None, 365.0 * GB), WARN, "the limit of --monthly-download is reached after 1.0 days"),
        ((12_000.0 * GB, 12_000.0 * GB), PASS, "365 GB up a day"),
    ],
)
def test_a_monthly_limit(monthly: tuple[float | None, float | None], verdict: Verdict, says: str) -> None:
    assert_finding(_check_round(plan(), is_peer_assumed=False, is_speed_measured=True, monthly=monthly), verdict, says)


def test_where_nobody_is_one_peer_like_this_machine_is_supposed() -> None:
    found = _check_round(plan(others=1), is_peer_assumed=True, is_speed_measured=True)
    assert_finding(found, PASS, "with one peer like this machine, since the run has no peer now")
    sent, cycle = found.values["sent_bytes"], found.values["outer_step_seconds"]
    assert isinstance(sent, float)
    assert isinstance(cycle, float)
    assert found.values["sent_bytes_a_day"] == pytest.approx(sent / cycle * DAY)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    path = tmp_path_factory.mktemp("run") / "run.toml"
    path.write_text(SMALL_RUN.format(source="corpus", outer_steps=10, inner_steps=20, peers=1))
    return RunConfig.from_toml(path)


@pytest.fixture(scope="module")
def skeleton(config: RunConfig) -> Any:
    return sized_skeleton(config)


def test_what_a_run_takes_is_what_join_goes_by(config: RunConfig, skeleton: Any, tmp_path: Path) -> None:
    needs = needs_of(config, skeleton)
    assert [_size(config, gpus, WorkerOptions())[1] for gpus in (0, 1)] == [needs, needs]
    on_cpu, on_gpu = (check_memory([H100] * gpus, needs).values for gpus in (0, 1))
    assert (on_cpu["needed"], "gpu_needed" in on_cpu) == (needs.main_memory_on_cpu, False)
    assert (on_gpu["needed"], on_gpu["gpu_needed"]) == (needs.main_memory, needs.device_memory)
    assert check_disk(tmp_path, needs).values["needed"] == needs.disk


def test_memory_is_checked_within_the_owners_limit(config: RunConfig, skeleton: Any) -> None:
    """Regression: `doctor --max-memory 0.2` passed with all the memory that was free."""
    heard: list[Finding] = []
    settings = JoinSettings(run="", max_memory=0.001)
    made = Examination(settings, None, Identity.generate(), False, heard.append, lambda what: None)
    try:
        asyncio.run(made._examine_training(None))
        assert_finding(heard[0], WARN, "raise --max-memory to ")
        assert_finding(check_memory((), needs_of(config, skeleton)), FAIL, "The program itself uses ")
    finally:
        cap_memory(None)


@pytest.mark.parametrize(
    ("is_of_run", "is_for_one", "remedy"),
    [(True, None, "Own."), (True, True, "Own."), (True, False, "Renew."), (False, True, "Renew.")],
)
def test_a_new_keys_remedy_does_not_hide_that_of_a_ticket(
    is_of_run: bool,
    is_for_one: bool | None,
    remedy: str,
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Regression: with an expired ticket it was to leave the run, or to make a key."""
    organiser, key, heard = Identity.generate(), Identity.generate(), list[Finding]()
    run = Run.sign(config, organiser)
    ticket = None
    if is_for_one is not None:
        to = Identity.generate().peer_id if is_for_one else None
        ticket = str(Ticket.give(run.run_id if is_of_run else "other-0123456789abcdef", organiser, 1, to))
    monkeypatch.setattr(examination, "find_run", AsyncMock(return_value=run))
    monkeypatch.setattr(examination, "enter", AsyncMock(side_effect=AdmissionError("", "Renew.")))
    settings = JoinSettings(run="", ticket=ticket, state=tmp_path)
    made = Examination(settings, Invite(run.run_id, ()), key, False, heard.append, lambda what: None, "Own.")
    asyncio.run(made._find(Mock(heartbeats=AsyncMock(return_value=[])), run.run_id))
    assert [each.remedy for each in heard if each.name == "admission"] == [remedy]


def test_a_speed_is_estimated_from_a_peak_that_is_known(config: RunConfig, skeleton: Any) -> None:
    needs = needs_of(config, skeleton)
    one, two = (_estimated_speed(needs, [H100] * count) for count in (1, 2))
    flops = needs.token_flops
    assert flops is not None
    assert one is not None
    assert two is not None
    assert one.tokens_per_second == pytest.approx(UTILISATION * 66.9e12 / flops)
    assert two.tokens_per_second == pytest.approx(2 * one.tokens_per_second)
    assert two.steps == 0
    assert _estimated_speed(needs, [replace(H100, name="Something else")]) is None
    assert _estimated_speed(needs, []) is None


def test_the_first_inner_step_does_not_count_unless_it_is_alone() -> None:
    told = [Progress(1, 5.0, 10.0), Progress(2, 5.0, 300.0)]
    assert _speed_of([60.0, 61.0, 62.0], told, 32) == _Speed(32.0, 2)
    assert _speed_of([60.0], told[:1], 32) == _Speed(10.0, 1)
    assert _speed_of([], [], 32) is None


def test_the_owners_limits_are_part_of_the_link() -> None:
    link = Bandwidth(up=50e6, down=400e6, measured_with="a peer")
    assert link.within(20.0, None) == replace(link, up=20e6)
    assert link.within(100.0, 100.0) == replace(link, down=100e6)


def planned(config: RunConfig, skeleton: Any, speed: float, bits: float, *others: float) -> Plan:
    return _plan_among(config, skeleton, _Speed(speed, 5), Bandwidth(bits, bits, "a peer"), 0.05, others)


def test_an_outer_step_is_training_and_a_round(config: RunConfig, skeleton: Any) -> None:
    """20 inner steps of 32 tokens each; two peers send one payload each, of a byte a parameter and a little more."""
    alone = planned(config, skeleton, 64.0, 1e6)
    found, own = forecast(alone), forecast(alone).peers[0]
    assert (alone.count, own.inner_steps, own.cycles) == (2, 20, 1)
    assert alone.training_seconds(alone.peers[0]) == pytest.approx(10.0)
    assert found.cycle_seconds == pytest.approx(10.0 + found.round_seconds)
    assert own.sent_bits / 8 == pytest.approx(needs_of(config, skeleton).host.payload, rel=0.2)
    assert forecast(planned(config, skeleton, 64.0, 1e8)).round_seconds < found.round_seconds


def test_others_count_with_the_speed_that_they_tell(config: RunConfig, skeleton: Any) -> None:
    equal, unsaid = (planned(config, skeleton, 64.0, 1e6, other) for other in (64.0, 0.0))
    assert equal == unsaid
    behind = planned(config, skeleton, 64.0, 1e6, 128.0, 128.0)
    assert behind.count == 3
    assert behind.own_steps(behind.peers[0]) == 10, "half as fast, half as many steps"


def test_a_machine_that_is_far_too_slow_never_counts(config: RunConfig, skeleton: Any) -> None:
    """It makes the smallest lease that there is, and the others do not wait for it."""
    assert forecast(planned(config, skeleton, 1.0, 1e6, 6400.0, 6400.0)).peers[0].cycles == 0
