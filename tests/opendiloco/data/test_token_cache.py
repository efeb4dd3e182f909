from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from opendiloco.data.token_files import Piece, TokenCache, Tokens
from opendiloco.errors import MachineError

KEY = "0123abc"
ROOT = Path(__file__).parents[3]


class Text:
    """Two documents for training and one held out, of `size` tokens each; counts how often it is read."""

    def __init__(self, size: int = 100) -> None:
        self._size = size
        self.times_read = 0

    def __call__(self) -> Iterator[Piece]:
        self.times_read += 1
        for number, held_out in enumerate((False, True, False)):
            yield held_out, np.full(self._size, 1000 * number, np.uint16)


def assert_is_whole(tokens: Tokens) -> None:
    assert tokens.training.tolist() == [0] * 100 + [2000] * 100
    assert tokens.held_out.tolist() == [1000] * 100


def test_few_tokens_stay_in_memory(tmp_path: Path) -> None:
    cache, text = TokenCache(tmp_path / "tokens", few=300), Text()
    for turn in (1, 2):
        assert_is_whole(cache.tokens(KEY, "<u2", text))
        assert text.times_read == turn
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize("few", [0, 99, 250])
def test_many_are_tokenized_once_and_mapped_from_the_disk(tmp_path: Path, few: int) -> None:
    text = Text()
    for _ in range(3):
        tokens = TokenCache(tmp_path / "tokens", few).tokens(KEY, "<u2", text)
        assert_is_whole(tokens)
        assert isinstance(tokens.training, np.memmap)
    assert text.times_read == 1
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == [KEY]
    TokenCache(tmp_path / "tokens", few).tokens("another", "<u2", text)
    assert text.times_read == 2


def test_few_tokens_that_are_costly_to_make_are_made_once_by_all_processes(tmp_path: Path) -> None:
    alone, shared, text = TokenCache(tmp_path / "tokens"), TokenCache(tmp_path / "tokens", is_shared=True), Text()
    assert_is_whole(alone.tokens(KEY, "<u2", text, is_costly=True))
    assert_is_whole(shared.tokens(KEY, "<u2", text))
    assert not (tmp_path / "tokens").exists()
    for _ in range(3):
        assert_is_whole(shared.tokens(KEY, "<u2", text, is_costly=True))
    assert text.times_read == 3


def test_a_part_may_be_empty(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, few=0)
    for _ in range(2):
        tokens = cache.tokens(KEY, "<u4", lambda: iter([(False, np.arange(70_000, 70_010, dtype=np.uint32))]))
        assert tokens.training.tolist() == list(range(70_000, 70_010))
        assert tokens.held_out.size == 0


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("training", b"\0" * 400),
        ("training", b"\0"),
        ("training", None),
        ("held_out", b""),
        ("about.json", b"{"),
        ("about.json", b"{}"),
        ("about.json", b'{"dtype": "<f8", "digests": {}}'),
        ("about.json", b"[1]"),
        ("about.json", b'"\xff"'),
        ("about.json", None),
    ],
)
def test_what_is_damaged_is_tokenized_again(
    tmp_path: Path, file: str, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    cache, text = TokenCache(tmp_path, few=0), Text()
    cache.tokens(KEY, "<u2", text)
    if content is None:
        (tmp_path / KEY / file).unlink()
    else:
        (tmp_path / KEY / file).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert_is_whole(cache.tokens(KEY, "<u2", text))
    assert content is None or "are damaged" in caplog.text
    assert_is_whole(cache.tokens(KEY, "<u2", text))
    assert text.times_read == 2


def test_who_is_killed_while_writing_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    partial = tmp_path / f"{KEY}.partial"
    partial.mkdir()
    (partial / "training").write_bytes(b"half")
    cache, text = TokenCache(tmp_path, few=0), Text()
    assert_is_whole(cache.tokens(KEY, "<u2", text))
    assert not partial.exists()


def test_a_text_that_cannot_be_read_to_its_end_is_not_kept(tmp_path: Path) -> None:
    def breaks_off() -> Iterator[Piece]:
        yield from Text()()
        raise MachineError("unplugged", "")

    with pytest.raises(MachineError, match="unplugged"):
        TokenCache(tmp_path, few=0).tokens(KEY, "<u2", breaks_off)
    assert list(tmp_path.iterdir()) == []
    assert_is_whole(TokenCache(tmp_path, few=0).tokens(KEY, "<u2", Text()))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="for tokens cannot be written") as caught:
        TokenCache(tmp_path / "file" / "tokens", few=0).tokens(KEY, "<u2", Text())
    assert "XDG_CACHE_HOME" in caught.value.remedy


