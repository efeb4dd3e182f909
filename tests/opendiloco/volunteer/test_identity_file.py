"""The identity file: made on first use, held by one process at a time."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from opendiloco.volunteer import identity
from opendiloco.volunteer.identity import default_path, hold_identity, load_identity
from peers.errors import FullDiskError, InUseError, LocalNetworkError


def test_the_same_peer_at_every_start(tmp_path: Path) -> None:
    with hold_identity(tmp_path / "key.pem") as first:
        pass
    with hold_identity(tmp_path / "key.pem") as second:
        assert second.peer_id == first.peer_id
    assert [path.name for path in tmp_path.iterdir()] == ["key.pem"]


def test_only_one_at_a_time(tmp_path: Path) -> None:
    with hold_identity(tmp_path / "key.pem"):
        with (
            pytest.raises(LocalNetworkError, match=r"in use by another process .*--identity other.pem"),
            hold_identity(tmp_path / "key.pem"),
        ):
            pass
        with hold_identity(tmp_path / "other.pem"):
            pass
        load_identity(tmp_path / "key.pem")  # signing is no matter of being there


def test_the_other_command_that_uses_the_key_is_named(tmp_path: Path) -> None:
    path, program = tmp_path / "key.pem", tmp_path / "diloco-peer"
    load_identity(path)
    program.write_text("import fcntl, sys; fcntl.flock(key := open(sys.argv[2]), fcntl.LOCK_EX); print(); input()")
    command = [sys.executable, str(program), "follow", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()  # waits until it holds the key
        named = rf"in use by `diloco-peer follow` \(process {other.pid}\).* Wait until that ends, or end it.* ticket"
        with pytest.raises(InUseError, match=named), hold_identity(path):
            pass
        with pytest.raises(InUseError, match=r"makes this another node\.$"), hold_identity(path, is_node=True):
            pass
        other.communicate(b"\n")


def test_the_default_is_in_the_users_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "config" / "diloco-peer" / "identity.pem"
    assert default_path() == path
    with hold_identity(None):
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_full_disk_has_its_own_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: 2 for the folder, but 6 for the file."""

    def fail(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(identity, "make_private_folder", fail)
    with pytest.raises(FullDiskError, match=r"cannot make the folder .*: No space .* Free some space there") as refused:
        load_identity(None)
    assert refused.value.exit_code == 6


def test_a_configuration_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(LocalNetworkError, match="Name another file with --identity"), hold_identity(None):
        pass


def test_a_key_that_others_can_read_is_a_warning_with_its_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key.pem"
    load_identity(path)
    assert not caplog.records
    path.chmod(0o644)
    with hold_identity(path):
        pass
    [warning] = caplog.records
    assert f"run `chmod 600 {path}`" in warning.getMessage()
