"""Checkpoints are used only if they are, bit for bit, what was frozen."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from opendiloco.errors import CheckpointError
from opendiloco.storage.files import file_header, file_name, read_file_header
from opendiloco.storage.loading import Checkpoints, load_checkpoint, metadata_of
from opendiloco.storage.writer import _write_checkpoint
from peers.transfer.snapshots import FrozenSnapshot
from peers.values.chunks import chunk_digests
from tests.opendiloco.storage.frozen_states import RUN, frozen


def write(folder: Path, index: int, values: int = 1000, run: str = RUN) -> FrozenSnapshot:
    """As the writer process does."""
    state = frozen(index, values, run)
    size, metadata = state.memory.data.nbytes, metadata_of(run, state.last, state.state_digest)
    _write_checkpoint(folder / file_name(index), state.memory.descriptor, size, metadata)
    return state


@pytest.mark.parametrize("index", [0, 120])
def test_what_was_frozen_is_loaded(index: int, tmp_path: Path) -> None:
    state = write(tmp_path / "new", index, values=300_000)
    found = Checkpoints(tmp_path / "new", RUN).load_newest()
    assert found is not None
    assert (found.index, found.last, found.state_digest) == (index, state.last, state.state_digest)
    assert found.data == state.memory.data
    assert found.chunk_digests == chunk_digests([state.memory.data])
    assert len(found.chunk_digests) == 3
    assert [path.name for path in (tmp_path / "new").iterdir()] == [file_name(index)]


def test_a_mapped_state_outlives_its_file(tmp_path: Path) -> None:
    state = write(tmp_path, 1)
    found = load_checkpoint(tmp_path / file_name(1), RUN)
    (tmp_path / file_name(1)).unlink()
    assert found.data == state.memory.data


def test_the_newest_comes_first(tmp_path: Path) -> None:
    for index in (9, 120, 15):
        write(tmp_path, index)
    checkpoints = Checkpoints(tmp_path, RUN)
    assert checkpoints.indices() == [120, 15, 9]
    found = checkpoints.load_newest(at_most=100)
    assert found is not None
    assert found.index == 15


def test_a_folder_without_any(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "missing", RUN).load_newest() is None
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be read"):
        Checkpoints(tmp_path / "file", RUN).load_newest()


@pytest.mark.parametrize("lost", [1, 4000, 8000, 8900])
def test_a_truncated_file_is_named_and_skipped(lost: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    path = tmp_path / file_name(2)
    path.write_bytes(path.read_bytes()[:-lost])
    with caplog.at_level(logging.WARNING):
        found = Checkpoints(tmp_path, RUN).load_newest()
    assert found is not None
    assert found.index == 1
    assert str(path) in caplog.text
    assert "skipped" in caplog.text


def test_no_bit_can_flip_unnoticed(tmp_path: Path) -> None:
    """Bit 5 makes an upper-case letter of a lower-case one, in hexadecimal digits, too."""
    write(tmp_path, 2, values=3)
    path = tmp_path / file_name(2)
    good = path.read_bytes()
    for byte in range(len(good)):
        for bit in (0, 5):
            damaged = bytearray(good)
            damaged[byte] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=path.name):
                load_checkpoint(tmp_path / file_name(2), RUN)


def test_all_damaged_is_none_at_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for index in (1, 2):
        (tmp_path / file_name(index)).write_bytes(b"nonsense")
    assert Checkpoints(tmp_path, RUN).load_newest() is None
    assert [file_name(index) in caplog.text for index in (1, 2)] == [True, True]


def test_a_file_of_another_run_or_index(tmp_path: Path) -> None:
    other = "other-" + "b" * 32
    write(tmp_path, 1, run=other)
    with pytest.raises(CheckpointError, match=f"belongs to the run '{other}', not to {RUN}"):
        load_checkpoint(tmp_path / file_name(1), RUN)
    write(tmp_path, 2)
    (tmp_path / file_name(2)).rename(tmp_path / file_name(3))
    with pytest.raises(CheckpointError, match="after 2 outer steps, which its name contradicts"):
        load_checkpoint(tmp_path / file_name(3), RUN)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"format": "diloco-peer checkpoint, version 2"}, "not of the format"),
        ({"more": ""}, "not of the format"),
        ({"state_digest": "12"}, "do not match its digest"),
        ({"state_digest": "xy"}, "cannot be read"),
        ({"last": "c0"}, "cannot be read"),
        ({"last": ""}, "contradicts itself"),
        ({"head": "00" * 32}, "contradicts itself"),
    ],
)
def test_metadata_must_hold_together(changed: dict[str, str], reason: str, tmp_path: Path) -> None:
    write(tmp_path, 2)
    path = tmp_path / file_name(2)
    with path.open("rb") as file:
        metadata, offset = read_file_header(file)
    state = path.read_bytes()[offset:]
    path.write_bytes(file_header(len(state), metadata | changed) + state)
    with pytest.raises(CheckpointError, match=reason):
        load_checkpoint(tmp_path / file_name(2), RUN)
