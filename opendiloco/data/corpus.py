"""The documents of a run's data sources, and the choice of the documents that are held out for evaluation.

The default corpus is the source of the Python standard library that runs this process: about 12 MB on every machine,
without a download. Another Python version has a slightly different text. That does no harm, because a sample number
only names a place to read, and peers exchange pseudo-gradients, never text.

The second half restricts what `datasets` may read of an untrusted data set, and checks its files.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import json
import logging
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opendiloco.config.data import STANDARD_LIBRARY, SourceSection
from opendiloco.data.hub import downloading
from opendiloco.data.own_files import check_card, check_files, copy_folder, copy_kept, is_local, named_files
from opendiloco.errors import DataError, first_line
from opendiloco.stages import at_stage, passing

logger = logging.getLogger(__name__)

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files in a folder that `save_to_disk` of `datasets` has written: for one split, and for several."""
WHOLE = slice(None)
LONGEST = 1 << 27
"""Most characters or tokens of a document. Tokenizing takes about ten times their memory."""
TEXT_OR_TOKENS = "Choose a column of text, or of lists of token ids."
MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py"})


@dataclass(frozen=True)
class Document:
    """A text, or its token ids if the source holds tokens. `identity` is the file's name or the row's content; its hash
    decides whether the document is held out, unless it is long: of each long document, the end is held out."""

    text: bytes
    identity: bytes
    tokens: NDArray[np.int64] | None = None

    @property
    def size(self) -> int:
        """The size of the document's text in bytes; for token ids instead, an estimate of 4 bytes per id."""
        return len(self.text) + 4 * (0 if self.tokens is None else len(self.tokens))

    def is_held_out(self, fraction: float) -> bool:
        """Return True if the document is held out: a hash of `identity` selects the share `fraction` of all
        documents."""
        draw = int.from_bytes(hashlib.sha256(self.identity).digest()[:8], "big")
        return draw < fraction * 2**64


def open_corpus(section: SourceSection) -> _TextFiles | _Rows:
    """Return a reader of a source's documents. Machines with the same files read the documents in the same order, and
    the reader's `fingerprint` changes when the files change. Raises: DataError if the source cannot be read."""
    if section.source == STANDARD_LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
        files = [path for path in root.rglob("*.py") if not EXCLUDED_FOLDERS & set(path.relative_to(root).parts[:-1])]
        return _TextFiles(section, root, files)
    folder = Path(section.source)
    if is_local(section.source) and any((folder / name).is_file() for name in SAVED):
        return _SavedRows(section)
    if is_local(section.source) and not folder.is_dir():
        files = named_files(section.source)
        if all(map(_is_text, files)):
            return _TextFiles(section, Path(os.path.commonpath([file.parent for file in files])), files)
        return _Rows(section, files)
    texts = [path for path in folder.rglob("*") if _is_text(path) and not _is_hidden(path.relative_to(folder))]
    if set(texts) - {folder / "README.md"}:  # a README.md alone does not count, because it describes a data set
        return _TextFiles(section, folder, texts)
    return _Rows(section)


def _is_text(path: Path) -> bool:
    return Path(path.name.removesuffix(GZIP)).suffix in TEXT_SUFFIXES


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _as_utf8(text: bytes) -> bytes:
    """Return a file's bytes as UTF-8: UTF-16 is converted, a byte order mark is removed, other bytes stay unchanged."""
    for mark, encoding in MARKS:
        if text.startswith(mark):
            with suppress(UnicodeDecodeError):
                return text.decode(encoding).encode(errors="replace")
    return text


