"""GPUs' power limits, with an nvidia-smi of our own in the PATH."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opendiloco.errors import MachineError
from opendiloco.owner.gpus import Gpu, parse_gpus, power_limit, used_indices

SMI = """#!/bin/sh
case "$*" in
  *query-gpu*) printf '0, 61, 120.50, 450.00\\n1, 40, [N/A], 300.00\\n' ;;
  *) echo "$@" >> "$SMI_LOG"; [ -z "$SMI_REFUSES" ] || { echo "$SMI_REFUSES."; exit 4; } ;;
esac
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SMI_LOG", str(tmp_path / "log"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "log"


def test_the_limit_holds_for_the_gpus_in_use_and_ends_with_us(log: Path) -> None:
    with power_limit(250, "auto", 1):
        assert log.read_text().splitlines() == ["-i 0 -pl 250"]
    assert log.read_text().splitlines() == ["-i 0 -pl 250", "-i 0 -pl 450"]


def test_a_driver_that_refuses_is_quoted(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMI_REFUSES", "Insufficient Permissions")
    with (
        pytest.raises(MachineError, match="GPU 0 cannot be set to 250 W: Insufficient Permissions"),
        power_limit(250, "auto", None),
    ):
        pass


def test_where_there_is_no_gpu_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="names no GPU"), power_limit(250, "auto", None):
        pass
    with power_limit(None, "auto", None):
        pass


@pytest.mark.parametrize(
    ("device", "gpus", "visible", "used"),
    [
        ("auto", None, None, ["0", "1", "2"]),
        ("cuda", 2, None, ["0", "1"]),
        ("cuda:1", None, None, ["1"]),
        ("cuda:1", None, "2,0", ["0"]),
        ("auto", 1, "2,0", ["2"]),
        ("cpu", None, None, []),
    ],
)
def test_gpus_are_counted_as_torch_counts_them(
    device: str, gpus: int | None, visible: str | None, used: list[str]
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert used_indices(device, gpus, ["0", "1", "2"], environment) == used


def test_what_cannot_be_read_is_none() -> None:
    assert parse_gpus("0, 61, [N/A], 450.00\nnonsense\n") == [Gpu("0", 61.0, None, 450.0)]
