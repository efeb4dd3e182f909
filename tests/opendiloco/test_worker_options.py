from __future__ import annotations

import pytest

from opendiloco.errors import MachineError
from opendiloco.workers.options import WorkerOptions, choose_devices


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
