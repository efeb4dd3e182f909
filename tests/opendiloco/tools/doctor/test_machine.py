"""Checks of this machine, on invented ones; and how they read torch's probe and Linux's folders."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from opendiloco import kernels
from opendiloco.cli import main
from opendiloco.errors import MachineError
from opendiloco.gpus import Cards, first_sentence
from opendiloco.owner.facts import GpuState, Sensor
from opendiloco.tools.doctor import machine
from opendiloco.tools.doctor.findings import CHECKS, Finding, Verdict, passed, skipped, warned, worst
from opendiloco.tools.doctor.machine import (
    _check_compiler,
    _check_gpu,
    _check_heat,
    _check_power,
    _check_python,
    _check_shm,
    _check_torch,
    _free_disk,
    _free_shm,
    _gpus_in_use,
    check_disk,
    check_kernels,
    check_memory,
    check_quickly,
    machine_findings,
)
from opendiloco.tools.doctor.torch_probe import Gpu, Torch, _answered, installed_torch, probed_torch
from opendiloco.workers.needs import Needs
from opendiloco.workers.options import WorkerOptions

PASS, WARN, FAIL, SKIPPED = Verdict
GB = 10**9
RUN = "tiny-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWADA2vJXLmyk1SHLyFogztmUkYfacm9C2finbispzbjcL"
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 * GB, 79 * GB, has_bf16=True)
T4 = Gpu("Tesla T4", (7, 5), 16 * GB, 15 * GB, has_bf16=False)
BROKEN = replace(H100, error="CUDA error: no kernel image is available for execution on the device")
CARD = Cards(("NVIDIA H100 80GB HBM3",), "570.124.06", is_driven=True)
NO_DRIVER = Cards(("an NVIDIA GPU",), None)
CPU_BUILD = Torch("2.9.0+cpu", None, ())
CUDA_BUILD = Torch("2.9.0", "CUDA 12.8", (H100,))
SEES_NONE = Torch("2.9.0", "CUDA 12.8", (), "The NVIDIA driver on your system is too old (found version 11040)")
STATE = Path("/state")


def needing(memory: int = 0, gpu: int = 0, disk: int = 0) -> Needs:
    """What a run takes, as far as checks look at it."""
    sizes = {"main_memory": memory, "main_memory_on_cpu": memory, "device_memory": gpu, "disk": disk}
    return cast(Needs, SimpleNamespace(**sizes))


TORCH = Torch("2.9.0", "CUDA 12.8")
GPU = {
    "name": "NVIDIA H100 80GB HBM3",
    "capability": [9, 0],
    "memory": 80,
    "free": 79,
    "has_bf16": True,
    "error": "",
}


@pytest.fixture(autouse=True)
def has(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine without faults, with one GPU; called, it has others of the things that checks look at."""

    def has(**things: Any) -> None:
        for name, value in things.items():
            monkeypatch.setattr(machine, name, lambda *_, value=value: value)

    has(python_version="3.12.1", usable_cores=16, installed_torch=CUDA_BUILD, read_cards=CARD, read_gpus=())
    has(available_memory=128 * GB, _free_shm=64 * GB, _free_disk=100 * GB, read_sensors=(), is_on_battery=False)
    monkeypatch.setattr(shutil, "which", lambda program: program)
    return has


