"""Where documents come from, and which of them are held out for evaluation.

The default corpus is the source of the Python standard library that runs this process: about 12 MB on every machine,
nothing to download. Machines with another Python version have somewhat other text; that is fine, since a sample number
only says where to read, and peers exchange what they learned, never what they read.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from opendiloco.config.data import STANDARD_LIBRARY, SourceSection
from opendiloco.data.downloads import downloading_rows
from opendiloco.data.local_sources import check_files, is_local
from opendiloco.errors import DataError, first_line
from opendiloco.stages import at_stage, passing

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files of a folder that `datasets` has saved with `save_to_disk`: of one split, or of several."""
TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py"})


@dataclass(frozen=True)
class Document:
    """One text, or its token ids where it was tokenized before. `identity` is its name, or its content where it has no
    name; being held out depends on that alone."""

    text: bytes
    identity: bytes
    tokens: NDArray[np.int64] | None = None

    def is_held_out(self, fraction: float) -> bool:
        """Whether it is for evaluation only: a fixed draw with probability `fraction`."""
        draw = int.from_bytes(hashlib.sha256(self.identity).digest()[:8], "big")
        return draw < fraction * 2**64


class Corpus(Protocol):
    """A source's documents, in an order that is the same on every machine that has the same files."""

    is_stream: bool
    """Whether nobody knows how many there are."""

    @property
    def fingerprint(self) -> str:
        """Another one when the documents could be others."""

    def documents(self, shard: int | None = None) -> Iterator[Document]:
        """All documents, or those of one of the source's shards. Raises: DataError."""


def open_corpus(section: SourceSection) -> Corpus:
    """The documents of a source. Raises: DataError when it cannot be read."""
    if section.source == STANDARD_LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
        files = [path for path in root.rglob("*.py") if not EXCLUDED_FOLDERS & set(path.relative_to(root).parts[:-1])]
        return TextFiles(section, root, files)
    folder = Path(section.source)
    if is_local(section.source) and any((folder / name).is_file() for name in SAVED):
        return SavedRows(section)
    texts = [path for path in folder.rglob("*") if path.suffix in TEXT_SUFFIXES] if folder.is_dir() else []
    if set(texts) - {folder / "README.md"}:  # which data sets have, too
        return TextFiles(section, folder, texts)
    return Rows(section)


class TextFiles:
    """Each file is a document; a shard is every n-th of them."""

    is_stream = False

    def __init__(self, section: SourceSection, root: Path, files: list[Path]) -> None:
        self._section = section
        self._files = sorted((path.relative_to(root).as_posix(), path) for path in files)
        self.fingerprint = _facts(str(path) for _, path in self._files)

    def documents(self, shard: int | None = None) -> Iterator[Document]:
        _check_shards(self._section, len(self._files))
        files = self._files if shard is None else self._files[shard :: self._section.shards]
        for name, path in passing(files, tokenizing(self._section, shard), len(files)):
            try:
                text = path.read_bytes()
            except OSError as error:
                raise DataError(f"{path} cannot be read ({error.strerror}).", "Correct its permissions.") from error
            yield Document(text, name.encode())


