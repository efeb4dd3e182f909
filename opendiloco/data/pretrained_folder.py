"""The folder of a pretrained model or tokenizer: where it lies, and what its files may not say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from opendiloco.config.model import LARGEST, read_model_values
from opendiloco.data.downloads import downloading_model
from opendiloco.data.local_sources import HUB_NAME

CONFIG, TOKENIZER_CONFIG, INDEX = "config.json", "tokenizer_config.json", "model.safetensors.index.json"
TOKENIZER, LARGEST_TOKENIZER = "tokenizer.json", 1 << 28
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
    """Return the local folder of a path, or for a name that in the hub's cache, once it has the files that match
    `wanted`. Raises: OSError, ValueError."""
    if is_local_path(path):
        folder = Path(path)
        if not folder.is_dir():
            raise FileNotFoundError("there is no such folder")
    else:
        from huggingface_hub import snapshot_download

        weights = [pattern for pattern in wanted if pattern.endswith(".safetensors")]
        with downloading_model(path, *weights):
            folder = Path(snapshot_download(path, allow_patterns=list(wanted), ignore_patterns=["*/*"], token=False))
    return folder


def model_values(folder: Path) -> dict[str, Any]:
    """Return what a model's folder has in its config.json. Raises: OSError, ValueError."""
    try:
        return read_model_values(_text_of(folder / CONFIG))
    except ValueError as error:
        raise ValueError(f"{CONFIG}: {error}") from error


def check_weights(folder: Path) -> None:
    """Raises: ValueError for a folder whose weights lie elsewhere, or are another model's with changes."""
    if (folder / "adapter_config.json").exists():
        raise ValueError("it is an adapter to another model; merge the two")
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
        growth = _growth(json.loads(_text_of(folder / TOKENIZER, LARGEST_TOKENIZER)).get("normalizer"))
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


def _text_of(file: Path, most: int = LARGEST) -> str:
    if file.stat().st_size > most:
        raise ValueError(f"{file.name} has more than {most} bytes")
    return file.read_text(encoding="utf-8")
