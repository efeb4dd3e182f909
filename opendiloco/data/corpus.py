"""Where documents come from, and which of them are held out for evaluation.

The default corpus is the source of the Python standard library that runs this process: about 12 MB on every machine,
nothing to download. Machines with another Python version have somewhat other text; that is fine, since a sample number
only says where to read, and peers exchange what they learned, never what they read.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from opendiloco.config.data import STANDARD_LIBRARY, SourceSection
from opendiloco.data.local_sources import check_files, is_local
from opendiloco.errors import DataError, first_line
from opendiloco.stages import at_stage, passing

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py"})


@dataclass(frozen=True)
class Document:
    """One text. `identity` is its name, or its content where it has no name; being held out depends on that alone."""

    text: bytes
    identity: bytes

    def is_held_out(self, fraction: float) -> bool:
        """Whether it is for evaluation only: a fixed draw with probability `fraction`."""
        draw = int.from_bytes(hashlib.sha256(self.identity).digest()[:8], "big")
        return draw < fraction * 2**64


class Corpus(Protocol):
    """A source's documents, in an order that is the same on every machine that has the same files."""

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
    texts = [path for path in folder.rglob("*") if path.suffix in TEXT_SUFFIXES] if folder.is_dir() else []
    if set(texts) - {folder / "README.md"}:  # which data sets have, too
        return TextFiles(section, folder, texts)
    return Rows(section)


class TextFiles:
    """Each file is a document; a shard is every n-th of them."""

    def __init__(self, section: SourceSection, root: Path, files: list[Path]) -> None:
        self._section = section
        self._files = sorted((path.relative_to(root).as_posix(), path) for path in files)
        self.fingerprint = _facts(str(path) for _, path in self._files)

    def documents(self, shard: int | None = None) -> Iterator[Document]:
        _check_shards(self._section, len(self._files))
        files = self._files if shard is None else self._files[shard :: self._section.shards]
        for name, path in passing(files, _tokenizing(self._section, shard), len(files)):
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
            for row in passing(rows, _tokenizing(section, shard), total):
                text = row[section.column]
                if not isinstance(text, str | None):
                    raise DataError(
                        f"data.column = {section.column!r} of {section.source!r} has {type(text).__name__}, not text.",
                        "Choose a column of text.",
                    )
                encoded = (text or "").encode("utf-8", errors="replace")
                yield Document(encoded, encoded)

    def _load(self) -> Any:
        """All rows, with their column of text only."""
        section = self._section
        at_stage(f"downloading {section.source}, as far as it is not here")
        if section.streaming or section.shards:
            rows = self._builder.as_streaming_dataset(split=section.split)
            _check_shards(section, rows.num_shards)
        else:
            self._builder.download_and_prepare()
            rows = self._builder.as_dataset(split=section.split)
        columns = rows.column_names
        if columns is None:  # a stream does not always know
            columns = list(next(iter(rows), {}))
        if section.column not in columns:
            raise DataError(
                f"data.column = {section.column!r} is not in {section.source!r}.",
                f"Choose one of: {', '.join(columns)}.",
            )
        return rows.select_columns([section.column])


def _tokenizing(section: SourceSection, shard: int | None) -> str:
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


def _check_shards(section: SourceSection, files: int) -> None:
    if section.shards is not None and section.shards > files:
        raise DataError(
            f"data.shards = {section.shards} of {section.source!r}, which has {files} files.",
            f"A shard is one file or more: use {files} shards or fewer.",
        )