class _TextFiles:
    """A reader of text files, one document per file. With n shards, shard i has every n-th file, from file i on."""

    is_stream = False

    def __init__(self, section: SourceSection, root: Path, files: list[Path]) -> None:
        self._section = section
        self._files = sorted((path.relative_to(root).as_posix(), path) for path in files)
        if (section.split, section.column) != ("train", "text"):
            ignored = f"data.split = {section.split!r} and data.column = {section.column!r}"
            logger.warning("data.source = %r has text files, so %s are ignored", section.source, ignored)
        self.fingerprint = _facts(str(path) for _, path in self._files)

    def documents(self, shard: int | None = None) -> Iterator[Document]:
        """Yield the documents of all files, or of one shard's files. Raises: DataError if a file cannot be read."""
        _check_shards(self._section, len(self._files))
        files = self._files if shard is None else self._files[shard :: self._section.shards]
        for name, path in passing(files, tokenizing(self._section, shard), len(files)):
            try:
                with gzip.open(path) if name.endswith(GZIP) else path.open("rb") as file:
                    text = _read_some(file.read, PIECE_BYTES)
            except _TooLongError as error:
                raise _too_long(self._section.source, error) from error
            except (OSError, EOFError) as error:
                why = getattr(error, "strerror", None) or first_line(error).removesuffix(".")
                raise DataError(f"{path} cannot be read ({why}).", "Correct the file or its permissions.") from error
            if len(text) > LONGEST:
                raise DataError(
                    f"{path} has {len(text):,} bytes; {LONGEST:,} is the most for one document.",
                    f"Cut it into smaller files: split --line-bytes=100M --additional-suffix=.txt {path} part-",
                )
            yield Document(_as_utf8(text), name.encode())


class _Rows:
    """A reader of a data set, one document per row, from Parquet, JSON, CSV, Arrow or text files."""

    def __init__(self, section: SourceSection, files: Sequence[Path] = ()) -> None:
        self._section = section
        self.is_stream = section.streaming or section.shards is not None
        with _explained(section), copy_kept(section):
            self._builder = _open_builder(section, files)
            parts = sorted((str(split), part) for split, part in self._builder.config.data_files.items())
        _check_split(section, [split for split, _ in parts])
        local = _facts(_data_files(self._builder)) if is_local(section.source) else ""
        self.fingerprint = repr([(split, list(part), part.origin_metadata) for split, part in parts]) + local

    def documents(self, shard: int | None = None) -> Iterator[Document]:
        """Yield the documents of all rows, or of one shard's rows. Raises: DataError if the rows cannot be read."""
        section = self._section
        with _explained(section), copy_kept(section):
            rows = self._load() if shard is None else self._load_shard(shard)
            total = getattr(rows, "num_rows", None)  # None for a streamed data set, whose number of rows is unknown
            for row in passing(rows, tokenizing(section, shard), total):
                yield self._document(row[section.column])

    def _document(self, value: Any) -> Document:
        """Return the document in a row's value. Raises: DataError if the value is not text or token ids, or is too
        long."""
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

    def _load_shard(self, shard: int) -> Any:
        """Return the rows of one shard: whole files, or a part of one file if the source has more shards than files.

        A part of a Parquet file is every n-th row group, so that the others are not read; of another file it is every
        n-th row.
        """
        shards, rows = self._section.shards or 1, self._load()
        if shards <= (files := rows.num_shards):
            return rows.shard(num_shards=shards, index=shard)
        first, file = divmod(shard, files)
        part = slice(first, None, len(range(file, shards, files)))
        if self._builder.name == "parquet":
            return self._load(part).shard(num_shards=files, index=file)
        return islice(rows.shard(num_shards=files, index=file), part.start, None, part.step)

    def _load(self, part: slice = WHOLE) -> Any:
        """Return the rows, with only the column `data.column` of run.toml; `part` selects row groups of Parquet files.

        Raises: DataError if the column does not exist, or has a type that `datasets` decodes: images, for instance, are
        fetched from URLs or opened at paths that the rows name.
        """
        section = self._section
        rows = self._open(part)
        types = rows.features
        # Reading the first row is safe: as long as types are unknown, `datasets` does not fetch the URLs in a row.
        columns = list(next(iter(rows), {}) if types is None else types)
        if section.column not in columns:
            is_csv = getattr(self, "_builder", None) is not None and self._builder.name == "csv"
            first = " The first line of a CSV file must name its columns, separated by commas." * is_csv
            raise DataError(
                f"data.column = {section.column!r} is not in {section.source!r}.",
                f"Choose one of: {', '.join(str(name)[:40] for name in columns[:20])}.{first}",
            )
        if types is not None and not _is_plain(types[section.column]):
            raise DataError(
                f"data.column = {section.column!r} of {section.source!r} has the type {types[section.column]!r}, "
                "not text.",
                TEXT_OR_TOKENS,
            )
        return rows.select_columns([section.column])

    def _open(self, part: slice) -> Any:
        section = self._section
        if self._builder.name == "parquet":
            read = partial(_parquet_tables, self._builder, section, part)
            self._builder._generate_tables = partial(_naming_files, section, read)
        if self.is_stream:
            at_stage(f"downloading {section.source}, as far as it is not here")
            return self._builder.as_streaming_dataset(split=section.split)
        names = [f"*{file.rpartition('@')[2].partition('/')[2]}" for file in _data_files(self._builder)]
        here = is_local(section.source)
        with nullcontext() if here else downloading(section.source, "dataset", names):
            self._builder.download_and_prepare()
        return self._builder.as_dataset(split=section.split)


