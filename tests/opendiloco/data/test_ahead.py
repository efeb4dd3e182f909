"""The process that tokenizes the next shard: what it makes is what training finds, and it ends with its worker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.data.ahead import AheadTokenizer, _prepare_shard
from opendiloco.data.token_files import TokenCache, most_tokens_in_memory
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import TokenizedSource, load_data
from tests.child_processes import child_processes
from tests.opendiloco.config.test_data import sharded

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(small_content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Seven shards; where tokens lie is the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("opendiloco.data.ahead.FEW_TOKENS", 0)
    source, _ = sharded(tmp_path)
    return RunConfig.from_manifest_content(small_content | {"data": {"sources": [source], "held_out": 0.2}})


def kept(tmp_path: Path) -> set[str]:
    return {path.name.rpartition("-")[2] for path in (tmp_path / "cache" / "diloco-peer" / "tokens").glob("*-*")}


def test_training_finds_what_was_tokenized_ahead(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for while the first shard is read, made by another process, and read without being made again."""
    before, ahead = child_processes(), AheadTokenizer(config)
    data = load_data(config, ByteTokenizer(), TokenCache(), ahead.tokenize)
    first = data.samples.read(np.arange(3))
    assert ahead._process is not None
    ahead._process.wait()
    [number] = kept(tmp_path)
    made: list[int | None] = []
    pieces = TokenizedSource.pieces

    def noted(self: TokenizedSource, shard: int | None = None, only_held_out: bool = False) -> Any:
        made.append(shard)
        return pieces(self, shard, only_held_out)

    monkeypatch.setattr(TokenizedSource, "pieces", noted)
    second = data.samples.read(np.arange(20, 23))
    assert made == []
    ahead.close()
    alone = load_data(config, ByteTokenizer(), TokenCache(tmp_path / "unused"))
    assert np.array_equal(np.concatenate([first, second]), alone.samples.read(np.array([0, 1, 2, 20, 21, 22])))
    assert int(number) in made
    assert child_processes() == before


def test_one_shard_at_a_time_and_none_twice(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Process:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            started.append(self)
            self.stdin = open("/dev/null", "wb")  # noqa: SIM115
            self.returned: int | None = None

        def poll(self) -> int | None:
            return self.returned

        def kill(self) -> None:
            self.stdin.close()

        def wait(self) -> None:
            pass

    monkeypatch.setattr(subprocess, "Popen", Process)
    ahead = AheadTokenizer(config)
    for shard in (3, 3, 4):
        ahead.tokenize(0, shard)
    assert len(started) == 1, "the others wait until it is done"
    started[0].returned = 0
    for shard in (3, 4, 4):
        ahead.tokenize(0, shard)
    assert len(started) == 2
    ahead.close()
    started[0].kill()


def test_shards_that_stay_in_memory_are_not_worth_a_process(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendiloco.data.ahead.FEW_TOKENS", 20 * 16)
    monkeypatch.setattr(subprocess, "Popen", None)
    AheadTokenizer(config).tokenize(0, 3)


def test_it_ends_with_the_worker_that_started_it() -> None:
    """Whose death closes its standard input."""
    waits = "a._prepare_shard = lambda *_: a.threading.Event().wait()"
    command = [sys.executable, "-P", "-c", f"import opendiloco.data.ahead as a; {waits}; a.main()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    try:
        assert process.stdin is not None
        tiny = RunConfig.from_toml(ROOT / "examples" / "tiny.toml")
        process.stdin.write(json.dumps([tiny.to_manifest_content(), 0, 1]).encode() + b"\n")
        process.stdin.close()
        assert process.wait(60) == 1
    finally:
        process.kill()
        process.wait()


def test_a_shard_that_is_there_is_not_made_again(config: RunConfig, tmp_path: Path) -> None:
    for _ in range(2):
        _prepare_shard(config, 0, 5)
    assert kept(tmp_path) == {"5"}


def test_workers_that_are_several_make_tokens_once(config: RunConfig) -> None:
    section = config.tokenizer.model_copy(update={"kind": "file", "path": "tokenizer.json"})
    assert most_tokens_in_memory(section, 1) > most_tokens_in_memory(section, 8)
    assert most_tokens_in_memory(config.tokenizer, 8) == most_tokens_in_memory(section, 1), "bytes cost nothing"
