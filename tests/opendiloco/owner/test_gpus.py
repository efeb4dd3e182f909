"""GPUs' power limits, with an nvidia-smi of our own in the PATH."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opendiloco.errors import MachineError
from opendiloco.owner.gpus import Gpu, parse_gpus, used_gpus
from opendiloco.owner.power import FOLDER, power_limit, set_limits_back

SMI = """#!/bin/sh
case "$*" in
  *query-gpu*) printf '0, GPU-5b, 61, 120.50, 450.00\\n1, GPU-77, 40, [N/A], 300.00\\n' ;;
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


def test_the_limit_holds_for_the_gpus_in_use_and_ends_with_us(log: Path, tmp_path: Path) -> None:
    with power_limit(250, "auto", 1, tmp_path):
        assert log.read_text().splitlines() == ["-i 0 -pl 250"]
        set_limits_back(tmp_path)  # as another volunteer does when it starts
        assert log.read_text().splitlines() == ["-i 0 -pl 250"]
        with pytest.raises(MachineError, match="another volunteer"), power_limit(300, "auto", 1, tmp_path):
            pass
    assert log.read_text().splitlines() == ["-i 0 -pl 250", "-i 0 -pl 450"]
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_what_a_killed_volunteer_has_limited_is_set_back_at_the_next_start(log: Path, tmp_path: Path) -> None:
    leave_a_limit(tmp_path)
    set_limits_back(tmp_path)
    set_limits_back(tmp_path)
    assert log.read_text().splitlines() == ["-i 0 -pl 600"]


def test_the_limit_of_a_killed_volunteer_is_not_taken_for_the_original(log: Path, tmp_path: Path) -> None:
    leave_a_limit(tmp_path)
    with power_limit(250, "auto", 1, tmp_path):
        pass
    assert log.read_text().splitlines() == ["-i 0 -pl 250", "-i 0 -pl 600"]


def test_a_limit_that_cannot_be_set_back_is_told_and_tried_again(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with power_limit(250, "auto", 1, tmp_path):
        monkeypatch.setenv("SMI_REFUSES", "GPU is lost")
    assert "cannot be set to 450 W: GPU is lost" in caplog.text
    monkeypatch.delenv("SMI_REFUSES")
    set_limits_back(tmp_path)
    assert log.read_text().splitlines()[-1] == "-i 0 -pl 450"
    assert list((tmp_path / FOLDER).iterdir()) == []


def leave_a_limit(state: Path) -> None:
    """As a volunteer that was killed does."""
    (state / FOLDER).mkdir()
    (state / FOLDER / "0").write_text("600")


def test_a_driver_that_refuses_is_quoted(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMI_REFUSES", "Insufficient Permissions")
    with (
        pytest.raises(MachineError, match="GPU 0 cannot be set to 250 W: Insufficient Permissions"),
        power_limit(250, "auto", None, tmp_path),
    ):
        pass
    assert list((tmp_path / FOLDER).iterdir()) == [], "nothing was changed"


def test_where_there_is_no_gpu_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="names no GPU"), power_limit(250, "auto", None, tmp_path):
        pass
    with power_limit(None, "auto", None, tmp_path):
        pass


@pytest.mark.parametrize(
    ("device", "gpus", "visible", "used"),
    [
        ("auto", None, None, ["0", "1", "2"]),
        ("cuda", 2, None, ["0", "1"]),
        ("cuda:1", None, None, ["1"]),
        ("cuda:1", None, "2,0", ["0"]),
        ("auto", 1, "2,0", ["2"]),
        ("auto", None, "GPU-c, GPU-a7", ["2", "0"]),
        ("auto", None, "1,-1,0", ["1"]),
        ("auto", None, "", []),
        ("cpu", None, None, []),
    ],
)
def test_gpus_are_counted_as_torch_counts_them(
    device: str, gpus: int | None, visible: str | None, used: list[str]
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    seen = [Gpu("0", "GPU-a7"), Gpu("1", "GPU-b8"), Gpu("2", "GPU-c9")]
    assert [gpu.index for gpu in used_gpus(device, gpus, seen, environment)] == used


def test_what_cannot_be_read_is_none() -> None:
    assert parse_gpus("0, GPU-5b, 61, [N/A], 450.00\nnonsense\n") == [Gpu("0", "GPU-5b", 61.0, None, 450.0)]