class _SavedRows(_Rows):
    """A reader of a folder written by `save_to_disk` of `datasets`, one document per row."""

    def __init__(self, section: SourceSection) -> None:
        self._section = section
        self.is_stream = False
        self._folder = Path(section.source)
        if (self._folder / SAVED[1]).is_file():
            _check_split(section, [path.parent.name for path in sorted(self._folder.glob("*/state.json"))])
            self._folder /= section.split
        with _explained(section):
            state = json.loads((self._folder / "state.json").read_text(encoding="utf-8"))
            self._files = [str(self._folder / one["filename"]) for one in state["_data_files"]]
        check_files(section.source, self._files)
        self.fingerprint = _facts([*self._files, str(self._folder / "state.json")])

    def _load_shard(self, shard: int) -> Any:
        rows = self._load()
        _check_shards(self._section, rows.num_rows, "rows")
        return rows.shard(num_shards=self._section.shards, index=shard)

    def _open(self, part: slice) -> Any:
        import datasets

        # Unlike `load_from_disk`, this call does not apply the types that state.json and dataset_info.json name.
        return datasets.concatenate_datasets([datasets.Dataset.from_file(file) for file in self._files])


def tokenizing(section: SourceSection, shard: int | None) -> str:
    """Return the name of the progress stage in which a source, or one of its shards, is read and tokenized."""
    return f"tokenizing {section.source}" + ("" if shard is None else f", shard {shard} of {section.shards}")


@contextmanager
def _explained(section: SourceSection) -> Iterator[None]:
    """Turn each exception that `datasets` raises in the `with` block into a DataError that names the cause."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        if isinstance(error.__cause__, DataError):  # raised by this module, which `datasets` called
            raise error.__cause__ from None
        is_empty = isinstance(error, FileNotFoundError) and error.errno is None and is_local(section.source)
        reason = "it has no files of text, such as .txt, .jsonl or .parquet." if is_empty else _innermost(error)
        raise DataError(
            f"data.source = {section.source!r}, split {section.split!r}, cannot be loaded: {reason}",
            'Give a folder with text or dataset files, a dataset\'s hub name, or "stdlib".',
        ) from error


def _innermost(error: BaseException) -> str:
    """Return the message of an exception's first cause, because `datasets` wraps it in exceptions that add nothing."""
    while error.__cause__ is not None:
        error = error.__cause__
    words = " ".join(str(error).split()) or type(error).__name__  # joins the message's lines into one
    return f"{words[:300].removesuffix('.')}."


def _check_split(section: SourceSection, splits: list[str]) -> None:
    """Raise DataError if the source lacks a split that `section.split` names. Plus signs separate several names."""
    named = (re.match(r"[\w.-]+", part.strip()) for part in section.split.split("+"))
    for split in (match[0] for match in named if match is not None):
        if split not in (*splits, "all"):
            raise DataError(
                f"data.split = {split!r} is not in {section.source!r}.", f"Choose one of: {', '.join(splits)}."
            )


def _is_plain(feature: Any) -> bool:
    """Return True if a column has plain values, such as text, or lists of them, which `datasets` does not decode."""
    import datasets

    if isinstance(feature, datasets.List | datasets.LargeList):
        return _is_plain(feature.feature)
    return type(feature) is datasets.Value


def _facts(files: Iterable[str]) -> str:
    """Return the paths, sizes and modification times of files as a text. Raises: DataError if a file cannot be read."""
    try:
        facts = [(file, os.stat(file)) for file in files]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}).", "Correct its permissions.") from error
    return repr([(file, fact.st_size, fact.st_mtime_ns) for file, fact in facts])


