"""Downloads from the hub, whose part here is played: how much comes, and how far it has come."""

from __future__ import annotations

import inspect
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import huggingface_hub
import pytest

from opendiloco.config.data import TokenizerSection
from opendiloco.data import hub
from opendiloco.data.hub import downloading, pretrained_folder
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
    monkeypatch.setattr(hub, "LOOK_SECONDS", 0.001)


Heard = queue.SimpleQueue[tuple[str, float | None]]


def heard_at(heard: Heard, share: float) -> str:
    """Wait until so much is done, and return of what."""
    while True:
        stage, found = heard.get(timeout=PATIENCE)
        if found == share:
            return stage


@pytest.mark.parametrize(
    ("kind", "files", "total"), [("model", "*.safetensors", 2000), ("dataset", "*data/train.parquet", 4000)]
)
def test_a_download_shows_its_progress(
    kind: Literal["model", "dataset"], files: str, total: int, tmp_path: Path
) -> None:
    heard: Heard = queue.SimpleQueue()
    blobs = tmp_path / f"{kind}s--people--llama" / "blobs"
    blobs.mkdir(parents=True)
    watched = watched_by(lambda stage, share: heard.put((stage, share)))
    with watched, downloading("people/llama", kind, [files]):
        stage, share = heard.get(timeout=PATIENCE)
        assert (stage, share) == (f"downloading people/llama, as far as it is not here ({total // 1000} kB)", None)
        (blobs / "1.incomplete").write_bytes(bytes(total // 4))
        assert heard_at(heard, 0.25) == stage
        (blobs / "1.incomplete").write_bytes(bytes(total))
        assert heard_at(heard, 1.0) == stage


def test_datasets_downloads_into_the_cache_of_the_hubs_library() -> None:
    """Regression: the progress of data sets was looked for in a folder of `datasets` that it no longer uses."""
    from datasets.utils import file_utils

    assert "hf_hub_download" in inspect.getsource(file_utils.cached_path)


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


def test_a_files_name_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a misspelt file ended with an error of the hub, such as "Name or service not known"."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no such file or folder"):
        pretrained_folder("mymodel.json")
    Path("mymodel.json").touch()
    with pytest.raises(NotADirectoryError, match="it is a file, not a folder"):
        pretrained_folder("mymodel.json")