@pytest.mark.parametrize(
    ("things", "check", "verdict", "says"),
    [
        ({"python_version": "3.11.7", "usable_cores": 2}, _check_python, PASS, "Python 3.11.7 on 2 cores"),
        ({"python_version": "3.10.2", "usable_cores": 1}, _check_python, FAIL, "Install Python 3.11"),
        ({}, lambda: _check_compiler(has_gpu=True), PASS, "compiler"),
        ({}, lambda: _check_compiler(has_gpu=False), SKIPPED, "no GPU"),
        ({"_free_shm": None}, lambda: _check_shm(1), PASS, "no /dev/shm"),
        ({"_free_shm": 0}, lambda: _check_shm(1), PASS, "only several GPUs"),
        ({"_free_shm": 0}, lambda: _check_shm(2), FAIL, "--shm-size"),
        ({"_free_shm": None}, lambda: _check_shm(2), FAIL, "no /dev/shm"),
        ({"_free_shm": 64 << 20}, lambda: _check_shm(8), WARN, "little for 8 GPUs"),
        ({"_free_shm": 2 << 30}, lambda: _check_shm(8), PASS, "2.15 GB"),
        ({"available_memory": GB}, check_memory, WARN, "1 GB"),
        ({"available_memory": 8 * GB}, check_memory, PASS, "8 GB"),
        ({"available_memory": 8 * GB}, lambda: check_memory((), needing(9 * GB)), FAIL, "needs 9 GB"),
        ({"available_memory": 8 * GB}, lambda: check_memory((), needing(7 * GB)), PASS, "needs 7 GB"),
        ({}, lambda: check_memory((H100, T4), needing(7 * GB, 20 * GB)), FAIL, "has 15 GB free"),
        ({}, lambda: check_memory((H100,), needing(7 * GB, 20 * GB)), PASS, "has 79 GB free"),
        ({}, lambda: check_disk(STATE), PASS, "/state"),
        ({"_free_disk": GB}, lambda: check_disk(STATE), WARN, "--state"),
        ({"_free_disk": 1000}, lambda: check_disk(STATE), FAIL, "--state"),
        ({}, lambda: check_disk(STATE, needing(disk=99 * GB)), PASS, "99 GB"),
        ({}, lambda: check_disk(STATE, needing(disk=101 * GB)), WARN, "--keep 1"),
        ({}, lambda: _check_heat(()), SKIPPED, "no temperature"),
        (
            {"read_sensors": (Sensor("coretemp", 60.0, 100.0), Sensor("nvme", 50.0))},
            lambda: _check_heat(()),
            PASS,
            "coretemp is at 60",
        ),
        ({"read_sensors": (Sensor("coretemp", 97.0, 100.0),)}, lambda: _check_heat(()), WARN, "hot already"),
        ({"read_sensors": (Sensor("acpitz", 96.0),)}, lambda: _check_heat(()), WARN, "hot already"),
        ({}, lambda: _check_heat((GpuState("T4", 88.0),)), WARN, "T4 is at 88"),
        ({}, lambda: _check_heat((GpuState("T4", 80.0, is_slowed_by_heat=True),)), WARN, "slowed down by heat: T4"),
        ({}, lambda: _check_power(()), SKIPPED, "not on battery"),
        ({"is_on_battery": True}, lambda: _check_power(()), WARN, "Plug it in"),
        ({}, lambda: _check_power((GpuState("T4", 50.0, limit=70, default_limit=70),)), PASS, "70 of 70 W"),
        (
            {},
            lambda: _check_power((GpuState("H100", 50.0, limit=200, default_limit=700),)),
            WARN,
            "nvidia-smi -pl 700",
        ),
        ({}, lambda: _check_power((GpuState("T4", 50.0, is_slowed_by_power=True),)), WARN, "power supply"),
        ({}, lambda: _check_torch(None, CARD), FAIL, "not installed"),
        ({}, lambda: _check_torch(CPU_BUILD, Cards()), PASS, "built for CPUs alone"),
        ({}, lambda: _check_torch(CPU_BUILD, CARD), WARN, "but this machine has a GPU: NVIDIA H100 80GB HBM3"),
        ({}, lambda: _check_torch(CUDA_BUILD, CARD), PASS, "CUDA 12.8"),
        ({}, lambda: _check_torch(Torch("2.9.0", None, None, "SIGILL ended it"), Cards()), FAIL, "SIGILL"),
        ({}, lambda: _check_gpu(None, CARD), SKIPPED, "torch"),
        ({}, lambda: _check_gpu(replace(CUDA_BUILD, gpus=None), CARD), SKIPPED, "H100"),
        ({}, lambda: _check_gpu(CPU_BUILD, Cards()), PASS, "trains on the CPU"),
        ({}, lambda: _check_gpu(CPU_BUILD, Cards(), "cuda:1"), FAIL, "no GPU for --device cuda:1"),
        ({}, lambda: _check_gpu(SEES_NONE, NO_DRIVER), WARN, "--gpus all"),
        ({}, lambda: _check_gpu(SEES_NONE, CARD), FAIL, "driver 570.124.06, but torch 2.9.0, built for CUDA 12.8"),
        ({}, lambda: _check_gpu(SEES_NONE, CARD, "cuda"), FAIL, "Update NVIDIA's driver to 525 or newer"),
        ({}, lambda: _check_gpu(CPU_BUILD, CARD), WARN, "Install a build of torch"),
        ({}, lambda: _check_gpu(CUDA_BUILD, CARD), PASS, "NVIDIA H100 80GB HBM3 (80 GB, 9.0), with bf16"),
        ({}, lambda: _check_gpu(replace(CUDA_BUILD, gpus=(H100, T4)), CARD), WARN, "without bf16"),
        ({}, lambda: _check_gpu(replace(CUDA_BUILD, gpus=(H100, BROKEN)), CARD), FAIL, "no kernel image"),
        ({}, lambda: _check_gpu(replace(CUDA_BUILD, gpus=(BROKEN,)), CARD, "cpu"), PASS, "H100"),
    ],
)
def test_what_a_check_finds(
    things: dict[str, Any], check: Callable[[], Finding], verdict: Verdict, says: str, has: Callable[..., None]
) -> None:
    has(**things)
    assert_finding(check(), verdict, says)


