"""The process that writes: whenever it is killed, and whatever the disk says, the checkpoints from before are there."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from opendiloco.storage.files import file_name
from opendiloco.storage.loading import Checkpoints, load_checkpoint
from opendiloco.storage.writer import NOT_SAVED, NOT_SENT, SAVED, CheckpointJob, _write_checkpoint, folder_bytes, main
from peers.transfer.snapshots import FrozenSnapshot
from tests.opendiloco.storage.frozen_states import RUN, frozen, job

PLAIN = "import sys; import opendiloco.storage.writer as writer; sys.exit(writer.main())"
# Kills itself instead of calling a function for the n-th time, in small pieces so that there are many times.
KILLED = """
import os, signal, sys
import fsspec.implementations.local, opendiloco.storage.writer as writer, opendiloco.storage.remote as remote
holder, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
writer.PIECE = remote.PIECE = 1 << 16
holder = eval(holder)
original = getattr(holder, name)
def deadly(*arguments, **more):
    global count
    count -= 1
    if count == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **more)
setattr(holder, name, deadly)
sys.exit(writer.main())
"""
LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));" + PLAIN
OPENER = "fsspec.implementations.local.LocalFileOpener"


def run(program: str, folder: Path, index: int, *arguments: str, **more: Any) -> tuple[int, str]:
    """Have a process write the checkpoint after `index` outer steps. Returns its exit status and stderr."""
    state = frozen(index)
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        input=packed(job(folder, state, **more)),
        pass_fds=[state.memory.descriptor],
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


def packed(job: CheckpointJob) -> str:
    return json.dumps(["CheckpointJob", asdict(job)], default=str)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a good checkpoint after 5 outer steps."""
    path = tmp_path / RUN / "A" / "checkpoints"
    code, said = run(PLAIN, path, 5)
    assert code == SAVED, said
    return path


def newest(folder: Path) -> int:
    found = Checkpoints(folder, RUN).load_newest()
    assert found is not None
    return found.index


def test_it_says_in_one_line_what_it_wrote(tmp_path: Path) -> None:
    folder = tmp_path / RUN / "A" / "checkpoints"
    code, said = run(PLAIN, folder, 5)
    assert (code, said.count("\n")) == (SAVED, 1)
    assert said.startswith(f"{folder / file_name(5)} (2.4 MB in ")
    assert load_checkpoint(folder / file_name(5), RUN).data == frozen(5).memory.data


def test_it_starts_without_what_is_slow_to_import() -> None:
    code = "import sys, opendiloco.storage.writer; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "pydantic", "asyncio", "fsspec", "hivemind"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("function", "call", "left"),
    [
        ("sendfile", 1, {5}),
        ("sendfile", 20, {5}),
        ("fsync", 1, {5}),
        ("replace", 1, {5}),
        ("fsync", 2, {5, 6}),
    ],
)
def test_killed_at_any_moment(function: str, call: int, left: set[int], folder: Path) -> None:
    code, _ = run(KILLED, folder, 6, "os", function, str(call))
    assert code == -signal.SIGKILL
    assert set(Checkpoints(folder, RUN).indices()) == left
    assert newest(folder) == max(left)
    code, said = run(PLAIN, folder, 7)
    assert code == SAVED, said
    assert newest(folder) == 7
    assert not [name for name in names(folder) if name.endswith(".partial")]


def test_old_ones_go_once_the_new_one_is_there(folder: Path) -> None:
    for index in (6, 7, 8):
        assert run(PLAIN, folder, index, keep_newest=1, keep_every=6)[0] == SAVED
    assert names(folder) == {file_name(6), file_name(8)}


def test_a_disk_that_refuses_leaves_what_was_there(folder: Path) -> None:
    code, said = run(LIMITED, folder, 6, keep_newest=1)
    assert (code, said.count("\n")) == (NOT_SAVED, 1)
    assert f"{folder / file_name(6)} cannot be written: File too large" in said
    assert names(folder) == {file_name(5)}


def failing(number: int) -> Callable[..., int]:
    """os.sendfile of a disk that is full after the first piece."""
    original, calls = os.sendfile, iter(range(10**6))

    def sendfile(*arguments: Any) -> int:
        if next(calls):
            raise OSError(number, os.strerror(number))
        return original(*arguments)

    return sendfile