def tokenize(folder: str) -> None:
    assert_is_whole(TokenCache(Path(folder), few=0).tokens(KEY, "<u2", Text()))


def test_processes_that_need_the_same_tokens_wait_for_the_first(tmp_path: Path) -> None:
    """Each reads until it sees that there is much; who comes second then finds it written."""
    script = f"from {__name__} import tokenize; tokenize({str(tmp_path)!r})"
    with (tmp_path / f"{KEY}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        processes = [subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) for _ in range(2)]
    try:
        assert [process.wait(60) for process in processes] == [0, 0]
        assert sorted(path.name for path in tmp_path.iterdir()) == [KEY]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_shards_that_were_not_needed_for_long_are_removed_while_who_reads_them_reads_on(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, few=0)
    shards = [cache.tokens(f"{KEY}-{number}", "<u2", Text()) for number in range(5)]
    cache.tokens("another-1", "<u2", Text())
    cache.drop_all_but(f"{KEY}-", 2)
    left = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert left == [f"{KEY}-3", f"{KEY}-4", "another-1"]
    for tokens in shards:
        assert_is_whole(tokens)
    shutil.rmtree(tmp_path)
    cache.drop_all_but(KEY, 2)


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for cache_home, caches in ((str(tmp_path / "elsewhere"), tmp_path / "elsewhere"), ("", tmp_path / ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", cache_home)
        TokenCache().once(KEY, lambda: None)
        assert [path.name for path in (caches / "diloco-peer" / "tokens").iterdir()] == [f"{KEY}.checked"]


# What is removed -----------------------------------------------------------------------------------------------------
def aged(tmp_path: Path, *keys: str) -> TokenCache:
    """A cache with room for two entries of 600 bytes, and entries of which the first was opened the longest ago."""
    cache = TokenCache(tmp_path, few=0, kept_bytes=1700)
    for age, key in enumerate(reversed(keys), 1):
        TokenCache(tmp_path, few=0).tokens(key, "<u2", Text())
        os.utime(tmp_path / key, (age_before := time.time() - 1000 * age, age_before))
    return cache


def entries(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


def test_entries_that_were_not_opened_for_longest_make_room(tmp_path: Path) -> None:
    cache = aged(tmp_path, "a", "b")
    cache.tokens("a", "<u2", Text())
    cache.tokens("c", "<u2", Text())
    assert entries(tmp_path) == ["a", "c"], "b was opened before a"


def test_what_is_larger_than_the_room_stays_while_it_is_the_newest(tmp_path: Path) -> None:
    cache = aged(tmp_path, "a", "b")
    cache.tokens("large", "<u2", Text(size=5000))
    assert entries(tmp_path) == ["large"]
    assert len(cache.tokens("large", "<u2", Text(size=5000)).training) == 10_000


def test_what_a_killed_writer_left_goes_with_the_next_entry_and_a_living_one_keeps_its_own(tmp_path: Path) -> None:
    for name in ("dead", "living"):
        (tmp_path / f"{name}.partial").mkdir(parents=True)
        (tmp_path / f"{name}.partial" / "training").write_bytes(b"half")
    with (tmp_path / "living.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        TokenCache(tmp_path, few=0).tokens(KEY, "<u2", Text())
    assert entries(tmp_path) == [KEY, "living.lock", "living.partial"]


def test_a_check_that_has_passed_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendiloco.data.token_files.CHECKS_KEPT", 2)
    cache, made = TokenCache(tmp_path), list[str]()

    def fails() -> None:
        raise MachineError("wrong", "")

    with pytest.raises(MachineError):
        cache.once("a", fails)
    for key in ("a", "a", "b", "c", "a"):
        cache.once(key, lambda key=key: made.append(key))  # type: ignore[misc]
    assert made[:3] == ["a", "b", "c"]
    assert len(entries(tmp_path)) == 2
