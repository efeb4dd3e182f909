"""The builders of `datasets`, for data sets that strangers have made: nothing is looked for, opened or fetched beside a
data set's own files, and only formats that hold plain values are read."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from opendiloco.config.data import SourceSection
from opendiloco.data.local_sources import check_files, is_local
from opendiloco.errors import DataError

READ_FORMATS = ("arrow", "csv", "json", "parquet", "text")
HUB_SECONDS = 100.0
ROWS_AT_ONCE = 16
TABLE_BYTES = 1 << 24
LARGEST, LARGEST_RATIO = 1 << 30, 1000
"""A Parquet file's rows take at most so many bytes, and so many times those of the file. A file of another format that
is read as a whole has at most so many bytes; it may come compressed."""
LONGEST_LINE = 1 << 28
"""Of a file that is read by the line, in bytes or characters."""


def open_builder(section: SourceSection) -> Any:
    """Return the builder of a folder's or a hub data set's rows, whose data files are known and checked.

    The hub is asked without a token: else a manifest could name what only this machine's owner may read there.

    Raises: DataError; what `datasets` and the hub's client raise.
    """
    import datasets

    source, revision = section.source, None
    if is_local(source):
        path = os.path.abspath(source)  # a bare name could be that of a format
        cards = [Path(path, name) for name in _card_names()]
    else:
        path, (revision, cards) = f"hf://datasets/{source}", _hub_cards(source, section.revision)
    for card in cards:
        if card.is_file():
            _check_card(source, card)
    builder: Any = datasets.load_dataset_builder(path, section.subset, revision=revision, token=False)
    files = data_files(builder)
    check_files(source, files)
    if not files:
        raise FileNotFoundError("it has no data files.")
    if builder.name not in READ_FORMATS:
        raise DataError(
            f"data.source = {source!r} has files of the format {builder.name!r}.",
            f"Choose a data set of one of these: {', '.join(READ_FORMATS)}.",
        )
    if builder.name == "parquet":
        builder._generate_tables = partial(_parquet_tables, builder, source)
    elif builder.name in ("json", "text"):
        builder._generate_tables = partial(_tables_of_lines, builder._generate_tables, source)
    return builder


def _parquet_tables(
    builder: Any, source: str, files: Iterable[str], row_groups_list: Iterable[Iterable[int] | None]
) -> Iterator[tuple[Any, Any]]:
    """Yield tables of Parquet files' rows, some megabytes at a time.

    The library's own way reads a whole row group at once, and a file of some hundred bytes can hold one of many
    gigabytes: of one long text that all rows refer to. Raises: DataError when a file becomes that much larger.
    """
    import pyarrow as pa
    from datasets import DownloadConfig
    from datasets.builder import Key
    from datasets.utils.file_utils import xopen
    from pyarrow import parquet

    for number, (file, groups) in enumerate(zip(files, row_groups_list, strict=True)):
        with xopen(file, "rb", download_config=DownloadConfig(token=False)) as opened:
            most = LARGEST + LARGEST_RATIO * opened.seek(0, os.SEEK_END)
            read, yielded, begun = 0, 0, list[Any]()
            rows = parquet.ParquetFile(opened).iter_batches(ROWS_AT_ONCE, groups, builder.config.columns)
            for place, batch in enumerate(rows):
                begun.append(batch)
                read += batch.nbytes
                if read > most:
                    raise DataError(
                        f"data.source = {source!r}: the rows of {file} take more than {most:,} bytes, far more than "
                        "the file.",
                        "Do not trust this data set, or write its files anew with fewer repetitions.",
                    )
                if read - yielded >= TABLE_BYTES:
                    yield Key(number, place), builder._cast_table(pa.Table.from_batches(begun))
                    yielded, begun = read, []
            if begun:
                yield Key(number, place + 1), builder._cast_table(pa.Table.from_batches(begun))


def _tables_of_lines(generate: Callable[..., Iterator[Any]], source: str, **files: Any) -> Iterator[Any]:
    """Yield tables of files with text or JSON, of which no line or list is too long.

    The library's own way reads a line as a whole, and a compressed file of a megabyte can hold one of many gigabytes.
    Its modules call `open` by name: a function that is patched in there when rows are streamed.
    """
    module: Any = sys.modules[generate.__module__]
    opening = getattr(module, "open", open)
    if not isinstance(opening, _BoundedOpen):
        module.open = _BoundedOpen(opening)
    try:
        yield from generate(**files)
    except _TooLongError as error:
        raise DataError(
            f"data.source = {source!r}: a file has {error}.",
            "Do not trust this data set, or write its files anew, with a row of moderate length in each line.",
        ) from error


class _TooLongError(Exception):
    """A file from which more would be read at once than memory should hold."""


class _BoundedOpen:
    """The function `open`, of whose files only so much is read at once."""

    def __init__(self, opening: Callable[..., Any]) -> None:
        self._opening = opening

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Return the opened file."""
        file = self._opening(*arguments, **options)
        file.read = partial(_read_some, file.read, LARGEST)
        if not hasattr(file, "readuntil"):  # fsspec's, of a file on the hub that is not compressed: it takes no size
            file.readline = partial(_read_some, file.readline, LONGEST_LINE)
        return file


def _read_some(read: Callable[[int], Any], most: int, size: int = -1) -> Any:
    """Return what a method reads, but `most` at the most. Raises: _TooLongError when there is more."""
    if 0 <= size <= most:
        return read(size)
    some = read(most + 1)
    if len(some) > most:
        raise _TooLongError(f"more than {most:,} bytes in one piece")
    return some


def data_files(builder: Any) -> list[str]:
    """Return the paths or URLs of a builder's files, of all splits."""
    return [str(file) for part in (builder.config.data_files or {}).values() for file in part]


def _card_names() -> tuple[str, str]:
    """Return the names of the files in which a data set says which files and types it has."""
    from datasets import config

    return config.REPOCARD_FILENAME, config.REPOYAML_FILENAME


def _hub_cards(name: str, revision: str | None) -> tuple[str, list[Path]]:
    """Return the commit that a revision names, and copies of its cards, so that those are checked which are used."""
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


def _check_card(source: str, card: Path) -> None:
    """Raise DataError when a card names files elsewhere: `datasets` looks for those before it says which they are."""
    import yaml  # type: ignore[import-untyped]
    from huggingface_hub import DatasetCard

    is_readme = card.suffix == ".md"
    about = DatasetCard.load(card).data if is_readme else yaml.safe_load(card.read_bytes()) or {}
    for config in about.get("configs") or ():
        for path in _paths_of(config):
            if path.startswith(("/", "~")) or re.search(r"[:\\]", path) or ".." in path.split("/"):
                raise DataError(
                    f"data.source = {source!r} would read {path}, which is not a file of its own.",
                    f"Do not trust this data set, or correct data_files and data_dir in its {card.name}.",
                )
        version = str(config.get("version", "0"))  # it becomes a folder's name in the cache
        if not re.fullmatch(r"\w[\w.]*", version):
            raise DataError(
                f"data.source = {source!r} has the version {version!r}, which names another folder.",
                f"Do not trust this data set, or correct the version in its {card.name}.",
            )


def _paths_of(config: dict[str, Any]) -> Iterator[str]:
    """Yield the paths and patterns of one of a card's configurations."""
    files = config.get("data_files") or []
    for one in [files] if isinstance(files, str) else files:
        path = one["path"] if isinstance(one, dict) else one
        yield from [path] if isinstance(path, str) else path
    yield config.get("data_dir") or ""
