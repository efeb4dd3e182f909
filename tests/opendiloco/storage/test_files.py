"""Names, the file format beside safetensors' own, and the rule of what is kept."""

from __future__ import annotations

import fcntl
import io
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

from opendiloco.storage.files import (
    DamagedFileError,
    file_header,
    file_name,
    index_of,
    indices_in,
    kept,
    prune,
    read_file_header,
    sweep,
)

METADATA = {"format": "some", "run": 'with "quotes" and ö'}


def test_names_and_indices() -> None:
    assert file_name(120) == "outer-step-000120.safetensors"
    assert [index_of(file_name(index)) for index in (0, 120, 12_345_678)] == [0, 120, 12_345_678]
    assert index_of("outer-step-000120.safetensors.partial") is None
    names = [file_name(3), file_name(20), "model.safetensors", "outer-step-00000003.safetensors"]
    assert indices_in(names) == [20, 3]


@pytest.mark.parametrize("values", [0, 1, 1001])
def test_a_file_is_what_safetensors_would_write(values: int, tmp_path: Path) -> None:
    momentum, theta = np.random.default_rng(1).standard_normal((2, values), np.float32)
    path, theirs = tmp_path / "ours", tmp_path / "theirs"
    path.write_bytes(file_header(8 * values, METADATA) + momentum.tobytes() + theta.tobytes())
    safetensors.numpy.save_file({"theta": theta, "momentum": momentum}, theirs, metadata=METADATA)
    assert path.stat().st_size == theirs.stat().st_size
    offset = path.stat().st_size - 8 * values  # in the JSON before it, safetensors has its own order
    assert path.read_bytes()[offset:] == theirs.read_bytes()[offset:]
    with safe_open(path, "np") as file:
        assert file.metadata() == METADATA
        assert sorted(file.keys()) == ["momentum", "theta"]
        assert np.array_equal(file.get_tensor("momentum"), momentum)
        assert np.array_equal(file.get_tensor("theta"), theta)


def test_a_header_is_read_back() -> None:
    header = file_header(80, METADATA)
    assert len(header) % 8 == 0
    assert read_file_header(io.BytesIO(header + bytes(80))) == (METADATA, len(header))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "does not begin"),
        (b"\xff" * 100, "does not begin"),
        ((40).to_bytes(8, "little") + b"[" * 40, "no safetensors header"),
        ((2).to_bytes(8, "little") + b"{}", "no safetensors header"),
        (file_header(80, METADATA)[:-20], "no safetensors header"),
        (file_header(80, METADATA) + bytes(79), "bytes instead of"),
        (file_header(80, METADATA) + bytes(81), "bytes instead of"),
        (file_header(80, METADATA).replace(b"[10]", b"[11]") + bytes(80), "does not (write|produce)"),
        (file_header(80, METADATA).replace(b"F32", b"I32") + bytes(80), "does not (write|produce)"),
        (file_header(80, METADATA).replace(b'"some"', b"123456") + bytes(80), "does not (write|produce)"),
    ],
)
def test_what_we_would_not_write_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(DamagedFileError, match=reason):
        read_file_header(io.BytesIO(content))


def test_the_rule_of_what_is_kept() -> None:
    indices = range(0, 100, 5)
    assert kept(indices, 2, 0) == {95, 90}
    assert kept(indices, 2, 30) == {95, 90, 60, 30, 0}
    assert kept(indices, 0, 30) == {90, 60, 30, 0}
    assert kept(indices, 0, 0) == set()
    assert kept([7], 2, 30) == {7}


def test_pruning_touches_nothing_but_checkpoints(tmp_path: Path) -> None:
    others = {"notes.txt", "model.safetensors", file_name(3) + ".partial"}
    for name in {file_name(index) for index in range(1, 8)} | others:
        (tmp_path / name).touch()
    prune(tmp_path, 2, 3)
    assert {path.name for path in tmp_path.iterdir()} == others | {file_name(index) for index in (3, 6, 7)}


def test_a_lineage_that_was_left_goes(tmp_path: Path) -> None:
    for index in (4, 6, 8, 20, 25, 30):
        (tmp_path / file_name(index)).touch()
    prune(tmp_path, 2, 10, last=8)
    assert indices_in(path.name for path in tmp_path.iterdir()) == [8, 6]


def test_partial_files_are_swept_unless_somebody_writes_them(tmp_path: Path) -> None:
    for name in (file_name(1), file_name(2) + ".partial", file_name(3) + ".partial"):
        (tmp_path / name).touch()
    with (tmp_path / (file_name(3) + ".partial")).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        sweep(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {file_name(1), file_name(3) + ".partial"}
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {file_name(1)}
