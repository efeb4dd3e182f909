"""Memory in files without names, and where snapshots and downloads lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from peers.transfer.storage import FolderStorage, MemoryFile, Storage
from peers.values.wire import digest_of

DIGEST, ANOTHER = digest_of(b"a state"), digest_of(b"another state")


def folder_storage(folder: Path, memory: int = 1 << 40) -> FolderStorage:
    return FolderStorage(folder, lambda: memory)


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


# Memory ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [0, 1, 5000])
def test_memory_is_as_large_as_it_should_be_and_empty(tmp_path: Path, size: int) -> None:
    for file in (MemoryFile.in_memory(size), MemoryFile.on_disk(size, tmp_path)):
        assert bytes(file.data) == bytes(size)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_another_who_has_the_descriptor_sees_what_is_written(tmp_path: Path) -> None:
    for file in (MemoryFile.in_memory(4), MemoryFile.on_disk(4, tmp_path)):
        inherited = os.dup(file.descriptor)
        file.data[:] = b"here"
        file.close()
        assert os.pread(inherited, 4, 0) == b"here"
        os.close(inherited)


def test_memory_is_new_until_something_was_in_it(tmp_path: Path) -> None:
    assert MemoryFile.in_memory(4).is_new
    storage = FolderStorage(tmp_path, lambda: 1 << 40)
    assert storage.download(bytes(32), 4).is_new
    assert not storage.download(bytes(32), 4).is_new


def test_data_outlives_the_descriptor() -> None:
    file = MemoryFile.in_memory(4)
    descriptor, data = file.descriptor, file.data
    data[:] = b"here"
    file.close()
    file.close()
    assert not is_open(descriptor)
    assert bytes(data) == b"here"


def test_who_is_forgotten_closes_its_descriptor() -> None:
    file = MemoryFile.in_memory(4)
    descriptor = file.descriptor
    del file
    assert not is_open(descriptor)


def test_without_room_it_says_so_and_closes_the_descriptor_once(tmp_path: Path) -> None:
    """Regression: it closed it again when it was forgotten, when the number was perhaps another file's."""
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError, match=r"too large|[Nn]o space") as caught:
        MemoryFile(descriptor, 1 << 62)
    successor = os.open(tmp_path / "another", os.O_RDWR | os.O_CREAT)
    assert successor == descriptor, "numbers are used again"
    del caught
    assert is_open(successor), "it is another's now"
    os.close(successor)


# Storage --------------------------------------------------------------------------------------------------------
def test_a_download_goes_on_where_another_process_left_it(tmp_path: Path) -> None:
    first = folder_storage(tmp_path).download(DIGEST, 100)
    first.data[:50] = b"x" * 50
    del first
    again = folder_storage(tmp_path).download(DIGEST, 100)
    assert bytes(again.data) == b"x" * 50 + bytes(50)


def test_the_remains_of_another_state_are_dropped(tmp_path: Path) -> None:
    storage = folder_storage(tmp_path)
    storage.download(ANOTHER, 100)
    (tmp_path / "identity.pem").write_text("not ours")
    storage.download(DIGEST, 100)
    assert {path.name for path in tmp_path.iterdir()} == {f"{DIGEST.hex()}.state", "identity.pem"}


def test_of_a_download_that_is_complete_the_bytes_remain_and_the_file_does_not(tmp_path: Path) -> None:
    storage = folder_storage(tmp_path)
    file = storage.download(DIGEST, 100)
    file.data[:] = b"x" * 100
    storage.downloaded()
    assert list(tmp_path.iterdir()) == []
    assert bytes(file.data) == b"x" * 100


def test_a_download_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder_storage(tmp_path).download(DIGEST, 100)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("size", "on_disk"), [(99, False), (100, False), (101, True)])
def test_a_large_snapshot_lies_on_the_disk(
    tmp_path: Path, size: int, on_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peers.transfer.storage.IN_MEMORY", 100)
    snapshot = folder_storage(tmp_path).snapshot(size)
    assert len(snapshot.data) == size
    assert (os.fstat(snapshot.descriptor).st_dev == tmp_path.stat().st_dev) is on_disk
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("memory", [202, 201])
def test_a_snapshot_without_room_on_the_disk_lies_in_memory_if_that_leaves_enough(
    tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("peers.transfer.storage.IN_MEMORY", 100)
    gone = folder_storage(tmp_path / "gone", memory)
    if memory < 202:
        with pytest.raises(FileNotFoundError):
            gone.snapshot(101)
        return
    assert len(gone.snapshot(101).data) == 101
    assert "kept in memory, not in" in caplog.text


def test_a_folder_that_is_gone_is_no_room_for_a_download(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        folder_storage(tmp_path / "gone", memory=0).download(DIGEST, 100)


def test_without_a_folder_all_lies_in_memory() -> None:
    storage = Storage()
    first, again = storage.download(DIGEST, 100), storage.download(DIGEST, 100)
    first.data[:] = b"x" * 100
    assert bytes(again.data) == bytes(100), "it begins anew"
    storage.downloaded()
    assert len(storage.snapshot(10).data) == 10
