"""Facts as they are read: from torch's probe, and folders like those of Linux."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from opendiloco.doctor import system
from opendiloco.doctor.facts import Cards, Torch
from opendiloco.doctor.system import free_shm, has_volunteer, look_at_folder, quick_machine, read_cards, try_kernels
from opendiloco.doctor.torch_probe import answered, first_sentence, installed_torch, probed_torch
from opendiloco.owner.controls import Answer, serve_controls

TORCH = Torch("2.9.0", "CUDA 12.8")
GPU = {
    "name": "NVIDIA H100 80GB HBM3",
    "capability": [9, 0],
    "memory": 80,
    "free": 79,
    "has_bf16": True,
    "error": "",
}


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
    told = answered(TORCH, 0, "some library's line\n" + json.dumps({"gpus": [GPU], "error": ""}), "a warning")
    assert told.gpus is not None
    assert (told.gpus[0].name, told.gpus[0].capability) == ("NVIDIA H100 80GB HBM3", (9, 0))
    assert answered(TORCH, 0, json.dumps({"gpus": [], "error": "too old"}), "").error == "too old"


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
    told = answered(TORCH, code, out, err)
    assert told.gpus is None
    assert says in told.error


def test_libraries_are_quoted_in_brief() -> None:
    assert first_sentence("CUDA initialization: too old (found 11040). Please update\nmore") == (
        "CUDA initialization: too old (found 11040)"
    )
    assert first_sentence("") == ""


def test_cards_by_their_driver_or_else_on_the_bus(tmp_path: Path) -> None:
    pci, driver = tmp_path / "pci", tmp_path / "nvidia"
    assert read_cards(pci, driver) == Cards()
    write(pci / "0000:01:00.0", vendor="0x10de", **{"class": "0x030200"})
    write(pci / "0000:01:00.1", vendor="0x10de", **{"class": "0x040300"})  # its sound
    write(pci / "0000:02:00.0", vendor="0x8086", **{"class": "0x030000"})
    assert read_cards(pci, driver) == Cards(("an NVIDIA GPU",))
    write(driver / "gpus" / "0000:01:00.0", information="Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 42")
    write(driver, version="NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 01:00:00 UTC 2025")
    assert read_cards(pci, driver) == Cards(("NVIDIA H100 80GB HBM3",), "570.124.06")


def test_a_folder_that_is_not_there_yet_can_be_made(tmp_path: Path) -> None:
    found = look_at_folder(tmp_path / "not" / "there")
    assert not found.error
    assert found.free > 0
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_a_folder_in_which_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert look_at_folder(tmp_path / "file" / "state").error == "Not a directory"
    assert look_at_folder(Path("/proc/state")).error


def test_there_may_be_no_shm(tmp_path: Path) -> None:
    assert free_shm(tmp_path / "shm") is None
    assert free_shm(tmp_path) is not None


def test_the_quick_facts_import_nothing_slow() -> None:
    code = "import sys; from opendiloco.doctor.quick import check_quickly; "
    code += "from opendiloco.workers.options import WorkerOptions; check_quickly(None, WorkerOptions()); "
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'hivemind', 'rich')))"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


def test_quick_facts_of_this_machine(tmp_path: Path) -> None:
    machine = quick_machine(tmp_path)
    assert machine.memory > 0
    assert machine.cores >= 1
    assert machine.folder.path == tmp_path
    assert machine.sensors == ()


def test_kernels_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendiloco.kernels.self_test.SECONDS_PER_OPERATION", 0.001)
    tried = try_kernels()
    assert not tried.error
    assert set(tried.speeds) == {"quantize", "dequantize", "accumulate", "outer step"}

    def breaks(threads: int) -> None:
        raise RuntimeError("illegal\ninstruction")

    monkeypatch.setattr("opendiloco.kernels.self_test.measure_speeds", breaks)
    assert system.try_kernels().error == "illegal instruction"


def test_a_volunteer_is_there_while_it_answers(tmp_path: Path) -> None:
    async def scenario() -> bool:
        folder = tmp_path / "tiny-x" / "peer"
        async with serve_controls(folder, lambda request: Answer(says="training", phase="training")):
            return await asyncio.to_thread(has_volunteer, tmp_path)

    assert not has_volunteer(tmp_path)
    assert asyncio.run(scenario())
    assert not has_volunteer(tmp_path)