def _check_shards(section: SourceSection, parts: int, what: str = "files") -> None:
    if section.shards is not None and section.shards > parts:
        raise DataError(
            f"data.shards = {section.shards} of {section.source!r}, which has {parts} {what}.",
            f"A shard needs at least one of them: use {parts} shards or fewer.",
        )


# Untrusted data sets --------------------------------------------------------------------------------------------------
# Only a data set's own files are looked for, opened or fetched, and only in formats with plain values.

READ_FORMATS = ("arrow", "csv", "json", "parquet", "text")
GZIP = ".gz"
COMPRESSED = frozenset({GZIP, ".bz2", ".xz", ".zst"})
HUB_SECONDS = 100.0  # seconds to wait for one answer of the hub, as in `datasets`
ROWS_AT_ONCE = 16  # rows of a Parquet file read at once: few, because their size is known only once they are read
TABLE_BYTES = 1 << 24  # least bytes of rows in each table but the last; more, smaller tables would take more time
PIECE_BYTES, PARQUET_GROWTH = 1 << 30, 1000
"""A Parquet file's rows may take PIECE_BYTES plus PARQUET_GROWTH times the file's bytes. A file of another format that
is read as a whole may have PIECE_BYTES, uncompressed."""
LONGEST_LINE = 1 << 28  # most bytes or characters of a line
NOT_TEXT = "It has NUL bytes, so it is not text, but binary data or UTF-16: remove it, or convert it with iconv."
MOST_NOT_UTF8 = 0.01  # largest share, 0 to 1, of a JSON file's lines or a source's documents that may not be UTF-8
LINES_AT_ONCE = 1 << 23  # bytes of a JSON file that are read at once


def _open_builder(section: SourceSection, chosen: Sequence[Path] = ()) -> Any:
    """Check the files of a folder or hub data set, or the `chosen` files, and return a `datasets` builder for them.

    The hub is asked without a token. With one, a manifest could name a data set that only this machine's owner may
    read. Only the section's column is read, and the cache has a separate folder for each column.

    Raises: DataError; exceptions of `datasets` and of the hub's client.
    """
    import datasets

    source, revision, options = section.source, None, dict[str, Any]()
    if chosen:
        path, cards = _format_of(source, chosen), []
        options["data_files"] = {"train": [glob.escape(str(file.absolute())) for file in chosen]}
        if any(".tsv" in file.suffixes for file in chosen):
            options["sep"] = "\t"
    elif is_local(source):
        path = os.path.abspath(source)  # an absolute path, because `datasets` could take a bare name for a file format
        cards = [Path(path, name) for name in _card_names()]
    else:
        path, (revision, cards) = f"hf://datasets/{source}", _hub_cards(source, section.revision)
    for card in cards:
        if card.is_file():
            check_card(source, card)
    options["cache_dir"] = str(copy_folder(section))
    builder: Any = datasets.load_dataset_builder(path, section.subset, revision=revision, token=False, **options)
    files = _data_files(builder)
    if not chosen:
        check_files(source, files)
    if not files:
        raise FileNotFoundError("it has no data files.")
    if builder.name not in READ_FORMATS:
        raise DataError(
            f"data.source = {source!r} has files of the format {builder.name!r}.",
            f"Choose a data set of one of these: {', '.join(READ_FORMATS)}.",
        )
    if builder.name == "json":
        builder._generate_tables = partial(_json_tables, builder, section)
    elif builder.name == "text":
        builder._generate_tables = partial(_tables_of_lines, builder._generate_tables)
    if builder.name != "parquet":  # for Parquet, `_open` sets a reader, which reads only one shard's part of a file
        builder._generate_tables = partial(_naming_files, section, builder._generate_tables)
    _read_only(builder, section.column)
    return builder


