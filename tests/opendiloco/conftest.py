"""A run so small that a test can afford it: 6 k parameters, a corpus of a few generated files."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opendiloco.config.run_config import RunConfig

WORDS = ["peers", "train", "alone", "then", "average", "what", "they", "learned", "and", "go", "on"]


def write_corpus(folder: Path, files: int = 40) -> Path:
    """Text files with seeded nonsense; with the default fraction, some are held out."""
    folder.mkdir(parents=True)
    source = random.Random(7)
    for number in range(files):
        text = " ".join(source.choice(WORDS) for _ in range(120))
        (folder / f"{number:02}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def small_content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A manifest content to copy and change."""
    corpus = write_corpus(tmp_path_factory.mktemp("data") / "corpus")
    model = {
        "model_type": "llama",
        "vocab_size": 259,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
    }
    return {
        "name": "small",
        "model": {"config": model, "init_seed": 3},
        "data": {"source": str(corpus), "held_out": 0.2},
        "training": {"inner_steps": 4, "batch_size": 2, "sequence_length": 16},
        "inner_optimizer": {"learning_rate": 0.01},
        "schedule": {"warmup_steps": 2, "stable_steps": 20, "decay_steps": 4},
        "outer_optimizer": {
            "learning_rate": 0.7,
            "momentum": 0.6,
            "schedule": {"warmup_steps": 3, "stable_steps": 1, "decay_steps": 20, "final_fraction": 0.1},
        },
    }


@pytest.fixture(scope="session")
def small_config(small_content: dict[str, Any]) -> RunConfig:
    return RunConfig.from_manifest_content(small_content)


@pytest.fixture
def own_dataset_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` writes to a folder of the test's own, and asks nobody."""
    import datasets

    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def _lost_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody hears of exceptions that Python cannot raise."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)


@pytest.fixture
def _handler_of_python() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class InterruptedWhenItDies:
    """Python ignores what its destructor raises."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.fixture
def _process_group_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    import torch.distributed as dist

    yield
    if dist.is_initialized():
        dist.destroy_process_group()
