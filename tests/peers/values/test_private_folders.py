"""What we make on a disk is for its owner alone, and what a killed process leaves is removed by the next."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from stat import S_IMODE

import pytest

from peers.values.system import make_private_folder, open_private, shared_folder, sweep_folders, temporary_folder

DIES = """
import os, signal, sys
from pathlib import Path
from peers.values.system import temporary_folder
with temporary_folder(Path(sys.argv[1]), "ours-") as folder:
    (folder / "key").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def open_umask() -> Iterator[None]:
    """A umask that takes nothing away from anybody."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("open_umask")
def test_parents_are_private_too_and_what_was_there_stays_as_it_is(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir(mode=0o755)
    for _ in range(2):
        make_private_folder(there / "a" / "b" / "c")
    assert [mode(there / path) for path in ("", "a", "a/b", "a/b/c")] == [0o755, 0o700, 0o700, 0o700]


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_private_folder(tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        make_private_folder(tmp_path / "file" / "folder" / "folder")


@pytest.mark.usefixtures("open_umask")
def test_secrets_are_for_their_owner(tmp_path: Path) -> None:
    with open(tmp_path / "secret", "w", opener=open_private):
        pass
    assert mode(tmp_path / "secret") == 0o600


@pytest.mark.usefixtures("open_umask")
def test_only_what_the_dead_have_left_is_swept(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=False).returncode < 0
    [dead] = tmp_path.iterdir()
    (tmp_path / "others-folder").mkdir()
    (tmp_path / "ours-link").symlink_to(tmp_path / "others-folder")
    with temporary_folder(tmp_path, "ours-") as living:
        assert mode(living) == 0o700
        sweep_folders(tmp_path, "ours-")
        assert living.exists()
        assert not dead.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"others-folder", "ours-link"}


@pytest.mark.usefixtures("open_umask")
def test_a_shared_folder_stays_until_the_last_one_leaves(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=False).returncode < 0
    folder = tmp_path / "shared"
    with shared_folder(folder):
        (folder / "text").touch()
        with shared_folder(folder):
            assert mode(folder) == 0o700
        assert (folder / "text").exists()
    assert not list(tmp_path.iterdir()), "nor that of the killed process"