def _format_of(source: str, files: Sequence[Path]) -> str:
    """Return the `datasets` format, such as "json", that the suffixes of all files name. Raises: DataError."""
    from datasets.packaged_modules import _EXTENSION_TO_MODULE

    suffixes = {next((each for each in reversed(file.suffixes) if each not in COMPRESSED), "") for file in files}
    formats = {_EXTENSION_TO_MODULE.get(suffix, (suffix or "without a suffix",))[0] for suffix in suffixes}
    if len(formats) > 1 or not formats <= set(READ_FORMATS):
        raise DataError(
            f"data.source = {source!r} has files of the formats {', '.join(sorted(formats))}.",
            f"Name files of one format, of {', '.join(READ_FORMATS)}, by suffixes such as .jsonl, .parquet or .txt.gz.",
        )
    return str(formats.pop())


def _read_only(builder: Any, column: str) -> None:
    """Make a `datasets` builder read only the column `column`. Some files may lack it, and differ in other columns."""
    import datasets
    import pyarrow as pa

    cast, split = builder._cast_table, builder._split_generators
    met = False

    def of_one_column(manager: Any) -> Any:
        generators = split(manager)
        features = builder.info.features
        if features is not None and column in features:
            builder.info.features = datasets.Features({column: features[column]})
        return generators

    def with_one_column(table: Any) -> Any:
        nonlocal met
        if column in table.column_names:
            met = True
            return cast(table.select([column]))
        known = builder.info.features
        if met or (known is not None and column in known):
            return cast(pa.table({column: pa.nulls(table.num_rows)}))
        return table  # unchanged, so that the error message can list the table's columns

    builder._split_generators, builder._cast_table = of_one_column, with_one_column


def _naming_files(section: SourceSection, generate: Callable[..., Iterator[Any]], **files: Any) -> Iterator[Any]:
    """Yield the tables that the function `generate` reads from `files`. Raises: DataError that names the bad file."""
    opened = [""]

    def recorded(paths: Iterable[str]) -> Iterator[str]:
        for path in paths:
            opened.append(path)
            yield path

    if "files" in files:
        files["files"] = recorded(files["files"])
    else:
        files["files_iterables"] = [recorded(each) for each in files["files_iterables"]]
    try:
        yield from generate(**files)
    except (DataError, MemoryError):
        raise
    except _TooLongError as error:
        raise _too_long(section.source, error) from error
    except Exception as error:
        raise DataError(
            f"data.source = {section.source!r}, column {section.column!r}: {_plain_name(opened[-1])} cannot be read: "
            f"{_innermost(error)}",
            "Correct that file, or move it elsewhere.",
        ) from error


def _plain_name(file: str) -> str:
    """Return a data file's path or URL without the prefix gzip://INSIDE:: that `datasets` gives to compressed files."""
    return file.rpartition("::")[2]


