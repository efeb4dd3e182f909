"""What is downloaded from the hub while a process starts: how much it is, and how far it has come.

The libraries that download draw bars of their own, each in its way; so we look at the folder that they write to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from opendiloco.quantities import in_words
from opendiloco.stages import at_stage

LOOK_SECONDS = 1.0


@contextmanager
def downloading_model(name: str, *wanted: str) -> Iterator[None]:
    """Say meanwhile how far the files of a model on the hub are here whose names match `wanted`."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "blobs"
    total = _bytes_of(lambda hub: hub.model_info(name, files_metadata=True, token=False), wanted) if wanted else None
    with downloading(name, folder, total):
        yield


@contextmanager
def downloading_rows(name: str, files: list[str]) -> Iterator[None]:
    """The same of a data set's files. What is here already is taken for not needed."""
    from datasets import config

    folder = Path(config.DOWNLOADED_DATASETS_PATH)
    names = tuple(f"*{file.rpartition('@')[2].partition('/')[2]}" for file in files)
    total = _bytes_of(lambda hub: hub.dataset_info(name, files_metadata=True, token=False), names)
    with downloading(name, folder, total, _size(folder)):
        yield


@contextmanager
def downloading(name: str, folder: Path, total: int | None, before: int = 0) -> Iterator[None]:
    """Have a thread say how many of `total` bytes are in a folder that had so many `before`."""
    stage = f"downloading {name}, as far as it is not here" + (f" ({in_words(total)})" if total else "")
    at_stage(stage)
    if not total:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(LOOK_SECONDS):
            at_stage(stage, min(max(0, _size(folder) - before) / total, 1.0))

    watching = threading.Thread(target=watch, name="download-watch", daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


def _bytes_of(ask: Callable[[Any], Any], wanted: tuple[str, ...]) -> int | None:
    """Return how many bytes the hub says the files have; None if it does not say, or cannot be reached."""
    from huggingface_hub import HfApi

    try:
        files = ask(HfApi()).siblings or []
    except Exception:  # no network, or no such thing: whoever downloads says so better
        return None
    matching = [file for file in files if any(fnmatch(file.rfilename, pattern) for pattern in wanted)]
    return sum(file.size or 0 for file in matching) or None


def _size(folder: Path) -> int:
    size = 0
    for path in folder.glob("*"):
        with suppress(OSError):
            size += path.stat().st_size
    return size