def write(folder: Path, state: FrozenSnapshot, rate: float | None = None) -> None:
    _write_checkpoint(folder / file_name(6), state.memory.descriptor, state.memory.data.nbytes, {}, rate)


def test_a_disk_that_fills_up_while_it_is_written_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendiloco.storage.writer.PIECE", 1 << 16)
    monkeypatch.setattr(os, "sendfile", failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        write(folder, frozen(6))
    assert names(folder) == {file_name(5)}


def test_a_full_disk_is_not_written_to_at_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free=1_000_000))
    monkeypatch.setattr(os, "nice", lambda increment: None)
    state = frozen(6)
    monkeypatch.setattr(sys, "stdin", io.StringIO(packed(job(folder, state))))
    assert main() == NOT_SAVED
    said = capsys.readouterr().err
    assert f"{folder} has no room: a checkpoint needs 2 MB, 1 MB are free." in said
    assert "--keep" in said
    assert "--state" in said
    assert names(folder) == {file_name(5)}


def test_an_owner_gives_no_more_room_than_the_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "nice", lambda increment: None)
    state, used = frozen(6), folder_bytes(folder.parent)
    for room, status, there in ((1_000_000, NOT_SAVED, {5}), (3_000_000, SAVED, {5, 6})):
        monkeypatch.setattr(sys, "stdin", io.StringIO(packed(job(folder, state, disk_limit=used + room))))
        assert main() == status
        assert names(folder) == {file_name(index) for index in there}
    said = capsys.readouterr().err
    assert "--max-disk" in said
    assert "--keep" in said


def test_a_file_that_another_writer_has_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = folder / (file_name(6) + ".partial")
    partial.write_bytes(b"being written")
    with partial.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            write(folder, frozen(6))
        assert partial.read_bytes() == b"being written"


def test_it_waits_as_its_rate_demands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("opendiloco.storage.remote.RateLimit.__init__.__defaults__", (waits.append,))
    monkeypatch.setattr("opendiloco.storage.remote.time.monotonic", lambda: 0.0)  # the disk itself takes no time
    write(folder, frozen(6), rate=1e6)
    assert waits[-1] == pytest.approx(2.4)
    assert len(waits) == 24


# To a remote folder -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_it_is_sent_on(scheme: str, folder: Path, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    (folder.parent / "run.manifest").write_bytes(b"signed")
    for index in (6, 7, 8):
        code, said = run(PLAIN, folder, index, remote=f"{scheme}{remote}")
        assert code == SAVED, said
    assert names(remote / RUN) == {file_name(7), file_name(8), "run.manifest"}
    assert (remote / RUN / file_name(8)).read_bytes() == (folder / file_name(8)).read_bytes()


@pytest.mark.parametrize(
    ("holder", "name", "call", "there"),
    [
        (OPENER, "write", 1, []),
        (OPENER, "write", 20, []),
        ("remote.shutil", "move", 1, []),
        ("writer.Remote", "prune", 1, [6]),
    ],
)
def test_killed_while_it_sends(holder: str, name: str, call: int, there: list[int], folder: Path) -> None:
    holder = holder.replace("remote.shutil", "fsspec.implementations.local.shutil")
    remote = folder / "remote"
    code, _ = run(KILLED, folder, 6, holder, name, str(call), remote=str(remote))
    assert code == -signal.SIGKILL
    assert newest(folder) == 6
    assert Checkpoints(remote / RUN, RUN).indices() == there
    (remote / RUN / (file_name(6) + ".B.partial")).touch()  # another peer is sending, too
    assert run(PLAIN, folder, 7, remote=str(remote))[0] == SAVED
    left = {file_name(7), file_name(6) + ".B.partial"}
    assert names(remote / RUN) == left | {file_name(index) for index in there}


def test_a_remote_that_is_out_of_reach_costs_nothing_on_the_disk(folder: Path) -> None:
    (folder / "file").touch()
    code, said = run(PLAIN, folder, 6, remote=f"file://{folder}/file/inner")
    assert code == NOT_SENT
    assert f"is not at the remote: file://{folder}/file/inner" in said
    assert newest(folder) == 6