def _json_tables(
    builder: Any,
    section: SourceSection,
    files_iterables: Iterable[Iterable[str]],
    allow_full_read: bool = True,
    **_: object,
) -> Iterator[tuple[Any, Any]]:
    """Yield pairs (`datasets` key, one-column table) from JSON files with an object in each line or a list of objects.

    The reader of `datasets` reads all columns, and refuses a file whose rows differ in any. Rows that are not objects
    are skipped and counted. Raises: DataError if no row has the column, or if many rows are not UTF-8.
    """
    import pyarrow as pa
    from datasets import DownloadConfig
    from datasets.builder import Key
    from datasets.utils.file_utils import xopen

    rows, broken, keys, is_nested = 0, 0, dict[str, None](), False
    for number, files in enumerate(files_iterables):
        for file in files:
            in_file, other, wrong, has_nul = 0, list[int](), list[int](), False
            with xopen(file, "rb", download_config=DownloadConfig(token=False)) as opened:
                for place, lines in enumerate(_json_rows(opened)):
                    numbered = [(at, line) for at, line in lines if isinstance(line, dict)]
                    other += [at for at, line in lines if isinstance(line, bytes)]
                    has_nul |= any(isinstance(line, bytes) and b"\0" in line for _, line in lines)
                    wrong += [at for at, line in lines if not isinstance(line, bytes | dict)]
                    in_file += len(lines)
                    broken += len(lines) - len(numbered)
                    if not numbered or not (rows or any(section.column in line for _, line in numbered)):
                        keys |= dict.fromkeys(key for _, line in numbered for key in line)
                        found = (each for _, line in numbered for each in line.values() if isinstance(each, list))
                        is_nested |= any(isinstance(one, dict) for each in found for one in each[:1])
                        continue
                    rows += len(numbered)
                    values = [line.get(section.column) for _, line in numbered]
                    kinds = {type(line.get(section.column)).__name__: at for at, line in reversed(numbered)}
                    kinds.pop("NoneType", None)
                    if len(kinds) > 1:
                        raise TypeError(", but ".join(f"row {at} has {kind}" for kind, at in kinds.items()))
                    if kinds.keys() <= {"str"}:
                        texts = [each if each is None else each.encode(errors="replace") for each in values]
                        array = pa.array(texts, pa.string())  # as bytes: pyarrow rejects a str with a lone surrogate
                    else:
                        array = pa.array(values)
                    yield Key(number, place), builder._cast_table(pa.table({section.column: array}))
            if other:
                where = f"{_plain_name(file)} is not UTF-8: line {other[0]} first, {len(other)} of {in_file} lines"
                if len(other) > MOST_NOT_UTF8 * in_file:
                    remedy = "Convert the file with iconv, such as `iconv -f LATIN1 -t UTF-8`."
                    raise DataError(f"{where}.", NOT_TEXT if has_nul else remedy)
                logger.warning("skipped lines of a file, because %s; convert the file with iconv", where)
            if wrong:
                where = f"{_plain_name(file)}: row {wrong[0]} first, {len(wrong)} of {in_file} rows"
                logger.warning("skipped rows that are not JSON objects in %s", where)
    if not rows and not allow_full_read:  # `datasets` passes False to infer the types, and then needs a table
        raise DataError(
            f"data.column = {section.column!r} is not in {section.source!r}."
            if keys
            else f"data.source = {section.source!r} has no JSON objects among its {broken:,} rows.",
            (f"Choose one of: {', '.join(keys)}." if keys else 'Write an object in each line, such as {"text": "…"}.')
            + " If KEY lists the rows: `jq -c '.KEY[]' FILE > rows.jsonl`." * (is_nested if keys else broken > 0),
        )


def _json_rows(file: Any) -> Iterator[list[tuple[int, Any]]]:
    """Yield lists of pairs (number, value) for the lines of a JSON file, or for the items of its one list. The value is
    None for a line that is not JSON, and the line's bytes if it is not UTF-8. Raises: _TooLongError."""
    begun, first = file.read(LINES_AT_ONCE).removeprefix(codecs.BOM_UTF8), 1
    if begun.lstrip().startswith(b"["):
        whole = begun + file.read(max(PIECE_BYTES + 1 - len(begun), 0))
        if len(whole) > PIECE_BYTES:
            raise _TooLongError(f"more than {PIECE_BYTES:,} bytes in one piece")
        with suppress(ValueError):
            listed = json.loads(whole)
            yield list(enumerate(({"text": each} if isinstance(each, str) else each for each in listed), 1))
            return
        begun = whole  # `whole` is not one JSON list, so the loop below reads it line by line
    while begun:
        *lines, rest = begun.split(b"\n")
        yield [(at, _json_value(line)) for at, line in enumerate(lines, first) if line.strip()]
        first += len(lines)
        if len(rest) > LONGEST_LINE:
            raise _TooLongError(f"more than {LONGEST_LINE:,} bytes in one piece")
        if not (more := file.read(LINES_AT_ONCE)):
            yield [(first, _json_value(rest))] if rest.strip() else []
            return
        begun = rest + more


def _json_value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return line if isinstance(error, UnicodeDecodeError) else None


