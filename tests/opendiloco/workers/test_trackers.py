"""Trackers: which there are, what they are told, and what is said when one cannot be had."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from click.testing import CliRunner

from opendiloco.cli.options import join_settings
from opendiloco.errors import MachineError
from opendiloco.settings.join_settings import JoinSettings
from opendiloco.workers import trackers
from opendiloco.workers.trackers import TrackerSpec, _open_tracker, tracking
from tests.opendiloco.workers.trainings import NotingTracker


class FakeRun:
    """A run of Weights & Biases that keeps what it is told."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.calls: list[tuple[Any, ...]] = []

    @property
    def config(self) -> FakeRun:
        return self

    def update(self, values: dict[str, Any], allow_val_change: bool) -> None:
        self.calls.append(("config", values))

    def define_metric(self, name: str, step_metric: str) -> None:
        self.calls.append(("define_metric", name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        self.calls.append(("log", values))

    def finish(self) -> None:
        self.calls.append(("finish",))


class FakeWandb(ModuleType):
    def __init__(self, problem: str = "") -> None:
        super().__init__("wandb")
        self.runs: list[FakeRun] = []
        self._problem = problem

    def init(self, **settings: Any) -> FakeRun:
        if self._problem:
            raise RuntimeError(self._problem)
        self.runs.append(FakeRun(**settings))
        return self.runs[-1]


@click.command()
@join_settings(needs_run=False)
def tracked(settings: JoinSettings) -> None:
    click.echo(" ".join(f"{choice.kind}|{choice.target}" for choice in settings.trackers))


def test_a_choice_is_a_kind_and_where() -> None:
    said = CliRunner().invoke(tracked, ["--track", "tensorboard:C:/curves", "--track", "wandb:mine"])
    assert said.output == "tensorboard|C:/curves wandb|mine\n"


@pytest.mark.parametrize("text", ["tensorboard", "tensorboard:", "mlflow:here", ""])
def test_any_other_choice_is_wrong_usage(text: str) -> None:
    said = CliRunner().invoke(tracked, ["--track", text])
    assert said.exit_code == 2
    assert f"{text!r} is neither tensorboard:FOLDER nor wandb:PROJECT." in " ".join(said.output.split())


@pytest.mark.parametrize(("kind", "package"), [("tensorboard", "tensorboard.summary"), ("wandb", "wandb")])
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    kind: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package.partition(".")[0], None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MachineError, match=f"--track {kind}: the package for it") as caught:
        _open_tracker(TrackerSpec(kind, "somewhere"), "run-1", "peer-1")
    assert f"pip install {kind}" in caught.value.remedy


def test_weights_and_biases_gets_the_runs_inner_steps_as_its_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with tracking([TrackerSpec("wandb", "mine")], "run-1", "peer-1") as opened:
        opened[0].configure({"run_id": "run-1"})
        opened[0].record(31, {"inner_step/loss": 2.0})
        opened[0].record(30, {"held_out/loss": 2.5})  # steps may come twice
    (run,) = wandb.runs
    assert run.settings == {"project": "mine", "group": "run-1", "name": "peer-1", "settings": {"console": "off"}}
    assert run.calls == [
        ("define_metric", "*", "inner_step"),
        ("config", {"run_id": "run-1"}),
        ("log", {"inner_step": 31, "inner_step/loss": 2.0}),
        ("log", {"inner_step": 30, "held_out/loss": 2.5}),
        ("finish",),
    ]


def test_without_a_login_the_remedy_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb("no API key"))
    with pytest.raises(MachineError, match=r"--track wandb:mine cannot be used: no API key\.") as caught:
        _open_tracker(TrackerSpec("wandb", "mine"), "run-1", "peer-1")
    assert "wandb login" in caught.value.remedy


def test_what_was_opened_is_closed_though_another_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    first = NotingTracker()
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", lambda *arguments: first)
    monkeypatch.setitem(sys.modules, "wandb", None)
    choices = [TrackerSpec("tensorboard", "here"), TrackerSpec("wandb", "mine")]
    with pytest.raises(MachineError), tracking(choices, "run-1", "peer-1"):
        pass
    assert first.closed


