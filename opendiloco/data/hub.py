"""Folders of pretrained models and tokenizers from the hub: their checks, and how far a download is."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from opendiloco.config.model import read_model_values
from opendiloco.data.own_files import HUB_NAME
from opendiloco.quantities import in_words
from opendiloco.stages import at_stage

CONFIG, TOKENIZER_CONFIG, INDEX = "config.json", "tokenizer_config.json", "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
CONFIG_BYTES, TOKENIZER_BYTES = 1 << 24, 1 << 28
"""Of a config, and of a tokenizer.json, at most."""
MOST_GROWTH = 1000.0
"""Times the length of a text, that a tokenizer's replacements may make of it."""
MODEL_FILES = (CONFIG, "generation_config.json", INDEX, "*.safetensors")
TOKENIZER_FILES = ("*.json", "*.txt", "*.model")


def is_local_path(path: str) -> bool:
    """Return whether a path leads to a place on this machine, and is not the name of something on the hub.

    A name is the hub's whatever lies in the working directory: no folder there can take its place.
    """
    return HUB_NAME.fullmatch(path) is None


def pretrained_folder(path: str, *wanted: str) -> Path:
    """Return the folder of a path or hub name, once it has files as `wanted`. Raises: OSError, ValueError."""
    if is_local_path(path):
        if not Path(path).is_dir():
            raise FileNotFoundError("there is no such folder")
        return Path(path)
    from huggingface_hub import snapshot_download

    weights = [pattern for pattern in wanted if pattern.endswith(".safetensors")]
    with downloading(path, "model", weights):
        return Path(snapshot_download(path, allow_patterns=list(wanted), ignore_patterns=["*/*"], token=False))


def model_values(folder: Path) -> dict[str, Any]:
    """Return what a model's folder has in its config.json. Raises: OSError, ValueError."""
    _refuse_adapter(folder)
    try:
        return read_model_values(_text_of(folder / CONFIG))
    except ValueError as error:
        raise ValueError(f"{CONFIG}: {error}") from error


def _refuse_adapter(folder: Path) -> None:
    if (folder / "adapter_config.json").exists():
        raise ValueError("it is an adapter to another model; merge the two")


def check_weights(folder: Path) -> None:
    """Raises: ValueError for a folder whose weights lie elsewhere, or are another model's with changes."""
    _refuse_adapter(folder)
    if (folder / INDEX).exists():
        files = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        elsewhere = next((file for file in files if Path(file).name != file), None)
        if elsewhere is not None:
            raise ValueError(f"{INDEX} names {elsewhere!r}, which is not a file of its own")


def check_tokenizer(folder: Path) -> None:
    """Raises: OSError; ValueError for a tokenizer that would run code, read other files, or make texts very long."""
    if (folder / CONFIG).exists():
        model_values(folder)
    if (folder / TOKENIZER).exists():
        growth = _growth(json.loads(_text_of(folder / TOKENIZER, TOKENIZER_BYTES)).get("normalizer"))
        if growth > MOST_GROWTH:
            raise ValueError(f"{TOKENIZER}: its normalizer makes a text more than {MOST_GROWTH:g} times as long")
    if not (folder / TOKENIZER_CONFIG).exists():
        return
    for key, value in json.loads(_text_of(folder / TOKENIZER_CONFIG)).items():
        if value and (key == "fast_tokenizer_files" or (key.endswith("_file") and key != "special_tokens_map_file")):
            raise ValueError(f"{TOKENIZER_CONFIG}: {key} names files elsewhere, which are not read; remove it")


def _growth(normalizer: Any) -> float:
    """Return how many times as long a normalizer's replacements, one after another, can make a text."""
    if not isinstance(normalizer, dict):
        return 1.0
    if normalizer.get("type") == "Sequence":
        return math.prod(map(_growth, normalizer["normalizers"]))
    if normalizer.get("type") != "Replace":
        return 1.0
    content, pattern = len(normalizer["content"]), normalizer["pattern"]
    # An expression may match nothing at each place.
    return 1.0 + content if "Regex" in pattern else max(1.0, content / max(1, len(pattern["String"])))


def _text_of(file: Path, most: int = CONFIG_BYTES) -> str:
    if file.stat().st_size > most:
        raise ValueError(f"{file.name} has more than {most} bytes")
    return file.read_text(encoding="utf-8")


# Downloads ------------------------------------------------------------------------------------------------------------
# The libraries that download draw bars of their own, each in its way; so we look at the folder that they write to.

LOOK_SECONDS = 1.0  # between two looks at the folder


@contextmanager
def downloading(name: str, kind: Literal["model", "dataset"], wanted: Sequence[str]) -> Iterator[None]:
    """Say meanwhile how far the files of a model or data set on the hub are here whose names match `wanted`.

    A data set's files lie among all others'. What is here of these already is taken for not needed.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder, before = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "blobs", 0
    if kind == "dataset":
        from datasets import config

        folder = Path(config.DOWNLOADED_DATASETS_PATH)
        before = folder_bytes(folder)
    total = _bytes_of(name, kind, wanted) if wanted else None
    stage = f"downloading {name}, as far as it is not here" + (f" ({in_words(total)})" if total else "")
    at_stage(stage)
    if not total:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(LOOK_SECONDS):
            at_stage(stage, min(max(0, folder_bytes(folder) - before) / total, 1.0))

    watching = threading.Thread(target=watch, name="download-watch", daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


def _bytes_of(name: str, kind: str, wanted: Sequence[str]) -> int | None:
    """Return how many bytes the hub says the files have; None if it does not say, or cannot be reached."""
    from huggingface_hub import HfApi

    try:
        about: Any = HfApi().repo_info(name, repo_type=kind, files_metadata=True, token=False)
    except Exception:  # no network, or no such thing: the download itself says so better
        return None
    matching = [file for file in about.siblings or [] if any(fnmatch(file.rfilename, pattern) for pattern in wanted)]
    return sum(file.size or 0 for file in matching) or None


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the files in a folder, as far as they are still there."""
    size = 0
    for path in folder.glob("*"):
        with suppress(OSError):
            size += path.stat().st_size
    return size
