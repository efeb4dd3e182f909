"""What is told of a worker's start."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from opendiloco import stages
from opendiloco.config.data import SourceSection
from opendiloco.config.run_config import RunConfig
from opendiloco.data.corpus import open_corpus
from opendiloco.data.token_files import TokenCache
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import TokenizedSource
from opendiloco.shared_memory import create_memory_file
from opendiloco.stages import StageLog, at_stage, passing, watched_by
from opendiloco.training.team import Team
from opendiloco.workers.control import AtStage, Configured, DevicesCounted, Reply, WorkerProcess
from opendiloco.workers.options import WorkerOptions
from tests.opendiloco.workers.configuring import configure


def test_stages_are_logged_with_what_is_left_and_not_too_often(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, log = [0.0], StageLog()
    monkeypatch.setattr(stages, "time", SimpleNamespace(monotonic=lambda: now[0]))
    heard = [(0.0, "importing torch", None), (5.0, "tokenizing stdlib", 0.0), (6.0, "tokenizing stdlib", 0.01)]
    heard += [(15.0, "tokenizing stdlib", 0.2), (16.0, "tokenizing stdlib", 0.9), (20.0, "downloading c4", None)]
    heard += [(31.0, "downloading c4", None)]
    with caplog.at_level(logging.INFO):
        for now[0], stage, share in heard:
            log(stage, share)
    assert caplog.messages == [
        "importing torch",
        "tokenizing stdlib",
        "tokenizing stdlib: 20% after 10 s, about 40 s left",
        "downloading c4",
        "downloading c4: for 11 s",
    ]


def test_whoever_watches_hears_of_all_threads_until_it_watches_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = list[tuple[str, float | None]]()
    monkeypatch.setattr(stages, "LOOK_SECONDS", -1.0)
    with watched_by(lambda stage, share: heard.append((stage, share))):
        thread = threading.Thread(target=at_stage, args=("reading", 0.5))
        thread.start()
        thread.join()
        assert list(passing("ab", "spelling", 2)) == ["a", "b"]
        assert list(passing("ab", "streaming")) == ["a", "b"]
    at_stage("nobody hears this")
    spelled = [("spelling", share) for share in (0.0, 0.5, 1.0)]
    assert heard == [("reading", 0.5), *spelled, ("streaming", None)]


def test_a_model_and_a_corpus_tell_how_far_they_have_come(
    small_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from opendiloco.workers.assembly import assemble_model

    monkeypatch.setattr(stages, "LOOK_SECONDS", -1.0)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("text")
    heard, theta = list[tuple[str, float | None]](), create_memory_file()
    try:
        with watched_by(lambda stage, share: heard.append((stage, share))):
            assemble_model(small_config, ByteTokenizer(), Team(torch.device("cpu")), WorkerOptions(), theta)
    finally:
        os.close(theta)
    shares = [share for stage, share in heard if stage == "drawing the initial weights"]
    assert heard[0] == ("building the model", None)
    assert shares == sorted(share for share in shares if share is not None)
    assert 0.9 < (shares[-1] or 0) <= 1.0
    heard.clear()
    with watched_by(lambda stage, share: heard.append((stage, share))):
        section = SourceSection(source=str(tmp_path), shards=2, windows_per_shard=1)
        assert len(list(open_corpus(section).documents(1))) == 2
    assert heard == [(f"tokenizing {tmp_path}, shard 1 of 2", share) for share in (0.0, 0.5, 1.0)]


@pytest.mark.usefixtures("own_dataset_cache")
def test_a_shard_of_a_stream_tells_how_many_of_its_tokens_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many documents it has, nobody knows; how many tokens are wanted of it, the run says."""
    monkeypatch.setattr(stages, "LOOK_SECONDS", -1.0)
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text('{"text": "abcdefghi"}\n' * 9, encoding="utf-8")
    section = SourceSection(source=str(tmp_path), shards=2, windows_per_shard=2)
    source = TokenizedSource(section, 0.0, ByteTokenizer(), TokenCache(tmp_path / "cache"))
    heard = list[tuple[str, float | None]]()
    with watched_by(lambda stage, share: heard.append((stage, share))):
        source.shard(1, 40)
    said = [(stage, share) for stage, share in heard if stage.startswith("tokenizing")]
    shares = (None, 0.25, 0.5, 0.75, 1.0)
    assert said == [(f"tokenizing {tmp_path}, shard 1 of 2", share) for share in shares]


@pytest.mark.thorough
def test_a_real_worker_tells_of_its_start(small_config: RunConfig) -> None:
    """Beside its replies, whichever of them is waited for."""

    async def story() -> list[str]:
        heard = list[str]()
        memory = create_memory_file()
        worker = await WorkerProcess.start((memory,), 1, lambda stage, share: heard.append(stage))
        try:
            command = configure(small_config, memory, threads=1)
            await worker.exchange(command, Configured, lambda progress: None)
        finally:
            await worker.close()
        return list(dict.fromkeys(heard))

    heard = asyncio.run(asyncio.wait_for(story(), 90))
    source = small_config.data.source
    assert heard == [
        "importing torch",
        f"tokenizing {source}",
        "importing transformers",
        "building the model",
        "drawing the initial weights",
        "trying how many windows fit",
    ]


def test_a_stage_survives_its_line() -> None:
    for message in (AtStage(stage="a\nb", share=0.5), AtStage(stage="c", share=None), DevicesCounted(gpus=1)):
        assert Reply.parse(message.line()) == message
