"""Benchmarks of whole swarms: they run with real peers, report, and count what they should."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import random
import signal
from pathlib import Path
from typing import cast

import click
import pytest
from click.testing import CliRunner

from benchmarks import averaging, churn, join, memory, threads, training, vector_peer
from benchmarks.groups import GLOO, OURS, sent_bytes
from benchmarks.processes import Event, PeerProcess, PeerProcessError, gone, memory_taken
from opendiloco.config.run_config import RunConfig
from opendiloco.host_memory import FETCHED_AT_ONCE, IN_USE, HostMemory
from opendiloco.kernels import INT8
from tests.child_processes import child_processes

TINY = Path(__file__).parent.parent.parent / "examples/tiny.toml"


@pytest.mark.thorough
@pytest.mark.swarm
def test_averaging_reports(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ["--values", "50000", "--peers", "2", "--repetitions", "1", "--without", "hivemind,torchft"]
    done = CliRunner().invoke(averaging.main, [*arguments, "--json", str(figures)], catch_exceptions=False)
    assert done.output.strip().splitlines()[-1].startswith("verdict: ")
    rows = {row["contender"]: row for row in json.loads(figures.read_text())["rows"]}
    assert set(rows) == {OURS, GLOO}
    assert 0 < rows[OURS]["exchange s"] < rows[OURS]["seconds"]
    assert all(row["CPU s/GB"] >= 0 for row in rows.values())
    assert rows[OURS]["peak RSS MB"] > rows[OURS]["before MB"]
    assert not child_processes()


@pytest.mark.thorough
@pytest.mark.swarm
def test_churn_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(churn, "BETWEEN_FAULTS", 1.0)
    monkeypatch.setattr(churn, "DOWN", (0.1, 0.5))
    monkeypatch.setattr(churn, "STOPPED", (0.1, 0.5))
    figures = tmp_path / "figures.json"
    arguments = ["--minutes", "0.1", "--peers", "3", "--logs", str(tmp_path), "--json", str(figures)]
    done = CliRunner().invoke(churn.main, arguments, catch_exceptions=False)
    assert done.output.strip().splitlines()[-1].startswith("verdict: ")
    rows = {row["what"]: row["figure"] for row in json.loads(figures.read_text())["rows"]}
    assert rows["kills"] + rows["stops"] > 0
    assert rows["rounds"] > 0
    assert rows["divergences"] == 0
    assert "left behind" not in done.output
    assert not child_processes()


@pytest.mark.thorough
@pytest.mark.swarm
def test_joining_reports(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ["--values", "1000000", "--rounds", "1", "--pause", "0.1", "--json", str(figures)]
    done = CliRunner().invoke(join.main, arguments, catch_exceptions=False)
    assert done.output.strip().splitlines()[-1].startswith("verdict: ")
    assert "the loopback interface, with our own limits" in done.output
    before, *fetches = json.loads(figures.read_text())["rows"]
    assert before["rounds"] == 1
    assert [row["rounds"] is not None for row in fetches] == [False, True, False]
    assert all(row["seconds"] > 0 for row in fetches)
    assert fetches[0]["bound s"] == pytest.approx(8e6 * 8 / 300e6)
    assert not child_processes()


@pytest.mark.thorough
@pytest.mark.swarm
def test_training_reports(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ["--run", str(TINY), "--steps", "2", "--repetitions", "1", "--by-hand", "--json", str(figures)]
    done = CliRunner().invoke(training.main, arguments, catch_exceptions=False)
    assert done.output.strip().splitlines()[-1].startswith("verdict: ")
    content = json.loads(figures.read_text())
    bare, by_hand, volunteer = content["rows"]
    assert [row["contender"] for row in content["rows"]] == [training.BARE, training.BY_HAND, training.VOLUNTEER]
    assert [row["processes"] for row in content["rows"]] == [1, 1, 2]
    assert by_hand["loss"] == pytest.approx(bare["loss"], rel=1e-4), "it is the same model"
    assert bare[training.MFU] == "unknown", "of a CPU"
    for row in content["rows"]:
        assert row["tokens/s"] == row["slowest turn"] > 0
        assert 0 < row["loss"] < 6
        assert row["memory MB"] > row["formula MB"] > 0
    assert volunteer["of bare"] == pytest.approx(volunteer["tokens/s"] / bare["tokens/s"])
    assert [bar["at_least"] for bar in content["bars"]] == [0.98, 0.98]
    assert not child_processes()


@pytest.mark.thorough
@pytest.mark.swarm
def test_numbers_of_threads_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 1)
    figures = tmp_path / "figures.json"
    arguments = ["--run", str(TINY), "--steps", "2", "--repetitions", "1", "--json", str(figures)]
    done = CliRunner().invoke(threads.main, arguments, catch_exceptions=False)
    assert done.output.strip().splitlines()[-1].startswith("verdict: ")
    rows = json.loads(figures.read_text())["rows"]
    assert [(row["asked for"], row["threads"]) for row in rows] == [("1", 1), (threads.BY_ITSELF, 1)]
    for row in rows:
        assert row["tokens/s"] == row["slowest turn"] > 0
        assert row["latest ms"] == row["late ms"] > 0
    assert not child_processes()


@pytest.mark.parametrize(
    ("cores", "told", "chosen"), [(1, [1], 1), (2, [1, 2], 1), (6, [1, 2, 4, 5, 6], 5), (8, [1, 2, 4, 7, 8], 7)]
)
def test_numbers_of_threads_that_are_tried(cores: int, told: list[int], chosen: int) -> None:
    *others, last = threads.contenders_on(cores).items()
    assert [(name, each.threads) for name, each in others] == [(str(number), number) for number in told]
    assert (last[0], last[1].threads) == (threads.BY_ITSELF, chosen)


def test_the_choice_is_held_against_the_best_that_leaves_a_core() -> None:
    contenders = threads.contenders_on(4)
    for name, seconds in {"1": 2.0, "2": 0.5, "3": 1.0, "4": 0.1, threads.BY_ITSELF: 1.0}.items():
        contenders[name].add({"seconds": seconds, "tokens": 1, "late_seconds": 0.001})
    [bar] = threads.bars_of(contenders, 4)
    assert "with 2," in bar.name
    assert (bar.ratio, bar.at_least) == (0.5, 0.97)


def test_what_training_takes() -> None:
    on_the_cpu = training.Machine("cpu", threads=2, cpu_workers=3, micro_batch=4, compiles=True)
    assert on_the_cpu.loop_arguments == ["--device", "cpu", "--threads", 6, "--micro-batch", 4, "--compile"]
    host = HostMemory(10, INT8).growing
    assert [on_the_cpu.formula(name, 10) for name in (training.BARE, training.VOLUNTEER)] == [160, 160 + host]
    on_a_gpu = training.Machine("cuda:0", threads=1, cpu_workers=1, micro_batch=4, compiles=False)
    assert [on_a_gpu.formula(name, 10) for name in (training.BARE, training.VOLUNTEER)] == [0, host]


def test_a_run_is_made_to_last_and_to_need_one_peer() -> None:
    config = RunConfig.from_toml(TINY)
    config = config.model_copy(update={"rounds": config.rounds.model_copy(update={"minimum_peers": 4})})
    prepared = training.prepared(config, 5, 20)
    assert (prepared.training.inner_steps, prepared.rounds.minimum_peers) == (5, 1)
    assert prepared.total_outer_steps > 20
    assert training.prepared(config, None, 1).training.inner_steps == config.training.inner_steps


def test_runs_that_the_bare_loop_does_not_know_are_refused() -> None:
    config = RunConfig.from_toml(TINY)
    unknown = config.model_copy(update={"training": config.training.model_copy(update={"z_loss": 1e-4})})
    with pytest.raises(click.UsageError, match=r"training\.z_loss = 0\.0001, .* Set z_loss = 0"):
        training.prepared(unknown, None, 1)


LINKS = join.Bandwidths(upload=10, download=25)


def test_a_fetch_is_bound_by_the_joiners_link_or_by_those_of_the_donors() -> None:
    fetch = join.Fetch(began=100.0, ended=112.0)
    assert fetch.seconds == 12
    assert fetch.bound(100, LINKS) == 4
    assert fetch.bound(100, LINKS, busy=3) == 7
    fetch.fetched_before_kill = 50
    assert fetch.bound(100, LINKS) == 2 + 2.5
    assert join.Fetch(0.0).bound(300, join.Bandwidths(upload=10, download=100)) == 10


def test_what_went_on_during_a_fetch() -> None:
    fetch = join.Fetch(began=100.0, ended=110.0)
    spans = [(90.0, 99.0), (90.0, 101.0), (102.0, 104.0), (109.0, 120.0), (111.0, 120.0)]
    assert [fetch.overlap(*span) for span in spans] == [0, 1, 2, 1, 0]


def test_bars_hold_what_was_measured_against_what_was_possible() -> None:
    killed = join.Fetch(0.0, 6.0, fetched_before_kill=50)
    measured = join.FetchMeasurements(
        join.Fetch(0.0, 5.0), join.Fetch(0.0, 9.0), killed, [1.0, 2.0, 9.0], [2.0, 4.0], 1.0
    )
    assert [bar.ratio for bar in join.bars_of(measured, 100, LINKS)] == pytest.approx([0.8, 2 / 3, 0.75 / 0.8])


@pytest.mark.parametrize("namespaces", ["one", "one,two,three", "1,2,3,4,5"])
def test_namespaces_are_three_donors_and_a_joiner(namespaces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "place_in", lambda namespace: namespace)
    with pytest.raises(click.UsageError, match="3 donors' and one joiner's"):
        join.places_in(namespaces, 100, 300)


def entry(index: int, head: str, state: str, time: float) -> Event:
    return {"index": index, "head": head, "state": state, "time": time}


def test_one_index_with_two_heads_or_states_is_a_divergence() -> None:
    record = churn.AppliedEntries()
    for event in [entry(0, "a", "s", 1), entry(0, "a", "s", 2), entry(1, "b", "t", 3), entry(2, "c", "u", 4)]:
        record.add(event)
    assert (record.rounds, record.divergences) == (3, [])
    record.add(entry(1, "b", "other", 3))
    record.add(entry(2, "other", "u", 4))
    assert record.divergences == [1, 2]


def test_a_gap_counts_from_the_first_peer_that_applied_an_entry() -> None:
    record = churn.AppliedEntries()
    for index, time in enumerate([0.0, 1.0, 2.0, 3.0, 7.0]):
        record.add(entry(index, "head", "state", time + 0.5))
        record.add(entry(index, "head", "state", time))
    assert record.gaps == [1.0, 1.0, 1.0, 4.0]
    assert record.stalls == [4.0]


def test_a_run_that_stands_still_until_the_end_stalls() -> None:
    record = churn.AppliedEntries()
    for index in range(5):
        record.add(entry(index, "head", "state", float(index)))
    assert record.share_at_work == 1
    record.measurement_ended_at = 20.0
    assert record.stalls == [16.0]
    assert record.share_at_work == pytest.approx(4 / 20)
    assert churn.AppliedEntries(measurement_ended_at=20.0).share_at_work == 0


def test_no_benchmark_comes_to_the_end_of_its_run() -> None:
    assert vector_peer.run_config().total_outer_steps == vector_peer.OUTER_STEPS


@pytest.mark.parametrize(("at_work", "may_go"), [(4, True), (3, False)])
def test_a_majority_is_at_work_without_the_victim(at_work: int, may_go: bool, tmp_path: Path) -> None:
    record, process = churn.AppliedEntries(), cast(PeerProcess, object())
    volunteers = [churn.RestartingPeer(str(number), [], tmp_path, record, process) for number in range(5)]
    for volunteer in volunteers[:at_work]:
        volunteer.at_work.set()
    for seed in range(20):
        faults = churn.Churn(volunteers, random.Random(seed))
        victim = faults._victim()
        outside = random.Random(seed).choice(volunteers) in volunteers[at_work:]
        assert (victim is not None) == (may_go or outside)


def test_a_peer_that_ends_is_named_with_its_last_words(tmp_path: Path) -> None:
    async def scenario() -> None:
        peer = await PeerProcess.start(["benchmarks.vector_peer", "--values", "many"], tmp_path / "peer.log")
        with pytest.raises(PeerProcessError, match=r"before 'listening': peer.log: .*'many' is not a valid integer"):
            await peer.event("listening", 60)
        await peer.end()

    asyncio.run(scenario())


def test_ended_processes_are_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        peer = await PeerProcess.start(["http.server", "0"], tmp_path / "peer.log")
        assert await gone({peer.process_id}, 0) == {peer.process_id}
        peer.send_signal(signal.SIGKILL)
        await peer.end()
        assert not await gone({peer.process_id}, 10)

    asyncio.run(scenario())


def test_what_a_round_takes() -> None:
    assert sent_bytes(1000, 2) == 1000
    assert sent_bytes(1000, 4) == 1500


@pytest.mark.thorough
@pytest.mark.swarm
def test_memory_reports(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ["--values", "100000", "--hidden", "96", "--layers", "1", "--run", str(TINY), "--json", str(figures)]
    done = CliRunner().invoke(memory.main, arguments, catch_exceptions=False)
    assert done.output.strip().splitlines()[-1].startswith("verdict: ")
    rows = json.loads(figures.read_text())["rows"]
    roles = [memory.VOLUNTEER] * 5 + [memory.JOINER] + [memory.FOLLOWER] * 2 + [memory.CPU_VOLUNTEER]
    assert [row["role"] for row in rows] == roles
    assert all(row["MB"] > 0 for row in rows)
    assert not child_processes()


def test_memory_is_held_against_the_formula_from_both_sides() -> None:
    fixed = IN_USE + FETCHED_AT_ONCE
    rows = [
        memory.row_of(memory.VOLUNTEER, memory.TRAINING, fixed + 16 * 10**8, 10**8, round((fixed + 16 * 10**8) / 0.8)),
        memory.row_of(memory.FOLLOWER, memory.FETCHING, taken=300, parameters=10, formula=240),
    ]
    assert [bar.ratio for bar in memory.bars_of(rows)] == pytest.approx([20 / 16, 0.8, 0.8])
    assert [bar.is_met for bar in memory.bars_of(rows)] == [True, False, False]


def test_memory_in_files_that_processes_share_counts_once() -> None:
    before = memory_taken(os.getpid())
    descriptor = os.memfd_create("diloco-peer")
    os.truncate(descriptor, 1 << 26)
    mapped = [mmap.mmap(descriptor, 1 << 26) for _ in range(2)]
    os.close(descriptor)
    assert 0.99 < (memory_taken(os.getpid()) - before) / (1 << 26) < 1.2, "whole, though nothing was written"
    assert len(mapped) == 2
