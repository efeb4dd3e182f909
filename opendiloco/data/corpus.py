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
from opendiloco.data.builders import data_files, open_builder
from opendiloco.data.downloads import downloading_rows
from opendiloco.data.local_sources import check_files, is_local
from opendiloco.errors import DataError, first_line
from opendiloco.stages import at_stage, passing

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files of a folder that `datasets` has saved with `save_to_disk`: of one split, or of several."""
LONGEST = 1 << 27
"""Characters of a row's text, or its tokens: tokenizing takes some ten times the memory."""
TEXT_OR_TOKENS = "Choose a column of text, or of lists of token ids."
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
    """A data set, as `datasets` reads it: a folder of Parquet, JSON, CSV or Arrow files, or a name on the hub."""

    def __init__(self, section: SourceSection) -> None:
        self._section = section
        self.is_stream = section.streaming or section.shards is not None
        with _explained(section):
            self._builder = open_builder(section)
            parts = sorted((str(split), part) for split, part in self._builder.config.data_files.items())
        local = _facts(data_files(self._builder)) if is_local(section.source) else ""
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
        """Return a row's text, or its token ids. Raises: DataError when it is neither, or too long."""
        section = self._section
        if isinstance(value, str | list) and len(value) > LONGEST:
            raise DataError(
                f"data.column = {section.column!r} of {section.source!r} has a row of {len(value):,} characters or "
                f"tokens; {LONGEST:,} is the most.",
                "Cut its documents into smaller ones, or choose another data set.",
            )
        if isinstance(value, str | None):
            encoded = (value or "").encode("utf-8", errors="replace")
            return Document(encoded, encoded)
        tokens: NDArray[Any] = np.asarray(value if isinstance(value, list) else 0)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind != "i"):
            raise DataError(
                f"data.column = {section.column!r} of {section.source!r} has {type(value).__name__}, not text.",
                TEXT_OR_TOKENS,
            )
        ids = tokens.astype(np.int64)
        return Document(b"", ids.tobytes(), ids)

    def _load(self) -> Any:
        """Return all rows, with their column of text or tokens only.

        Raises: DataError when it is not there, or of a type that reading decodes: images, for instance, are fetched
        from the URLs or opened at the paths that are in their rows.
        """
        section = self._section
        rows = self._open()
        types = rows.features
        columns = list(next(iter(rows), {}) if types is None else types)  # rows without types are not decoded
        if section.column not in columns:
            raise DataError(
                f"data.column = {section.column!r} is not in {section.source!r}.",
                f"Choose one of: {', '.join(columns)}.",
            )
        if types is not None and not _is_plain(types[section.column]):
            raise DataError(
                f"data.column = {section.column!r} of {section.source!r} has the type {types[section.column]!r}, "
                "not text.",
                TEXT_OR_TOKENS,
            )
        return rows.select_columns([section.column])

    def _open(self) -> Any:
        section = self._section
        if self.is_stream:
            at_stage(f"downloading {section.source}, as far as it is not here")
            rows = self._builder.as_streaming_dataset(split=section.split)
            _check_shards(section, rows.num_shards)
            return rows
        here = is_local(section.source)
        with nullcontext() if here else downloading_rows(section.source, data_files(self._builder)):
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
            self._files = [str(self._folder / one["filename"]) for one in state["_data_files"]]
        check_files(section.source, self._files)
        self.fingerprint = _facts([*self._files, str(self._folder / "state.json")])

    def _open(self) -> Any:
        import datasets

        # load_from_disk would also follow what state.json and dataset_info.json say of formats and types.
        rows: Any = datasets.concatenate_datasets([datasets.Dataset.from_file(file) for file in self._files])
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
        if isinstance(error.__cause__, DataError):  # raised while `datasets` called us
            raise error.__cause__ from None
        raise DataError(
            f"data.source = {section.source!r}, split {section.split!r}, cannot be loaded: {first_line(error)}",
            'Give a folder with text or dataset files, a dataset\'s hub name, or "stdlib".',
        ) from error


def _is_plain(feature: Any) -> bool:
    """Return whether a column's type is one of plain values, or of lists of them: what reading does not decode."""
    import datasets

    if isinstance(feature, datasets.List | datasets.LargeList):
        return _is_plain(feature.feature)
    return type(feature) is datasets.Value


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