def _parquet_tables(
    builder: Any, section: SourceSection, part: slice, files: Iterable[str], **_: object
) -> Iterator[Any]:
    """Yield the rows of Parquet files, or of a `part` of each file, as pairs of a `Key` and a table of about 16 MiB.

    A part is every n-th row group, or every n-th row of a file with fewer than n row groups. The reader of `datasets`
    reads a whole row group at once. In a file of some hundred bytes, a row group can hold many gigabytes: one long text
    to which all rows refer. Raises: DataError if the rows are that much larger than the file.
    """
    import pyarrow as pa
    from datasets import DownloadConfig
    from datasets.builder import Key
    from datasets.utils.file_utils import xopen
    from pyarrow import parquet

    for number, file in enumerate(files):
        with xopen(file, "rb", download_config=DownloadConfig(token=False)) as opened:
            most = PIECE_BYTES + PARQUET_GROWTH * opened.seek(0, os.SEEK_END)
            read, yielded, begun = 0, 0, list[Any]()
            parquet_file = parquet.ParquetFile(opened)
            groups, passed = range(parquet_file.num_row_groups), 0
            by_rows = part != WHOLE and len(groups) < part.step
            chosen = list(groups if by_rows else groups[part])
            columns = [section.column] if section.column in parquet_file.schema_arrow.names else []
            rows = parquet_file.iter_batches(ROWS_AT_ONCE, chosen, columns)
            for place, batch in enumerate(rows):
                read += batch.nbytes
                first, passed = passed, passed + batch.num_rows
                if by_rows:
                    batch = batch.filter(pa.array(np.arange(first, passed) % part.step == part.start))
                begun.append(batch)
                if read > most:
                    raise DataError(
                        f"data.source = {section.source!r}: the rows of {file} take more than {most:,} bytes, far more "
                        "than the file.",
                        "Do not trust this data set, or write its files again with fewer repetitions.",
                    )
                if read - yielded >= TABLE_BYTES:
                    yield Key(number, place), builder._cast_table(pa.Table.from_batches(begun))
                    yielded, begun = read, []
            if begun:
                yield Key(number, place + 1), builder._cast_table(pa.Table.from_batches(begun))


def _tables_of_lines(generate: Callable[..., Iterator[Any]], **files: Any) -> Iterator[Any]:
    """Yield the tables that `generate` of `datasets` reads from text files.

    The reader of `datasets` reads each line whole, and a compressed file of a megabyte can hold a line of many
    gigabytes. Its modules call the name `open`, which `datasets` replaces for streaming; so that name is wrapped here.

    Raises: _TooLongError if a line is longer than `_open_bounded` permits.
    """
    module: Any = sys.modules[generate.__module__]
    opening = getattr(module, "open", open)
    if getattr(opening, "func", None) is not _open_bounded:
        module.open = partial(_open_bounded, opening)
    yield from generate(**files)


class _TooLongError(Exception):
    """Error: a line, or a file that must be read as a whole, is too long to hold in memory."""


def _too_long(source: str, error: _TooLongError) -> DataError:
    return DataError(
        f"data.source = {source!r}: a file has {error}.",
        "Do not trust this data set, or write its files again, with a row of moderate length in each line.",
    )


def _open_bounded(opening: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Open a file with the function `opening`, limit the bytes or characters of each read, and return the file."""
    file = opening(*arguments, **options)
    file.read = partial(_read_some, file.read, PIECE_BYTES)
    if not hasattr(file, "readuntil"):  # `readline` of an fsspec file, which has `readuntil`, takes no size
        file.readline = partial(_read_some, file.readline, LONGEST_LINE)
    return file


def _read_some(read: Callable[[int], Any], most: int, size: int = -1) -> Any:
    """Return the bytes or characters of `read(size)` (-1: all). Raises: _TooLongError if there are more than `most`."""
    if 0 <= size <= most:
        return read(size)
    some = read(most + 1)
    if len(some) > most:
        raise _TooLongError(f"more than {most:,} bytes in one piece")
    return some


def _data_files(builder: Any) -> list[str]:
    return [str(file) for part in (builder.config.data_files or {}).values() for file in part]


def _card_names() -> tuple[str, str]:
    """Return the names of the two cards, README.md and .huggingface.yaml, that declare a data set's files and types."""
    from datasets import config

    return config.REPOCARD_FILENAME, config.REPOYAML_FILENAME


def _hub_cards(name: str, revision: str | None) -> tuple[str, list[Path]]:
    """Return a revision's commit id, and local copies of its README.md and .huggingface.yaml, the data set's cards."""
    from datasets import config
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError

    hub, cards = HfApi(endpoint=config.HF_ENDPOINT, token=False), list[Path]()
    commit = str(hub.dataset_info(name, revision=revision, timeout=HUB_SECONDS).sha)
    for file in _card_names():
        try:
            cards.append(Path(hub.hf_hub_download(name, file, repo_type="dataset", revision=commit)))
        except EntryNotFoundError:
            continue
    return commit, cards