class Rows:
    """A data set, as `datasets` reads it: a folder of Parquet, JSON, CSV or Arrow files, or a name on the hub.

    The hub is asked as nobody: else a manifest could name what only this machine's owner may read there.
    """

    def __init__(self, section: SourceSection) -> None:
        import datasets

        self._section = section
        self.is_stream = section.streaming or section.shards is not None
        with _explained(section):
            revision = None if is_local(section.source) else section.revision
            self._builder: Any = datasets.load_dataset_builder(
                section.source, section.subset, revision=revision, token=False
            )
            parts = sorted((str(split), part) for split, part in (self._builder.config.data_files or {}).items())
            files = [file for _, part in parts for file in part]
            check_files(section.source, files)
            if not files:
                raise FileNotFoundError("it has no data files.")
        local = _facts(files) if is_local(section.source) else ""
        self.fingerprint = repr([(split, list(part), part.origin_metadata) for split, part in parts]) + local

    def documents(self, shard: int | None = None) -> Iterator[Document]:
        section = self._section
        with _explained(section):
            rows = self._load()
            if shard is not None:
                rows = rows.shard(num_shards=section.shards, index=shard)
            total = getattr(rows, "num_rows", None)  # a stream does not know
            for row in passing(rows, tokenizing(section, shard), total):
                yield self._document(row[section.column])

    def _document(self, value: Any) -> Document:
        """Return a row's text, or its token ids. Raises: DataError when it is neither."""
        section = self._section
        if isinstance(value, str | None):
            encoded = (value or "").encode("utf-8", errors="replace")
            return Document(encoded, encoded)
        tokens: NDArray[Any] = np.asarray(value if isinstance(value, list) else 0)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind != "i"):
            raise DataError(
                f"data.column = {section.column!r} of {section.source!r} has {type(value).__name__}, not text.",
                "Choose a column of text, or of lists of token ids.",
            )
        ids = tokens.astype(np.int64)
        return Document(b"", ids.tobytes(), ids)

    def _load(self) -> Any:
        """Return all rows, with their column of text or tokens only."""
        section = self._section
        rows = self._open()
        columns = rows.column_names
        if columns is None:  # a stream does not always know
            columns = list(next(iter(rows), {}))
        if section.column not in columns:
            raise DataError(
                f"data.column = {section.column!r} is not in {section.source!r}.",
                f"Choose one of: {', '.join(columns)}.",
            )
        return rows.select_columns([section.column])

    def _open(self) -> Any:
        section = self._section
        if self.is_stream:
            at_stage(f"downloading {section.source}, as far as it is not here")
            rows = self._builder.as_streaming_dataset(split=section.split)
            _check_shards(section, rows.num_shards)
            return rows
        files = [str(file) for part in (self._builder.config.data_files or {}).values() for file in part]
        with nullcontext() if is_local(section.source) else downloading_rows(section.source, files):
            self._builder.download_and_prepare()
        return self._builder.as_dataset(split=section.split)


class SavedRows(Rows):
    """A folder that `datasets` has saved with `save_to_disk`, of one split or of several. A shard is as many rows."""

    def __init__(self, section: SourceSection) -> None:
        self._section = section
        self.is_stream = False
        self._folder = Path(section.source)
        if (self._folder / SAVED[1]).is_file():
            self._folder /= section.split
        with _explained(section):
            state = json.loads((self._folder / "state.json").read_text(encoding="utf-8"))
            files = [str(self._folder / one["filename"]) for one in state["_data_files"]]
        check_files(section.source, files)
        self.fingerprint = _facts([*files, str(self._folder / "state.json")])

    def _open(self) -> Any:
        import datasets

        rows: Any = datasets.load_from_disk(str(self._folder))
        _check_shards(self._section, rows.num_rows, "rows")
        return rows


def tokenizing(section: SourceSection, shard: int | None) -> str:
    """Return the stage: whoever reads documents tokenizes them."""
    return f"tokenizing {section.source}" + ("" if shard is None else f", shard {shard} of {section.shards}")


@contextmanager
def _explained(section: SourceSection) -> Iterator[None]:
    """`datasets` raises many unrelated classes for what is not there, or cannot be read on."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"data.source = {section.source!r}, split {section.split!r}, cannot be loaded: {first_line(error)}",
            'Give a folder with text or dataset files, a dataset\'s hub name, or "stdlib".',
        ) from error


def _facts(files: Iterable[str]) -> str:
    """Changes with any of the files. Raises: DataError."""
    try:
        facts = [(file, os.stat(file)) for file in files]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}).", "Correct its permissions.") from error
    return repr([(file, fact.st_size, fact.st_mtime_ns) for file, fact in facts])


def _check_shards(section: SourceSection, parts: int, what: str = "files") -> None:
    if section.shards is not None and section.shards > parts:
        raise DataError(
            f"data.shards = {section.shards} of {section.source!r}, which has {parts} {what}.",
            f"A shard is one of them or more: use {parts} shards or fewer.",
        )
