"""What is read of a machine's GPUs, and what is said of those that torch cannot use."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from opendiloco.gpus import Cards, read_cards, unusable


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


@pytest.fixture(autouse=True)
def _no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_cards_by_their_driver_or_else_on_the_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pci, driver, devices = tmp_path / "pci", tmp_path / "nvidia", (tmp_path / "nvidiactl", tmp_path / "dxg")
    assert read_cards(pci, driver, devices) == Cards()
    write(pci / "0000:01:00.0", vendor="0x10de", **{"class": "0x030200"})
    write(pci / "0000:01:00.1", vendor="0x10de", **{"class": "0x040300"})  # its sound
    write(pci / "0000:02:00.0", vendor="0x8086", **{"class": "0x030000"})
    assert read_cards(pci, driver, devices) == Cards(("an NVIDIA GPU",))
    write(driver / "gpus" / "0000:01:00.0", information="Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 42")
    write(driver, version="NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 01:00:00 UTC 2025")
    in_a_container = read_cards(pci, driver, devices)  # /proc shows the driver there, too
    assert in_a_container == Cards(("NVIDIA H100 80GB HBM3",), "570.124.06")
    assert not in_a_container.are_reachable
    devices[0].touch()
    assert read_cards(pci, driver, devices).are_reachable
    for hides in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hides)
        assert read_cards(pci, driver, devices) == Cards()


def test_a_card_in_windows_is_on_no_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing, devices = tmp_path / "nothing", (tmp_path / "nvidiactl", tmp_path / "dxg")
    devices[1].touch()  # any vendor's GPU has it
    assert not read_cards(nothing, nothing, devices).names
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/lib/wsl/lib/nvidia-smi")
    assert read_cards(nothing, nothing, devices) == Cards(("an NVIDIA GPU",), None, is_driven=True)
    devices[1].unlink()
    assert not read_cards(nothing, nothing, devices).are_reachable, "a tool alone is no GPU"


@pytest.mark.parametrize(
    ("driver", "platform", "is_old"),
    [
        ("570.124.06", "CUDA 13.0", True),
        ("580.65.06", "CUDA 13.0", False),
        ("570.124.06", "CUDA 12.8", False),
        ("470.57.02", "CUDA 12.6", True),
        (None, "CUDA 13.0", False),
        ("570.124.06", None, False),
        ("570.124.06", "ROCm 6.4", False),
    ],
)
def test_a_driver_must_be_new_enough_for_torch(driver: str | None, platform: str | None, is_old: bool) -> None:
    assert Cards(("T4",), driver, is_driven=True).are_too_old_for(platform) is is_old


def test_a_hidden_gpu_has_a_remedy() -> None:
    found, remedy = Cards(("T4",), "550.1", is_driven=True).hidden_from("2.13.0", "CUDA 13.0", "too old")
    assert found == "T4 is here with driver 550.1, but torch 2.13.0, built for CUDA 13.0, cannot use it: too old"
    assert "to 580 or newer" in remedy
    assert remedy.endswith("--device cpu.")


@pytest.mark.parametrize(("capability", "is_old"), [((6, 1), True), ((7, 0), True), ((7, 5), False), ((12, 0), False)])
def test_cards_older_than_turing_hear_of_the_build_for_them(capability: tuple[int, int], is_old: bool) -> None:
    found, remedy = unusable("A card", capability, "2.13.0", "no kernel image is available")
    assert f"A card (compute capability {capability[0]}.{capability[1]}): no kernel image" in found
    assert ("the build for CUDA 12.6" in remedy) is is_old
    assert ("Install a build of torch" in remedy) is not is_old
    assert remedy.endswith("--device cpu.")


def test_a_broken_card_needs_no_other_torch() -> None:
    _, remedy = unusable("NVIDIA H100", (9, 0), "2.13.0", "CUDA error: uncorrectable ECC error encountered")
    assert "nvidia-smi -q" in remedy
    assert "Install" not in remedy
