"""The curve of theta's losses, of which each peer finds one now and then."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.data.sample_order import HeldOutWindows, Windows
from opendiloco.data.tokenizer import BEGIN, END, ByteTokenizer
from opendiloco.evaluation_turns import bits_per_byte
from opendiloco.run import Run
from opendiloco.storage.run_folder import HeldOutCurve, kept_losses, read_curve
from opendiloco.view.curves import Curves, configuration_of
from opendiloco.view.run_view import RunView
from opendiloco.workers.options import WorkerOptions
from opendiloco.workers.telemetry import Telemetry
from peers.presence.heartbeat import HeldOutLoss
from peers.values.identity import Identity
from tests.opendiloco.workers.trainings import NotingTracker
from tests.peers.heartbeats import beat
from tests.peers.logs import log_at

LOG = log_at(17)


def test_losses_outlive_the_process(tmp_path: Path) -> None:
    path = tmp_path / "held_out.jsonl"
    first = HeldOutCurve(path)
    assert [first.add(8, 2.5), first.add(16, 2.0), first.add(8, 1.0), first.add(24, math.nan)] == [
        True,
        True,
        False,
        False,
    ]
    second = HeldOutCurve(path)
    assert second.losses == {8: 2.5, 16: 2.0}
    assert second.add(24, 1.5)
    assert read_curve(path) == {8: 2.5, 16: 2.0, 24: 1.5}


def test_all_losses_that_this_machines_volunteers_have_heard_of(tmp_path: Path) -> None:
    for peer, step in (("a", 8), ("b", 16)):
        (tmp_path / "run-1" / peer).mkdir(parents=True)
        HeldOutCurve(tmp_path / "run-1" / peer / "held_out.jsonl").add(step, 2.0)
    assert kept_losses("run-1", tmp_path) == {8: 2.0, 16: 2.0}
    assert kept_losses("run-2", tmp_path) == {}


def test_what_is_no_loss_in_the_file_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "held_out.jsonl"
    assert read_curve(path) == {}
    lines = [
        b'{"outer_step": 8, "loss": 2.5}',
        b'{"outer_step": true, "loss": 1}',
        b'{"outer_step": -1, "loss": 1}',
        b'{"outer_step": 9, "loss": Infinity}',
        b'{"outer_step": 9}',
        b"[]",
        b"\xff\xfe",
        b'{"outer_step": 16, "lo',
    ]
    path.write_bytes(b"\n".join(lines))
    assert read_curve(path) == {8: 2.5}


def test_a_file_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    curve = HeldOutCurve(tmp_path / "missing" / "held_out.jsonl")
    with caplog.at_level(logging.WARNING):
        assert curve.add(8, 2.5)
        assert curve.add(16, 2.0)
    assert caplog.text.count("has stopped") == 1
    assert curve.losses == {8: 2.5, 16: 2.0}


def test_the_first_word_on_each_outer_step_is_drawn_if_one_was_due(small_config: RunConfig) -> None:
    telemetry, tracker = Telemetry(inner_steps=10, bytes_per_token=1.0), NotingTracker()
    telemetry.trackers.append(tracker)
    curve = HeldOutCurve()
    curves = Curves(telemetry, curve)
    run = Run.sign(small_config.model_copy(update={"outer_steps": 40}), Identity.generate())
    own = beat("a", LOG, held_out=HeldOutLoss(index=LOG.position.index, loss=9.0))
    due = LOG.position.index - LOG.position.index % small_config.evaluation.every
    said = [(due, 2.5), (due, 0.1), (due + 1, 2.0), (due + 8 * 1000, 1.0), (0, 5.0)]
    others = [
        beat(peer, LOG, held_out=HeldOutLoss(index=index, loss=loss))
        for peer, (index, loss) in zip("bcdef", said, strict=True)
    ]
    for _ in range(2):
        curves.add_heartbeats(own, RunView(run, [own, *others, beat("g", LOG)]))
    assert curve.losses == {LOG.position.index: 9.0} | {due: 2.5, 0: 5.0}
    assert [(step, values["held_out/loss"]) for step, values in tracker.records] == [(0, 5.0), (10 * due, 2.5)]


def test_the_configuration_says_what_the_curves_are_of(small_config: RunConfig) -> None:
    run = Run.sign(small_config, Identity.generate())
    said = configuration_of(run, "peer-1", "cpu", WorkerOptions(threads=3, compile_cache="/home/lovelace"))
    assert "lovelace" not in str(said), "no folder of this machine"
    assert said["run"] == small_config.to_manifest_content()
    assert (said["run_id"], said["peer_id"]) == (run.run_id, "peer-1")
    assert (said["machine"]["device"], said["machine"]["options"]["threads"]) == ("cpu", 3)
    assert {"diloco-peer", "torch"} <= said["versions"].keys()
    assert "options" not in configuration_of(run, "peer-1", "cpu")["machine"]


def test_bits_per_byte_is_the_loss_over_the_text_behind_the_tokens() -> None:
    assert bits_per_byte(8 * math.log(2), 4.0) == pytest.approx(2.0)
    text = np.frombuffer("für zwölf Fenster".encode(), np.uint8).astype(np.uint16)
    assert ByteTokenizer().byte_count(text.astype(np.int64)) == len(text)
    tokens = np.array([BEGIN, 65, 66, END, 67, 68, 69, END, 70], np.uint16)
    windows = [Windows(tokens, sequence_length=4)]
    assert HeldOutWindows(windows).bytes_per_token(2, ByteTokenizer()) == 6 / 8
    apart = HeldOutWindows(windows, document_end=END)  # 67 and 70 are not predicted
    assert apart.bytes_per_token(2, ByteTokenizer()) == 4 / 6
