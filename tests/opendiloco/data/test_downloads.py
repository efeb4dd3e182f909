"""Downloads from the hub, whose part here is played: how much comes, and how far it has come."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from opendiloco.config.data import TokenizerSection
from opendiloco.data import hub
from opendiloco.data.hub import downloading
from opendiloco.data.tokenizer import build_tokenizer
from opendiloco.errors import DataError
from opendiloco.stages import watched_by

PATIENCE = 60.0
FILES = [
    SimpleNamespace(rfilename="model-1.safetensors", size=1500),
    SimpleNamespace(rfilename="model-2.safetensors", size=500),
    SimpleNamespace(rfilename="pytorch_model.bin", size=9000),
    SimpleNamespace(rfilename="data/train.parquet", size=4000),
]


class Hub:
    """What the hub says of anything."""

    def repo_info(self, name: str, **options: Any) -> Any:
        return SimpleNamespace(siblings=FILES)


@pytest.fixture(autouse=True)
def _hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("datasets.config.DOWNLOADED_DATASETS_PATH", str(tmp_path / "rows"))
    monkeypatch.setattr(hub, "LOOK_SECONDS", 0.001)


Heard = queue.SimpleQueue[tuple[str, float | None]]


def heard_at(heard: Heard, share: float) -> str:
    """Wait until so much is done, and return of what."""
    while True:
        stage, found = heard.get(timeout=PATIENCE)
        if found == share:
            return stage


def test_weights_say_how_far_they_have_come(tmp_path: Path) -> None:
    heard: Heard = queue.SimpleQueue()
    blobs = tmp_path / "models--people--llama" / "blobs"
    blobs.mkdir(parents=True)
    watched = watched_by(lambda stage, share: heard.put((stage, share)))
    with watched, downloading("people/llama", "model", ["*.safetensors"]):
        stage, share = heard.get(timeout=PATIENCE)
        assert (stage, share) == ("downloading people/llama, as far as it is not here (2 kB)", None)
        (blobs / "1.incomplete").write_bytes(bytes(500))
        assert heard_at(heard, 0.25) == stage
        (blobs / "1.incomplete").write_bytes(bytes(2000))
        assert heard_at(heard, 1.0) == stage


def test_rows_count_from_what_was_there_before(tmp_path: Path) -> None:
    heard: Heard = queue.SimpleQueue()
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "old").write_bytes(bytes(7000))
    watched = watched_by(lambda stage, share: heard.put((stage, share)))
    with watched, downloading("people/text", "dataset", ["*data/train.parquet"]):
        (tmp_path / "rows" / "new.incomplete").write_bytes(bytes(1000))
        assert "(4 kB)" in heard_at(heard, 0.25)


def test_what_the_hub_does_not_say_has_a_stage_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*arguments: Any, **options: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr(Hub, "repo_info", unreachable)
    said = list[tuple[str, float | None]]()
    watched = watched_by(lambda *stage: said.append(stage))
    with watched, downloading("people/llama", "model", ["*.safetensors"]), downloading("text", "dataset", []):
        pass
    assert said == [(f"downloading {name}, as far as it is not here", None) for name in ("people/llama", "text")]


def test_a_tokenizer_from_the_hub_has_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **options: Any) -> Any:
        raise OSError(f"no {name}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    said = list[str]()
    with watched_by(lambda stage, share: said.append(stage)), pytest.raises(DataError, match="no people/words"):
        build_tokenizer(TokenizerSection(kind="pretrained", path="people/words"))
    assert said == ["downloading people/words, as far as it is not here"]