def assert_finding(finding: Finding, verdict: Verdict, says: str) -> None:
    assert finding.verdict is verdict, finding
    assert says in f"{finding.found}\n{finding.remedy}"
    assert bool(finding.remedy) == (verdict in (WARN, FAIL)), "a remedy where there is something to do"


def test_without_a_compiler_models_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    assert_finding(_check_compiler(has_gpu=True), WARN, "Install gcc")


@pytest.mark.parametrize(
    ("speed", "differing", "verdict", "says"),
    [
        (20.0, [], PASS, "quantize 20.0 GB/s"),
        (0.2, [], WARN, "slow"),
        (20.0, ["avx512"], FAIL, "avx512"),
    ],
)
def test_kernels(
    speed: float, differing: list[str], verdict: Verdict, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "measure_speeds", lambda threads: {"quantize": speed})
    monkeypatch.setattr(kernels, "differing_sets", lambda: differing)
    assert_finding(check_kernels(), verdict, says)


def test_the_kernels_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SECONDS_PER_OPERATION", 0.001)
    values = check_kernels().values
    assert set(values) == {"set", "quantize", "dequantize", "accumulate", "outer step"}


def test_kernels_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(threads: int) -> None:
        raise RuntimeError("illegal\ninstruction")

    monkeypatch.setattr(kernels, "measure_speeds", breaks)
    assert_finding(check_kernels(), FAIL, "cannot be used: illegal instruction")


def test_the_worst_verdict_counts_and_what_was_skipped_does_not() -> None:
    fine, could_be_better = passed("gpu", "x"), warned("gpu", "x", "y")
    assert worst([]) is PASS
    assert worst([fine, skipped("heat", "x")]) is PASS
    assert worst([fine, could_be_better]) is WARN
    assert worst([could_be_better, _check_torch(None, CARD), fine]) is FAIL


def test_a_check_that_nobody_knows_is_a_mistake() -> None:
    with pytest.raises(AssertionError):
        passed("horoscope", "fine")


@pytest.mark.parametrize(
    ("torch", "options", "count"),
    [
        (CUDA_BUILD, WorkerOptions(), 1),
        (replace(CUDA_BUILD, gpus=(H100, H100)), WorkerOptions(), 2),
        (replace(CUDA_BUILD, gpus=(H100, H100)), WorkerOptions(gpus=1), 1),
        (replace(CUDA_BUILD, gpus=(H100, H100)), WorkerOptions(device="cuda:1"), 1),
        (replace(CUDA_BUILD, gpus=(H100, H100)), WorkerOptions(device="cpu"), 0),
        (replace(CUDA_BUILD, gpus=None), WorkerOptions(), 1),
        (replace(CPU_BUILD, gpus=None), WorkerOptions(), 0),
        (None, WorkerOptions(), 0),
    ],
)
def test_how_many_gpus_would_train(torch: Torch | None, options: WorkerOptions, count: int) -> None:
    assert _gpus_in_use(torch, options) == count


def test_a_good_machine_passes_and_the_checks_come_in_their_order() -> None:
    findings = machine_findings(CUDA_BUILD, WorkerOptions())
    assert worst(findings) is PASS
    assert [finding.name for finding in findings] == list(CHECKS)[: len(findings)]


def test_torchao_is_missed_before_anything_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    options = WorkerOptions(optimizer_state="8bit")
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    assert_finding(_check_torch(CUDA_BUILD, CARD, "8bit"), FAIL, "torchao, which --optimizer-state 8bit needs")
    with pytest.raises(MachineError, match=r"is not installed. Install it: pip install torchao"):
        check_quickly(STATE, options)
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    assert worst(machine_findings(CUDA_BUILD, options)) is PASS


def test_who_wants_the_cpu_hears_nothing_of_gpus() -> None:
    assert worst(machine_findings(CPU_BUILD, WorkerOptions(device="cpu"))) is PASS


