"""What is said of a training: in the log, in metrics and to trackers."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import pytest
import torch
from prometheus_client import REGISTRY

from opendiloco.config.run_config import RunConfig
from opendiloco.run import Run
from opendiloco.view.curves import configuration_of
from opendiloco.workers.control import InnerStepDone
from opendiloco.workers.options import WorkerOptions
from opendiloco.workers.telemetry import OUTER_VALUES, VALUES, Telemetry, _values_of
from peers.presence.heartbeat import HeldOutLoss
from peers.values.identity import Identity
from tests.opendiloco.workers.trainings import NotingTracker, training_done

EXPECTED = {
    "loss": 1.0,
    "gradient_norm": 0.5,
    "learning_rate": 0.01,
    "tokens": 64,
    "tokens_per_second": 32,
    "flops_utilisation": 0.4,
    "data_wait_share": 0.25,
    "average_wait_share": 0,
    "late_averages": 0,
    "overlap_seconds": 1.5,
    "longest_average_seconds": 1.5,
    "peak_memory_bytes": 3 * 2**30,
    "skipped_inner_steps": 0,
}
STEP = InnerStepDone(inner_step=1, loss=2.0, gradient_norm=0.1, learning_rate=0.01, tokens_per_second=5.0)
TAKEN = {
    "learning_rate": 0.7,
    "momentum": 0.9,
    "pseudo_gradient_norm": 0.5,
    "average_norm": 0.25,
    "cosine": 0.75,
    "momentum_norm": 2.0,
    "round_seconds": 3.0,
    "pause_seconds": 4.5,
    "sent_bytes": 2e6,
    "received_bytes": 1e6,
    "peak_sent_rate": 2.5e6,
    "peak_received_rate": 1.25e6,
}


def test_one_training_is_the_same_in_the_log_in_metrics_and_to_trackers(caplog: pytest.LogCaptureFixture) -> None:
    telemetry, tracker = Telemetry(inner_steps=10, peak_tokens_per_second=80.0), NotingTracker()
    telemetry.trackers.append(tracker)
    with caplog.at_level(logging.DEBUG):
        telemetry.trained(7, training_done())
    assert caplog.messages == [
        "trained after outer step 7: 64 tokens, loss 1.0000, gradient norm 0.5, 32 tokens/s, MFU 40.0%, "
        "25.0% waiting for data, averages after 1.5 of 1.5 s at most, 3.00 GiB"
    ]
    assert {name: REGISTRY.get_sample_value(f"diloco_peer_training_{name}") for name in VALUES} == EXPECTED
    assert tracker.records == [(74, {f"training/{name}": value for name, value in EXPECTED.items()})]


def test_an_outer_step_is_the_same_in_the_log_in_metrics_and_to_trackers(caplog: pytest.LogCaptureFixture) -> None:
    telemetry, tracker = Telemetry(inner_steps=10), NotingTracker()
    telemetry.track_with([tracker], {"run_id": "small-1"})
    unknown = {"pseudo_gradient_norm", "cosine", "pause_seconds", "peak_received_rate"}
    with caplog.at_level(logging.DEBUG):
        telemetry.outer_step(7, TAKEN)
        assert {name: REGISTRY.get_sample_value(f"diloco_peer_outer_{name}") for name in OUTER_VALUES} == TAKEN
        telemetry.outer_step(8, TAKEN | dict.fromkeys(unknown, math.nan))
    assert caplog.messages == [
        "outer step 8: learning rate 0.7, momentum 0.9, pseudo-gradient norm 0.5, cosine to the average 0.750, "
        "average norm 0.25, momentum norm 2, 3.0 s in rounds, 4.5 s without training, 2.0 MB sent at 20.0 Mbit/s at "
        "most, 1.0 MB received at 10.0 Mbit/s at most",
        "outer step 9: learning rate 0.7, momentum 0.9, average norm 0.25, momentum norm 2, 3.0 s in rounds, 2.0 MB "
        "sent at 20.0 Mbit/s at most, 1.0 MB received",
    ]
    assert TAKEN.keys() == OUTER_VALUES.keys()
    gauges = {name: REGISTRY.get_sample_value(f"diloco_peer_outer_{name}") or 0.0 for name in TAKEN}
    assert {name for name, value in gauges.items() if math.isnan(value)} == unknown
    assert tracker.configurations == [{"run_id": "small-1"}]
    (step, values), (_, fewer) = tracker.records
    assert (step, values) == (80, {f"outer_step/{name}": value for name, value in TAKEN.items()})
    assert fewer.keys() == values.keys() - {f"outer_step/{name}" for name in unknown}


def test_prometheus_has_the_configuration_of_the_run(small_config: RunConfig) -> None:
    run = Run.sign(small_config, Identity.generate())
    Telemetry(inner_steps=10).track_with([], configuration_of(run, "peer-1", "cpu", WorkerOptions(threads=3)))
    [metric] = (found for found in REGISTRY.collect() if found.name == "diloco_peer_run")
    [sample] = metric.samples
    assert (sample.name, sample.value) == ("diloco_peer_run_info", 1)
    training = small_config.training
    expected = {
        "run_id": run.run_id,
        "peer_id": "peer-1",
        "run_name": small_config.name,
        "run_training_inner_steps": str(training.inner_steps),
        "run_training_precision": training.precision,
        "run_inner_optimizer_learning_rate": str(small_config.inner_optimizer.learning_rate),
        "run_model_config_model_type": "llama",
        "machine_device": "cpu",
        "machine_options_threads": "3",
        "machine_options_trains": "true",
        "versions_torch": torch.__version__,
    }
    assert expected.items() <= sample.labels.items()
    assert all(name.isidentifier() for name in sample.labels)


def test_strange_names_and_long_values_of_a_run_harm_no_metric() -> None:
    configuration = {"run": {"model": {"a-b é": "x" * 10**6, "none": None, "list": [1, 2]}}}
    Telemetry(inner_steps=10).track_with([], configuration)
    labels = {"run_model_a_b__": "x" * 200, "run_model_list": "[1, 2]"}
    assert REGISTRY.get_sample_value("diloco_peer_run_info", labels) == 1


def test_losses_are_told_in_bits_per_byte_where_the_text_is_known(caplog: pytest.LogCaptureFixture) -> None:
    telemetry, tracker = Telemetry(inner_steps=10, bytes_per_token=4.0), NotingTracker()
    telemetry.trackers.append(tracker)
    with caplog.at_level(logging.INFO):
        telemetry.evaluated(HeldOutLoss(index=3, loss=4 * math.log(2)))
        telemetry.heard(HeldOutLoss(index=4, loss=2 * math.log(2)))
    assert caplog.messages == ["held-out loss 2.773 (perplexity 16.0, 1.000 bits per byte) after outer step 3"]
    assert REGISTRY.get_sample_value("diloco_peer_held_out_bits_per_byte") == pytest.approx(1)
    assert [step for step, _ in tracker.records] == [30, 40]
    assert [values["held_out/bits_per_byte"] for _, values in tracker.records] == pytest.approx([1.0, 0.5])


def test_a_utilisation_that_is_not_known_is_said_to_be_unknown(caplog: pytest.LogCaptureFixture) -> None:
    telemetry, tracker = Telemetry(inner_steps=10), NotingTracker()
    telemetry.trackers.append(tracker)
    with caplog.at_level(logging.DEBUG):
        telemetry.trained(0, training_done(skipped=2))
    assert "MFU unknown" in caplog.text
    assert "outer step 1: 2 inner steps were skipped" in caplog.text
    assert math.isnan(REGISTRY.get_sample_value("diloco_peer_training_flops_utilisation") or 0.0)
    ((_, values),) = tracker.records
    assert values.keys() == {f"training/{name}" for name in VALUES} - {"training/flops_utilisation"}


def test_a_training_of_no_time_has_values() -> None:
    values = _values_of(training_done(tokens=0, seconds=0.0, waited_seconds=0.0), 80.0)
    assert (values["tokens_per_second"], values["data_wait_share"]) == (0, 0)


def test_trackers_count_the_inner_steps_of_the_run() -> None:
    telemetry, tracker = Telemetry(inner_steps=10), NotingTracker()
    telemetry.trackers.append(tracker)
    telemetry.evaluated(HeldOutLoss(index=3, loss=2.5))
    telemetry.progressed(3, STEP)
    assert tracker.records == [
        (30, {"held_out/loss": 2.5}),
        (31, {"inner_step/loss": 2.0, "inner_step/gradient_norm": 0.1, "inner_step/learning_rate": 0.01}),
    ]


class BrokenTracker(NotingTracker):
    def record(self, inner_step: int, values: Mapping[str, float]) -> None:
        super().record(inner_step, values)
        raise OSError("the disk is full")


def test_a_tracker_that_fails_is_given_up_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    telemetry, broken, sound = Telemetry(inner_steps=10), BrokenTracker(), NotingTracker()
    telemetry.trackers.extend([broken, sound])
    for index in range(2):
        telemetry.evaluated(HeldOutLoss(index=index, loss=2.5))
    assert (len(broken.records), len(sound.records)) == (1, 2)
    assert caplog.text.count("BrokenTracker takes no more values: the disk is full") == 1
