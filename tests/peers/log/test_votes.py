"""The file of a peer's votes (R10): whole or not there, of this machine, and never a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from peers.log.votes import VOTES, VotesFile, VotesFileError
from peers.values.system import PARTIAL


def on_machine(folder: Path, name: str = "one") -> VotesFile:
    """Return the file in a folder, on a machine of this name."""
    machine_id = folder / f"{name}.machine-id"
    machine_id.write_text(f"{name}\n")
    return VotesFile(folder, machine_id)


def test_it_has_what_was_written_last(tmp_path: Path) -> None:
    file = on_machine(tmp_path)
    assert file.read() is None, "nothing was written yet"
    for record in (b"first", b"", b"second"):
        file.write(record)
        assert on_machine(tmp_path).read() == record


def test_only_this_user_may_read_it(tmp_path: Path) -> None:
    file = on_machine(tmp_path)
    file.write(b"record")
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_what_a_killed_process_has_left_is_no_matter(tmp_path: Path) -> None:
    file = on_machine(tmp_path)
    file.write(b"record")
    (tmp_path / (VOTES + PARTIAL)).write_bytes(b"half of a")
    assert file.read() == b"record"
    file.write(b"another")
    assert file.read() == b"another"


def test_a_copy_is_not_read(tmp_path: Path) -> None:
    file = on_machine(tmp_path)
    file.write(b"record")
    shutil.copy2(file.path, tmp_path / "copy")
    (tmp_path / "copy").replace(file.path)
    with pytest.raises(VotesFileError, match="copied"):
        file.read()


def test_a_backup_is_not_read_though_it_has_the_inode_of_the_file_before(tmp_path: Path) -> None:
    """Its votes may be older than those that this machine has given. ext4 uses inodes again at once; where it does not
    in all of these tries, or the file system has others, the file is known by its inode."""
    folder, backup = tmp_path / "log", tmp_path / "backup"
    for _ in range(20):
        folder.mkdir()
        file = VotesFile(folder, tmp_path / "none")
        file.write(b"early")
        shutil.copytree(folder, backup)
        for vote in (b"later", b"last"):
            file.write(vote)
        shutil.rmtree(folder)
        shutil.copytree(backup, folder)
        with pytest.raises(VotesFileError, match="copied"):
            file.read()
        for each in (folder, backup):
            shutil.rmtree(each)


def test_a_file_of_another_machine_is_not_read(tmp_path: Path) -> None:
    on_machine(tmp_path).write(b"record")
    with pytest.raises(VotesFileError, match="another id"):
        on_machine(tmp_path, "two").read()


def test_a_machine_without_an_id_has_a_file_all_the_same(tmp_path: Path) -> None:
    file = VotesFile(tmp_path, tmp_path / "none")
    file.write(b"record")
    assert file.read() == b"record"


@pytest.mark.parametrize("damage", [b"", b"\xc1", b"record" * 20], ids=["empty", "no msgpack", "no envelope"])
def test_a_damaged_file_is_not_read(tmp_path: Path, damage: bytes) -> None:
    file = on_machine(tmp_path)
    file.path.write_bytes(damage)
    with pytest.raises(VotesFileError, match="damaged"):
        file.read()


def test_what_the_disk_does_not_take_leaves_the_record_as_it_was(tmp_path: Path) -> None:
    file = on_machine(tmp_path)
    file.write(b"record")
    (tmp_path / (VOTES + PARTIAL)).mkdir()
    with pytest.raises(VotesFileError, match="cannot be written: Is a directory"):
        file.write(b"another")
    assert file.read() == b"record"


def test_a_folder_that_was_moved_away_has_a_remedy_of_its_own(tmp_path: Path) -> None:
    """Regression: the volunteer's owner should make room there."""
    here = tmp_path / "log"
    file = VotesFile(here)
    with pytest.raises(VotesFileError, match=r"No such file or directory\. If the folder is gone, move it back"):
        file.write(b"record")
    here.mkdir()
    file.write(b"record")
