"""The trainer alone: leases in, work out, and what is lost of it."""

from __future__ import annotations

from dataclasses import replace

from peers.log.settings import RunSettings
from peers.protocol.effects import StopTraining, TokensLost, Train
from peers.protocol.events import TrainingDone, TrainingProgress
from peers.protocol.internal import Leased, WorkEnds
from peers.protocol.trainer import STUCK, Trainer, TrainerState
from peers.values.leases import SampleRange
from peers.values.workload import Progress, Trained
from tests.peers.builders import context
from tests.peers.logs import LOG, SETTINGS, TIMING, TOKENS, first_log, member, next_header

LEASE = (SampleRange(20, 40),)
FASTEST = 1000.0


class Bench:
    """b's trainer."""

    def __init__(self, settings: RunSettings = SETTINGS) -> None:
        self.context = context("b", settings)
        self.trainer = Trainer(self.context)

    def training(self, steps: int = 10) -> Bench:
        self.trainer.take(Leased(LOG, LEASE, steps))
        return self

    def at_step(self, inner_step: int, speed: float = FASTEST) -> Bench:
        self.trainer.take(TrainingProgress(Progress(inner_step, 2.0, speed)))
        return self

    def trained(self, after: float = 8.0) -> Bench:
        self.context.now += after
        self.trainer.take(TrainingDone(Trained(LEASE, TOKENS, 2.0)))
        return self


def test_a_lease_is_trained_from_where_the_log_is() -> None:
    bench = Bench()
    log = first_log()
    bench.trainer.take(Leased(log, log.leases["b"], 7))
    assert bench.context.take_effects() == [Train(1, log.leases["b"], 7, log.lineage_tokens)]
    assert bench.trainer.state is TrainerState.TRAINING


def test_work_counts_as_it_is_done() -> None:
    bench = Bench().training()
    assert bench.trainer.work == 0
    assert bench.at_step(5).trainer.work == 10 * SETTINGS.tokens_per_sample, "half of the lease"
    assert bench.trained().trainer.work == TOKENS


def test_what_is_in_an_entry_is_not_lost() -> None:
    bench = Bench().training().trained()
    bench.trainer.in_vain = 3
    bench.context.take_effects()
    bench.trainer.take(WorkEnds(LOG.position, next_header(LOG, [member("b", 20, 40)])))
    assert bench.context.take_effects() == []
    assert (bench.trainer.state, bench.trainer.in_vain, bench.trainer.lease) == (TrainerState.IDLE, 0, None)


def test_work_that_ends_in_the_middle_is_stopped_and_lost() -> None:
    bench = Bench().training().at_step(5)
    bench.context.take_effects()
    bench.trainer.take(WorkEnds(LOG.position, next_header(LOG, [member("a", 0, 20)])))
    stop, lost = bench.context.take_effects()
    assert isinstance(stop, StopTraining)
    assert isinstance(lost, TokensLost)
    assert (lost.what, lost.tokens, bench.trainer.in_vain) == ("work", TOKENS // 2, 1)


def test_what_a_stopped_worker_still_reports_is_void_but_for_its_speed() -> None:
    bench = Bench().training()
    bench.trainer.take(WorkEnds(LOG.position))
    bench.at_step(9, speed=77.0).trained()
    assert (bench.trainer.state, bench.trainer.trained, bench.trainer.work) == (TrainerState.IDLE, None, 0)
    assert bench.trainer.speed == 77.0


def test_the_last_inner_steps_of_an_overlap_are_no_hang_and_tell_the_speed() -> None:
    """Regression: a peer that was given its next lease while it took them gave its say up after a minute."""
    bench = Bench(replace(SETTINGS, timing=replace(TIMING, partition_grace=60.0))).training().at_step(1).trained()
    bench.trainer.take(WorkEnds(LOG.position, next_header(LOG, [member("b", 20, 40)])))
    bench.at_step(0, speed=70.0)
    bench.training()
    for _ in range(10):
        bench.context.now += 50.0
        assert not bench.trainer.is_stuck
        bench.at_step(0, speed=80.0)
    assert (bench.trainer.inner_step(), bench.trainer.work, bench.trainer.speed) == (0, 0, 80.0)
    assert not bench.trainer.can_count_after(next_header(LOG, [member("a", 0, 20)])), "it has not begun"
    bench.context.now += 61.0
    assert bench.trainer.is_stuck, "now it has shown nothing for long"


def test_work_outlives_an_entry_that_leaves_us_our_lease() -> None:
    log = first_log()
    bench = Bench()
    bench.trainer.take(Leased(log, log.leases["b"], 10))
    kept, returned = (
        next_header(replace(SETTINGS, staleness=entries).empty_log.at(log.last), [member("a", 60, 80)])
        for entries in (1, 0)
    )
    assert not bench.trainer.can_count_after(kept), "the worker has not loaded theta yet, and it changes"
    assert bench.at_step(1).trainer.can_count_after(kept)
    assert not bench.trainer.can_count_after(returned), "the lease went back into the pool"


def test_a_worker_is_stuck_that_shows_nothing_for_much_longer_than_it_ever_took() -> None:
    bench, grace = Bench().training(), TIMING.partition_grace
    bench.context.now += 100 * grace
    assert not bench.trainer.is_stuck, "nobody knows yet how long it takes"
    bench.trained(after=grace).trainer.take(WorkEnds(LOG.position))
    longest = 101 * grace
    bench.context.now += 10 * longest
    assert not bench.trainer.is_stuck, "it has no lease"
    bench.training()
    bench.context.now += STUCK * longest
    assert not bench.trainer.is_stuck
    bench.context.now += 1
    assert bench.trainer.is_stuck
    assert bench.at_step(1).trainer.is_stuck, "it has begun"
    assert not bench.at_step(2).trainer.is_stuck


def test_a_worker_that_begins_each_lease_and_hangs_is_stuck() -> None:
    """Regression: one sign of progress in each lease, and it seemed to be at work for ever."""
    bench = Bench().training().trained()
    bench.trainer.take(WorkEnds(LOG.position))
    for times in range(5):
        bench.training().at_step(1)
        assert bench.trainer.is_stuck == (times > 3)
        bench.context.now += TIMING.partition_grace / 3
        bench.trainer.take(WorkEnds(LOG.position))
    assert not bench.training().at_step(1).at_step(2).trainer.is_stuck


def test_a_worker_that_is_given_other_leases_meanwhile_is_stuck_all_the_same() -> None:
    bench = Bench().training().trained()
    bench.trainer.take(WorkEnds(LOG.position))
    for times in range(5):
        bench.training()
        assert bench.trainer.is_stuck == (times > 3)
        bench.context.now += TIMING.partition_grace / 3
        bench.trainer.take(WorkEnds(LOG.position))
