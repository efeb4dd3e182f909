"""What facts of a machine mean, each check with invented ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from opendiloco.cli import main
from opendiloco.doctor.facts import Cards, Folder, Gpu, Kernels, Machine, Taken, Torch
from opendiloco.doctor.findings import CHECKS, Finding, Verdict, passed, skipped, warned, worst
from opendiloco.doctor.machine_checks import (
    check_compiler,
    check_disk,
    check_gpu,
    check_heat,
    check_kernels,
    check_memory,
    check_power,
    check_python,
    check_shm,
    check_torch,
    gpus_in_use,
    machine_findings,
)
from opendiloco.doctor.quick import judge, quick_findings
from opendiloco.errors import MachineError
from opendiloco.owner.sensors import GpuState, Sensor
from opendiloco.workers.options import WorkerOptions

PASS, WARN, FAIL, SKIPPED = Verdict
GB = 10**9
RUN = "tiny-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWADA2vJXLmyk1SHLyFogztmUkYfacm9C2finbispzbjcL"
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 * GB, 79 * GB, has_bf16=True)
T4 = Gpu("Tesla T4", (7, 5), 16 * GB, 15 * GB, has_bf16=False)
BROKEN = replace(H100, error="CUDA error: no kernel image is available for execution on the device")
CARD = Cards(("NVIDIA H100 80GB HBM3",), "570.124.06")
NO_DRIVER = Cards(("an NVIDIA GPU",), None)
CPU_BUILD = Torch("2.9.0+cpu", None, ())
CUDA_BUILD = Torch("2.9.0", "CUDA 12.8", (H100,))
SEES_NONE = Torch("2.9.0", "CUDA 12.8", (), "The NVIDIA driver on your system is too old (found version 11040)")
FOLDER = Folder(Path("/state"), 100 * GB)
MACHINE = Machine("3.12.1", 16, CUDA_BUILD, CARD, True, 128 * GB, 64 * GB, FOLDER)


@pytest.mark.parametrize(
    ("finding", "verdict", "says"),
    [
        (check_python("3.11.7", 2), PASS, "2 cores"),
        (check_python("3.10.2", 1), FAIL, "Install Python 3.11"),
        (check_torch(None, CARD), FAIL, "not installed"),
        (check_torch(CPU_BUILD, Cards()), PASS, "built for CPUs alone"),
        (check_torch(CPU_BUILD, CARD), WARN, "but this machine has a GPU: NVIDIA H100 80GB HBM3"),
        (check_torch(CUDA_BUILD, CARD), PASS, "CUDA 12.8"),
        (check_torch(Torch("2.9.0", None, None, "SIGILL ended it"), Cards()), FAIL, "SIGILL"),
        (check_gpu(None, CARD), SKIPPED, "torch"),
        (check_gpu(replace(CUDA_BUILD, gpus=None), CARD), SKIPPED, "H100"),
        (check_gpu(CPU_BUILD, Cards()), PASS, "trains on the CPU"),
        (check_gpu(CPU_BUILD, Cards(), "cuda:1"), FAIL, "no GPU for --device cuda:1"),
        (check_gpu(SEES_NONE, NO_DRIVER), WARN, "--gpus all"),
        (check_gpu(SEES_NONE, CARD), WARN, "driver 570.124.06, but torch sees none: The NVIDIA driver"),
        (check_gpu(SEES_NONE, CARD, "cuda"), FAIL, "Update the driver"),
        (check_gpu(CPU_BUILD, CARD), WARN, "Install a build of torch"),
        (check_gpu(CUDA_BUILD, CARD), PASS, "NVIDIA H100 80GB HBM3 (80 GB, 9.0), with bf16"),
        (check_gpu(replace(CUDA_BUILD, gpus=(H100, T4)), CARD), WARN, "without bf16"),
        (check_gpu(replace(CUDA_BUILD, gpus=(H100, BROKEN)), CARD), FAIL, "no kernel image"),
        (check_gpu(replace(CUDA_BUILD, gpus=(BROKEN,)), CARD, "cpu"), PASS, "H100"),
        (check_compiler(has_compiler=True, has_gpu=True), PASS, "compiler"),
        (check_compiler(has_compiler=False, has_gpu=True), WARN, "Install gcc"),
        (check_compiler(has_compiler=False, has_gpu=False), SKIPPED, "no GPU"),
        (check_kernels(Kernels("avx2", (), {"quantize": 20.0})), PASS, "quantize 20.0 GB/s"),
        (check_kernels(Kernels("scalar", (), {"quantize": 0.2, "outer step": 3.0})), WARN, "slow"),
        (check_kernels(Kernels("avx2", ("avx512",), {})), FAIL, "avx512"),
        (check_kernels(Kernels("", (), {}, "no such symbol")), FAIL, "no such symbol"),
        (check_shm(None, 1), PASS, "no /dev/shm"),
        (check_shm(0, 1), PASS, "only several GPUs"),
        (check_shm(0, 2), FAIL, "--shm-size"),
        (check_shm(None, 2), FAIL, "no /dev/shm"),
        (check_shm(64 << 20, 8), WARN, "little for 8 GPUs"),
        (check_shm(2 << 30, 8), PASS, "2.15 GB"),
        (check_memory(GB), WARN, "1 GB"),
        (check_memory(8 * GB), PASS, "8 GB"),
        (check_memory(8 * GB, (), Taken(9 * GB, None, 0, 0)), FAIL, "the run takes 9 GB"),
        (check_memory(8 * GB, (), Taken(7 * GB, None, 0, 0)), PASS, "the run takes 7 GB"),
        (check_memory(8 * GB, (H100, T4), Taken(7 * GB, 20 * GB, 2, 0)), FAIL, "15 GB that are free"),
        (check_memory(8 * GB, (H100, T4), Taken(7 * GB, 20 * GB, 1, 0)), PASS, "79 GB that are free"),
        (check_disk(FOLDER), PASS, "/state"),
        (check_disk(replace(FOLDER, free=GB)), WARN, "--state"),
        (check_disk(replace(FOLDER, free=1000)), FAIL, "--state"),
        (check_disk(Folder(Path("/state"), 0, "Permission denied")), FAIL, "Permission denied"),
        (check_disk(FOLDER, Taken(0, None, 0, 99 * GB)), PASS, "99 GB"),
        (check_disk(FOLDER, Taken(0, None, 0, 101 * GB)), WARN, "--keep 1"),
        (check_heat((), ()), SKIPPED, "no temperature"),
        (check_heat((Sensor("coretemp", 60.0, 100.0), Sensor("nvme", 50.0)), ()), PASS, "coretemp is at 60"),
        (check_heat((Sensor("coretemp", 97.0, 100.0),), ()), WARN, "hot already"),
        (check_heat((Sensor("acpitz", 96.0),), ()), WARN, "hot already"),
        (check_heat((), (GpuState("T4", 88.0),)), WARN, "T4 is at 88"),
        (check_heat((), (GpuState("T4", 80.0, is_slowed_by_heat=True),)), WARN, "slowed down: T4"),
        (check_power(False, ()), SKIPPED, "not on battery"),
        (check_power(True, ()), WARN, "Plug it in"),
        (check_power(False, (GpuState("T4", 50.0, 30.0, 70.0, 70.0),)), PASS, "70 of 70 W"),
        (check_power(False, (GpuState("H100", 50.0, 90.0, 200.0, 700.0),)), WARN, "nvidia-smi -pl 700"),
        (check_power(False, (GpuState("T4", 50.0, is_slowed_by_power=True),)), WARN, "power supply"),
    ],
)
def test_what_facts_mean(finding: Finding, verdict: Verdict, says: str) -> None:
    assert finding.verdict is verdict, finding
    assert says in f"{finding.found}\n{finding.remedy}"
    assert bool(finding.remedy) == (verdict in (WARN, FAIL)), "a remedy where there is something to do"


def test_the_worst_verdict_counts_and_what_was_skipped_does_not() -> None:
    fine, could_be_better = passed("gpu", "x"), warned("gpu", "x", "y")
    assert worst([]) is PASS
    assert worst([fine, skipped("heat", "x")]) is PASS
    assert worst([fine, could_be_better]) is WARN
    assert worst([could_be_better, check_torch(None, CARD), fine]) is FAIL


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
    assert gpus_in_use(replace(MACHINE, torch=torch), options) == count


def test_a_good_machine_passes_and_the_checks_come_in_their_order() -> None:
    findings = machine_findings(MACHINE, WorkerOptions())
    assert worst(findings) is PASS
    assert [finding.name for finding in findings] == list(CHECKS)[: len(findings)]


def test_who_wants_the_cpu_hears_nothing_of_gpus() -> None:
    findings = machine_findings(replace(MACHINE, torch=CPU_BUILD, has_compiler=False), WorkerOptions(device="cpu"))
    assert worst(findings) is PASS


# The quick part, which join makes --------------------------------------------------------------------------------
def test_join_hears_at_once_of_a_torch_that_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    machine = replace(MACHINE, torch=Torch("2.9.0+cpu", None))
    judge(quick_findings(machine, WorkerOptions()))
    assert "but this machine has a GPU" in caplog.text
    caplog.clear()
    judge(quick_findings(MACHINE, WorkerOptions()))
    assert not caplog.text


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        (replace(MACHINE, torch=None), "torch is not installed"),
        (replace(MACHINE, folder=Folder(Path("/state"), 0, "Permission denied")), "cannot be written to"),
        (replace(MACHINE, torch=replace(CUDA_BUILD, gpus=(H100, H100)), shm=0), "--shm-size"),
    ],
)
def test_join_ends_at_once_where_nothing_can_be_trained(machine: Machine, says: str) -> None:
    with pytest.raises(MachineError, match=says):
        judge(quick_findings(machine, WorkerOptions()))


def test_join_itself_ends_before_it_asks_anybody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = ["--identity", str(tmp_path / "key.pem"), "--state", str(tmp_path / "file" / "state")]
    ended = CliRunner().invoke(main, ["join", "--run", RUN, "--initial-peer", NOBODY, "--plain", *options])
    assert ended.exit_code == MachineError.exit_code
    assert "state cannot be written to: Not a directory" in ended.output
    assert not (tmp_path / "key.pem").exists()


def test_join_says_nothing_of_a_disk_with_little_room() -> None:
    """Nobody knows yet how much the run takes, and `--keep 0` takes none."""
    judge(quick_findings(replace(MACHINE, folder=replace(FOLDER, free=1)), WorkerOptions()))
