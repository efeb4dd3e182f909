"""Folders at URLs: what arrives there arrives whole, and what is wrong with them is said in one way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.registry import known_implementations

from opendiloco.errors import RemoteError
from opendiloco.storage.files import file_name
from opendiloco.storage.remote import RateLimit, Remote, check_url, push_folder, without_secrets

URL = "memory://bucket/run"


@pytest.fixture
def bucket() -> MemoryFileSystem:
    files = fsspec.filesystem("memory")
    files.store.clear()
    return files


def test_files_arrive_whole_and_old_ones_go(bucket: MemoryFileSystem, tmp_path: Path) -> None:
    remote = Remote(URL)
    for index in range(1, 6):
        path = tmp_path / file_name(index)
        path.write_bytes(bytes([index]) * 3_000_000)
        remote.send_whole(path, path.name, "A")
        remote.prune(2, 2, index)
    assert set(remote.names()) == {file_name(index) for index in (2, 4, 5)}
    assert bucket.cat(f"/bucket/run/{file_name(5)}") == b"\5" * 3_000_000


def test_one_that_was_just_sent_stays(bucket: MemoryFileSystem) -> None:
    for index in (3, 5, 20, 25):
        bucket.pipe(f"/bucket/run/{file_name(index)}", b"")
    remote = Remote(URL)
    remote.prune(2, 0, 5)
    assert set(remote.names()) == {file_name(index) for index in (5, 20, 25)}


def test_what_breaks_off_leaves_nothing(
    bucket: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"new" * 1_000_000)
    bucket.pipe("/bucket/run/file", b"old")

    written: list[bytes] = []

    def write(self: MemoryFile, data: bytes) -> int:
        written.append(data)
        if len(written) == 2:
            raise TimeoutError("the line is dead")
        return len(data)

    monkeypatch.setattr(MemoryFile, "write", write)
    with pytest.raises(RemoteError, match=rf"{URL} cannot be used: the line is dead\. Check"):
        Remote(URL).send_whole(tmp_path / "file", "file", "A")
    assert bucket.find("/bucket") == ["/bucket/run/file"]
    assert bucket.cat("/bucket/run/file") == b"old"


def test_only_what_this_peer_left_is_swept(bucket: MemoryFileSystem, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"new")
    for name in ("1.A.partial", "2.B.partial"):
        bucket.pipe(f"/bucket/run/{name}", b"")
    remote = Remote("memory://bucket/run")
    remote.send_whole(tmp_path / "file", "file", "A")
    assert set(remote.names()) == {"2.B.partial", "file"}


def test_a_model_is_pushed_with_its_readme_last(
    bucket: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"README.md": 5, "config.json": 10, "model.safetensors": 1000, "inner/notes": 20}
    (tmp_path / "inner").mkdir()
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    sent: list[str] = []
    original = Remote.send

    def send(self: Remote, path: Path, name: str) -> None:
        sent.append(name)
        original(self, path, name)

    monkeypatch.setattr(Remote, "send", send)
    push_folder(tmp_path, URL)
    assert sent == ["config.json", "inner/notes", "model.safetensors", "README.md"]
    assert {path: bucket.size(path) for path in bucket.find("/bucket/run")} == {
        f"/bucket/run/{name}": size for name, size in sizes.items()
    }


def test_pushing_into_folders_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "model" / "inner").mkdir(parents=True)
    (tmp_path / "model" / "inner" / "notes").write_text("notes")
    push_folder(tmp_path / "model", str(tmp_path / "there"))
    assert (tmp_path / "there" / "inner" / "notes").read_text() == "notes"


def test_urls_that_nothing_is_there_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for url in (URL, "file:///tmp", str(tmp_path), "relative/folder"):
        check_url(url)
    for use in (check_url, Remote):
        with pytest.raises(RemoteError, match="Protocol not known: nonsense") as caught:
            use("nonsense://there")
        assert caught.value.exit_code == 10
    monkeypatch.setitem(known_implementations, "odd", {"class": "oddfs.OddFS", "err": "Install oddfs"})
    with pytest.raises(RemoteError, match="Install oddfs"):
        check_url("odd://there")


@pytest.mark.parametrize("use", [check_url, Remote])
def test_the_hub_needs_a_token_before_the_work(
    use: Callable[[str], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Regression: `export --push-to hf://…` exported for minutes, and only then failed without a login."""
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(RemoteError, match=r"hf://me/model cannot be written to: .* has no token") as caught:
        use("hf://me/model")
    assert "`hf auth login`, or set HF_TOKEN" in caught.value.remedy
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    use("hf://me/model")


def test_passwords_are_not_shown() -> None:
    assert without_secrets("sftp://me:se/cret@host:22/folder") == "sftp://me:se/cret@host:22/folder"
    assert without_secrets("sftp://me:secret@host:22/folder") == "sftp://me@host:22/folder"
    assert without_secrets("s3://bucket/folder@home") == "s3://bucket/folder@home"


def test_a_pace_is_kept_by_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = 100.0, list[float]()
    monkeypatch.setattr("opendiloco.storage.remote.time.monotonic", lambda: now)
    limit = RateLimit(1000.0, waits.append)
    assert (limit.piece(1 << 20), limit.piece(10), RateLimit(None).piece(10), RateLimit(0.5).piece(10)) == (
        100,
        10,
        10,
        1,
    )
    limit.passed(100)
    now += 1.0
    limit.passed(200)
    limit.passed(1500)
    assert waits == pytest.approx([0.1, 0.0, 0.5])