# The quick part, which join makes ------------------------------------------------------------------------------------
def test_join_hears_at_once_of_a_torch_that_does_not_fit(
    has: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    check_quickly(STATE, WorkerOptions())
    assert not caplog.text
    has(installed_torch=Torch("2.9.0+cpu", None))
    check_quickly(STATE, WorkerOptions())
    assert "but this machine has a GPU" in caplog.text


@pytest.mark.parametrize(
    ("things", "says"),
    [
        ({"installed_torch": None}, "torch is not installed"),
        (
            {"read_cards": Cards(CARD.names * 2), "installed_torch": Torch("2.9.0", "CUDA 12.8"), "_free_shm": 0},
            "--shm",
        ),
    ],
)
def test_join_ends_at_once_where_nothing_can_be_trained(
    things: dict[str, Any], says: str, has: Callable[..., None]
) -> None:
    has(**things)
    with pytest.raises(MachineError, match=says):
        check_quickly(STATE, WorkerOptions())


def test_join_itself_ends_before_it_asks_anybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_free_disk", _free_disk)
    (tmp_path / "file").write_text("")
    options = ["--identity", str(tmp_path / "key.pem"), "--state", str(tmp_path / "file" / "state")]
    ended = CliRunner().invoke(main, ["join", "--run", RUN, "--initial-peer", NOBODY, "--plain", *options])
    assert ended.exit_code == MachineError.exit_code
    assert "state cannot be written to: Not a directory" in ended.output
    assert not (tmp_path / "key.pem").exists()


def test_join_says_nothing_of_a_disk_with_little_room(
    has: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows yet how much the run takes, and `--keep 0` takes none."""
    has(_free_disk=1)
    check_quickly(STATE, WorkerOptions())
    assert not caplog.text


# What is read -------------------------------------------------------------------------------------------------------
def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def test_torch_is_asked_in_a_process_of_its_own() -> None:
    installed = installed_torch()
    assert installed is not None
    assert (installed.gpus, installed.error) == (None, "")
    probed = probed_torch(installed)
    assert probed is not None
    assert probed.gpus is not None, probed.error
    assert probed.version == installed.version


def test_what_torch_answers() -> None:
    told = _answered(TORCH, 0, "some library's line\n" + json.dumps({"gpus": [GPU], "error": ""}), "a warning")
    assert told.gpus is not None
    assert (told.gpus[0].name, told.gpus[0].capability) == ("NVIDIA H100 80GB HBM3", (9, 0))
    assert _answered(TORCH, 0, json.dumps({"gpus": [], "error": "too old"}), "").error == "too old"


@pytest.mark.parametrize(
    ("code", "out", "err", "says"),
    [
        (1, "", "Traceback …\nImportError: libcudart.so.12: cannot open shared object file", "libcudart"),
        (-4, "", "", "SIGILL ended it"),
        (3, "", "", "it ended with status 3"),
        (0, "[]", "", "status 0"),
        (0, '{"gpus": [{}], "error": ""}', "", "status 0"),
    ],
)
def test_a_torch_that_cannot_answer(code: int, out: str, err: str, says: str) -> None:
    told = _answered(TORCH, code, out, err)
    assert told.gpus is None
    assert says in told.error


def test_libraries_are_quoted_in_brief() -> None:
    assert first_sentence("CUDA initialization: too old (found 11040). Please update\nmore") == (
        "CUDA initialization: too old (found 11040)"
    )
    assert first_sentence("") == ""


def test_a_folder_that_is_not_there_yet_can_be_made(tmp_path: Path) -> None:
    assert _free_disk(tmp_path / "not" / "there") > 0
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_a_folder_in_which_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_free_disk", _free_disk)
    (tmp_path / "file").write_text("")
    assert_finding(check_disk(tmp_path / "file" / "state"), FAIL, "cannot be written to: Not a directory")
    assert_finding(check_disk(Path("/proc/state")), FAIL, "--state")


def test_there_may_be_no_shm(tmp_path: Path) -> None:
    assert _free_shm(tmp_path / "shm") is None
    assert _free_shm(tmp_path) is not None


def test_the_quick_checks_import_nothing_slow() -> None:
    code = "import sys; from opendiloco.tools.doctor.machine import check_quickly; "
    code += "from opendiloco.workers.options import WorkerOptions; check_quickly(None, WorkerOptions()); "
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'hivemind', 'rich')))"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
