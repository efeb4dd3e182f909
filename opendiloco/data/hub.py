"""The download of pretrained models and tokenizers from the Hugging Face hub, and safety checks of their folders."""

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
from opendiloco.data.own_files import FILE_NAME, HUB_NAME
from opendiloco.quantities import in_words
from opendiloco.stages import at_stage

CONFIG, TOKENIZER_CONFIG, INDEX = "config.json", "tokenizer_config.json", "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
CONFIG_BYTES, TOKENIZER_BYTES = 1 << 24, 1 << 28
"""Most bytes of a config file and of a tokenizer.json."""
MOST_GROWTH = 1000.0
"""Largest factor by which a tokenizer's replacements may lengthen a text."""
MODEL_FILES = (CONFIG, "generation_config.json", INDEX, "*.safetensors")
TOKENIZER_FILES = ("*.json", "*.txt", "*.model")


def is_local_path(path: str) -> bool:
    """Return False if `path` is a valid hub name, even if the working directory has a folder with this name. Return
    True for any other path, and for a file's name such as "model.json"."""
    return HUB_NAME.fullmatch(path) is None or FILE_NAME.fullmatch(path) is not None


def pretrained_folder(path: str, *wanted: str) -> Path:
    """Return the local folder `path` or, if `path` is a hub name, the folder into which this function downloads its
    files that match the patterns `wanted`. Raises: OSError, ValueError."""
    if is_local_path(path):
        if Path(path).is_file():
            raise NotADirectoryError("it is a file, not a folder")
        if not Path(path).is_dir():
            raise FileNotFoundError("there is no such file or folder")
        return Path(path)
    from huggingface_hub import snapshot_download

    weights = [pattern for pattern in wanted if pattern.endswith(".safetensors")]
    with downloading(path, "model", weights):
        return Path(snapshot_download(path, allow_patterns=list(wanted), ignore_patterns=["*/*"], token=False))


def model_values(folder: Path) -> dict[str, Any]:
    """Return the values in the config.json of a model's folder. Raises: OSError; ValueError if the file is invalid, or
    the folder holds an adapter."""
    _refuse_adapter(folder)
    try:
        return read_model_values(_text_of(folder / CONFIG))
    except ValueError as error:
        raise ValueError(f"{CONFIG}: {error}") from error


def _refuse_adapter(folder: Path) -> None:
    if (folder / "adapter_config.json").exists():
        raise ValueError("the folder has an adapter to another model: merge the adapter into the model")


def check_weights(folder: Path) -> None:
    """Raise ValueError if a model folder's index names weight files outside of the folder, or if the folder holds an
    adapter to another model."""
    _refuse_adapter(folder)
    if (folder / INDEX).exists():
        files = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        elsewhere = next((file for file in files if Path(file).name != file), None)
        if elsewhere is not None:
            raise ValueError(f"{INDEX} names {elsewhere!r}, which is not a file in the same folder")


def check_tokenizer(folder: Path) -> None:
    """Raise ValueError if a folder's tokenizer would run code, read other files, or lengthen a text more than
    `MOST_GROWTH` times. Raises also: OSError if a file of the folder cannot be read."""
    if (folder / CONFIG).exists():
        model_values(folder)
    if (folder / TOKENIZER).exists():
        growth = _growth(json.loads(_text_of(folder / TOKENIZER, TOKENIZER_BYTES)).get("normalizer"))
        if growth > MOST_GROWTH:
            raise ValueError(f"{TOKENIZER}: its normalizer can lengthen a text more than {MOST_GROWTH:g} times")
    if not (folder / TOKENIZER_CONFIG).exists():
        return
    for key, value in json.loads(_text_of(folder / TOKENIZER_CONFIG)).items():
        if value and (key == "fast_tokenizer_files" or (key.endswith("_file") and key != "special_tokens_map_file")):
            raise ValueError(f"{TOKENIZER_CONFIG}: {key} names other files, which are never read; remove {key}")


def _growth(normalizer: Any) -> float:
    """Return the largest factor by which a tokenizer's normalizer can lengthen a text. The factors of successive
    replacements are multiplied."""
    if not isinstance(normalizer, dict):
        return 1.0
    if normalizer.get("type") == "Sequence":
        return math.prod(map(_growth, normalizer["normalizers"]))
    if normalizer.get("type") != "Replace":
        return 1.0
    content, pattern = len(normalizer["content"]), normalizer["pattern"]
    # A regular expression may match the empty string before each character, so that the replacement is inserted before
    # each.
    return 1.0 + content if "Regex" in pattern else max(1.0, content / max(1, len(pattern["String"])))


def _text_of(file: Path, most: int = CONFIG_BYTES) -> str:
    if file.stat().st_size > most:
        raise ValueError(f"{file.name} has more than {most:,} bytes, the limit for it")
    return file.read_text(encoding="utf-8")


# Progress of downloads ------------------------------------------------------------------------------------------------
# Libraries draw their own progress bars, so progress is measured by the size of the folder that a library writes to.

LOOK_SECONDS = 1.0  # seconds between two measurements of the download folder


@contextmanager
def downloading(name: str, kind: Literal["model", "dataset"], wanted: Sequence[str]) -> Iterator[None]:
    """Report to the progress display, during the `with` block, the share of a hub model's or data set's bytes that has
    been downloaded. Only files whose names match `wanted` count."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    # `datasets` downloads through huggingface_hub, so the files of both kinds are in its cache.
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind) / "blobs"
    total = _bytes_of(name, kind, wanted) if wanted else None
    stage = f"downloading {name}, as far as it is not here" + (f" ({in_words(total)})" if total else "")
    at_stage(stage)
    if not total:
        yield
        return
    before = folder_bytes(folder) if kind == "dataset" else 0  # perhaps of other parts of the data set
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
    """Return the total size, in bytes, of a hub repository's files that match the patterns `wanted`; None if the hub
    does not report the sizes or cannot be reached."""
    from huggingface_hub import HfApi

    try:
        about: Any = HfApi().repo_info(name, repo_type=kind, files_metadata=True, token=False)
    except Exception:  # no network or unknown name: the download will raise a clearer error
        return None
    matching = [file for file in about.siblings or [] if any(fnmatch(file.rfilename, pattern) for pattern in wanted)]
    return sum(file.size or 0 for file in matching) or None


def folder_bytes(folder: Path) -> int:
    """Return the total size, in bytes, of the files in a folder, without its subfolders. A file that is deleted during
    the call does not count."""
    size = 0
    for path in folder.glob("*"):
        with suppress(OSError):
            size += path.stat().st_size
    return size