def test_a_tracker_that_cannot_write_its_last_values_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(NotingTracker):
        def close(self) -> None:
            raise OSError("the disk is full")

    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", lambda *arguments: Broken())
    with tracking([TrackerSpec("tensorboard", "here")], "run-1", "peer-1"):
        pass
    assert "last values may be lost: the disk is full" in caplog.text


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """What lies in TensorBoard's event file: records of a length, its checksum, an event, and the event's checksum."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.util.tensor_util import make_ndarray

    (path,) = folder.iterdir()
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        event = Event.FromString(data[12 : 12 + length])
        found += [(event.step, value.tag, float(make_ndarray(value.tensor))) for value in event.summary.value]
        data = data[12 + length + 4 :]
    return found


def test_tensorboard_gets_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="a development extra that is not installed")
    with tracking([TrackerSpec("tensorboard", str(tmp_path / "curves"))], "run-1", "peer-1") as opened:
        opened[0].record(31, {"inner_step/loss": 2.0, "inner_step/gradient_norm": 0.5})
        opened[0].record(30, {"held_out/loss": 2.5})
    assert scalars(tmp_path / "curves") == [
        (31, "inner_step/loss", 2.0),
        (31, "inner_step/gradient_norm", 0.5),
        (30, "held_out/loss", 2.5),
    ]


def test_tensorboard_shows_the_configuration(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="a development extra that is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tracking([TrackerSpec("tensorboard", str(tmp_path))], "run-1", "peer-1") as opened:
        opened[0].configure({"run_id": "run-1", "run": {"name": "run"}})
        opened[0].record(1, {"inner_step/loss": 2.0})
    shown = EventAccumulator(str(tmp_path)).Reload()
    [text] = shown.Tensors("configuration")
    said = text.tensor_proto.string_val[0].decode()
    assert json.loads(said.removeprefix("```json\n").removesuffix("\n```")) == {
        "run_id": "run-1",
        "run": {"name": "run"},
    }
    assert shown.SummaryMetadata("configuration").plugin_data.plugin_name == "text"
    assert shown.Tags()["tensors"] == ["configuration", "inner_step/loss"]


def test_weights_and_biases_keeps_all_of_it_without_a_network(tmp_path: Path) -> None:
    """With the real package, in a process of its own, since it starts another one."""
    pytest.importorskip("wandb", reason="a development extra that is not installed")
    code = (
        "import sys; from opendiloco.workers.trackers import TrackerSpec, tracking\n"
        "with tracking([TrackerSpec('wandb', 'mine')], 'run-1', 'peer-1') as opened:\n"
        "    opened[0].configure({'run_id': 'run-1', 'run': {'name': 'small'}})\n"
        "    opened[0].record(31, {'inner_step/loss': 2.0})\n"
        "    opened[0].record(30, {'held_out/loss': 2.5})\n"
    )
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [file] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    kept = file.read_bytes()
    for said in (b"inner_step/loss", b"held_out/loss", b"run_id", b"small", b"peer-1", b"run-1"):
        assert said in kept


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="a development extra that is not installed")
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="cannot be used") as caught:
        _open_tracker(TrackerSpec("tensorboard", str(tmp_path / "file" / "curves")), "run-1", "peer-1")
    assert "folder" in caught.value.remedy


def test_the_peer_process_tracks_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="a development extra that is not installed")
    code = (
        "import sys, opendiloco.workers.telemetry; from opendiloco.workers.trackers import TrackerSpec, _open_tracker; "
        f"_open_tracker(TrackerSpec('tensorboard', {str(tmp_path)!r}), 'run-1', 'peer-1').close(); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "opendiloco.workers.trackers" in done.stdout.split()
    assert not {"torch", "tensorflow", "wandb"} & set(done.stdout.split())
