from __future__ import annotations

import os
from pathlib import Path

import pytest

from opendiloco import cores as cores_module
from opendiloco.cores import usable_cores
from opendiloco.errors import MachineError
from opendiloco.workers.options import WorkerOptions, choose_devices, choose_threads


@pytest.mark.parametrize(
    ("options", "gpus", "devices"),
    [
        (WorkerOptions(), 0, ["cpu"]),
        (WorkerOptions(), 2, ["cuda:0", "cuda:1"]),
        (WorkerOptions(gpus=1), 2, ["cuda:0"]),
        (WorkerOptions(cpu_workers=3), 0, ["cpu"] * 3),
        (WorkerOptions(cpu_workers=3), 1, ["cuda:0"]),
        (WorkerOptions(device="cpu", cpu_workers=2), 8, ["cpu"] * 2),
        (WorkerOptions(device="cuda"), 2, ["cuda:0", "cuda:1"]),
        (WorkerOptions(device="cuda:1"), 0, ["cuda:1"]),  # the worker itself finds out whether it is there
        (WorkerOptions(device="cuda"), 0, ["cuda"]),
        (WorkerOptions(trains=False), 2, ["cuda:0"]),
        (WorkerOptions(cpu_workers=3, trains=False), 0, ["cpu"]),
    ],
)
def test_each_worker_has_a_device(options: WorkerOptions, gpus: int, devices: list[str]) -> None:
    assert choose_devices(options, gpus) == devices


@pytest.mark.parametrize(
    ("options", "said"),
    [(WorkerOptions(gpus=3), "--gpus 3 are more"), (WorkerOptions(device="cpu", gpus=1), "contradict each other")],
)
def test_gpus_that_cannot_be_had(options: WorkerOptions, said: str) -> None:
    with pytest.raises(MachineError, match=said) as caught:
        choose_devices(options, 2)
    assert caught.value.exit_code == 6
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("threads", "devices", "cores", "expected"),
    [
        (None, ["cpu"], 16, 15),
        (None, ["cpu"] * 4, 16, 3),
        (None, ["cpu"] * 4, 3, 1),
        (None, ["cpu"], 2, 1),
        (None, ["cpu"], 1, 1),
        (None, ["cuda:0"], 16, 1),
        (5, ["cpu"], 2, 5),
        (5, ["cuda:0"], 16, 5),
    ],
)
def test_workers_on_the_cpu_share_all_cores_but_one(
    threads: int | None, devices: list[str], cores: int, expected: int
) -> None:
    assert choose_threads(WorkerOptions(threads=threads), devices, cores) == expected


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, 4), ("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 4)],
)
def test_cores_are_those_that_may_be_used_each_counted_once(
    limit: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight threads of five cores, of which one is not ours and another has one thread."""
    for number in range(9):
        (tmp_path / str(number)).write_text(f"{number // 2 * 2}-{number // 2 * 2 + 1}\n")
    if limit is not None:
        (tmp_path / "limit").write_text(limit + "\n")
    monkeypatch.setattr(cores_module, "THREADS_OF_CORE", str(tmp_path / "{}"))
    monkeypatch.setattr(cores_module, "CPU_LIMIT", str(tmp_path / "limit"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3, 4, 5, 8})
    assert usable_cores() == expected


def test_where_the_system_does_not_say_which_threads_share_a_core_each_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores_module, "THREADS_OF_CORE", "/nowhere/{}")
    monkeypatch.setattr(cores_module, "CPU_LIMIT", "/nowhere")
    assert usable_cores() == len(os.sched_getaffinity(0))
