"""The files and folders that a machine's owner provides for a run whose model, tokenizer or data source is local."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opendiloco.errors import DataError
from peers.values.system import shared_folder

if TYPE_CHECKING:
    from opendiloco.config.data import DataSection, SourceSection


def cache_folder() -> Path:
    """Return the cache folder of diloco-peer, in $XDG_CACHE_HOME if that is set, else in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diloco-peer"


@dataclass(frozen=True)
class OwnFiles:
    """The paths that a machine's owner has named: the model's folder, and the tokenizer's folder or file. None: not
    named."""

    model: Path | None = None
    tokenizer: Path | None = None


NONE = OwnFiles()


HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
FILE_NAME = re.compile(
    r"[^/]+\.(arrow|bin|csv|gz|jsonl?|md|ndjson|parquet|py|rst|safetensors|tsv|txt|zst)", re.ASCII | re.IGNORECASE
)
"""Names that mean files: the hub's few models and data sets without an owner have no such ending."""
FORMAT = re.compile(
    "arrow|audiofolder|conll|csv|eval|fasta|fastq|genbank|harbor|hdf5|iceberg|imagefolder|json|lance|meshfolder|mmcif|"
    "niftifolder|pandas|parquet|pdb|pdffolder|sql|text|tsfile|videofolder|vortex|webdataset|xml"
)
"""Hub names that `datasets` would take for a file format, and so read such files in the working directory."""


def is_local(source: str) -> bool:
    """Return True if a data source may be a file or folder of this machine. Return False for a data set on the hub, and
    for "stdlib": the source code of Python's standard library."""
    from opendiloco.config.data import STANDARD_LIBRARY  # a late import: pydantic would slow down `--help`

    may_be_file = FILE_NAME.fullmatch(source) or os.path.lexists(source)
    return source != STANDARD_LIBRARY and bool(may_be_file or not _is_hub_name(source))


def _is_hub_name(source: str) -> bool:
    return bool(HUB_NAME.fullmatch(source)) and not FORMAT.fullmatch(source)


def is_here(source: str) -> bool:
    """Return True if a local source exists on this machine, as a folder, a file, or files that match a pattern."""
    return Path(source).exists() or any(glob.iglob(source, recursive=True))


def with_paths_marked(section: DataSection) -> DataSection:
    """Return a run's data section with "./" before each local source that looks like a hub name, such as "text.txt":
    in a folder without that file, the name would mean a data set on the hub."""
    sources = section.all_sources
    marked = tuple(
        one.model_copy(update={"source": f"./{one.source}"})
        if is_local(one.source) and _is_hub_name(one.source)
        else one
        for one in sources
    )
    return section if marked == sources else section.with_sources(marked)


def local_sources(section: DataSection) -> list[str]:
    """Return the local sources of a run's data section. Each volunteer must name a folder for every local source."""
    return [one.source for one in section.all_sources if is_local(one.source)]


def volunteered(section: DataSection, folders: Sequence[Path] = ()) -> DataSection:
    """Return a run's data section with the volunteer's `folders` in place of its local sources, in the same order.

    If the run has a single source, a folder may replace it even if it is not local.

    Raises: DataError unless there is exactly one folder for each local source, and each is on this machine.
    """
    sources, local = section.all_sources, local_sources(section)
    if len(sources) == len(folders) == 1:
        return section.with_sources((_replaced(sources[0], folders[0]),))
    given = len(folders)
    if given and not local:
        raise DataError(
            f"{given} folders of data are given, but none of the run's sources is local.",
            "Remove --data, or data=[…] in Python.",
        )
    if len(local) == 1 and given != 1:
        raise DataError(
            f"data.source = {local[0]!r} may mean files on this machine; what you have not named is not read.",
            "Name the folder with the run's text, or with text of yours to train on: --data FOLDER, or "
            "data=[FOLDER] in Python.",
        )
    if given != len(local):
        raise DataError(
            f"the run has {len(local)} local sources, {', '.join(map(repr, local))}, and {given} folders are given;"
            " what you have not named is not read.",
            "Name a folder for each, in this order: --data FOLDER --data FOLDER …, or data=[FOLDER, FOLDER] in Python.",
        )
    if not local:
        return section
    own = iter(folders)
    return section.with_sources(tuple(_replaced(one, next(own)) if is_local(one.source) else one for one in sources))


def named_files(source: str) -> list[Path]:
    """Return the file at the path `source`, or the files that match `source` as a pattern. Raises: DataError."""
    if os.path.lexists(source):
        return [Path(source)]
    if files := [Path(file) for file in sorted(glob.glob(source, recursive=True)) if os.path.isfile(file)]:
        return files
    if source.startswith("~"):
        raise DataError(f"data.source = {source!r} has a tilde.", f"Write it out: {os.path.expanduser(source)}.")
    raise DataError(
        f"data.source = {source!r} is not on this machine.",
        'Give a folder, a file, or a pattern such as "texts/*.jsonl"; or a data set\'s hub name, or "stdlib".',
    )


def _replaced(source: SourceSection, folder: Path) -> SourceSection:
    named_files(str(folder.absolute()))  # raises an error if it is not here, before the slow imports of what reads it
    return source.model_copy(update={"source": str(folder.absolute()), "subset": None, "revision": None})


def check_files(source: str, files: Iterable[str]) -> None:
    """Raise DataError if one of a data set's `files` lies outside of the folder `source` or, if `source` is a hub name,
    outside of the hub. A data set's README can name any file of this machine, or any URL."""
    folder = Path(source).resolve() if is_local(source) else None
    for file in files:
        if folder is None:
            inside = file.startswith("hf://datasets/")
        else:
            inside = "://" not in file and Path(os.path.normpath(file)).is_relative_to(folder)
        if "::" in file or not inside:
            raise DataError(
                f"data.source = {source!r} would read {file}, which is outside of the data set.",
                "Do not trust this data set, or correct the data_files in its README.md.",
            )


def check_card(source: str, card: Path) -> None:
    """Raise DataError if a data set's card names files outside of the data set. Check this before `datasets` reads the
    card, because `datasets` would look for such files at once."""
    import yaml  # type: ignore[import-untyped]
    from huggingface_hub import DatasetCard

    is_readme = card.suffix == ".md"
    about = DatasetCard.load(card).data if is_readme else yaml.safe_load(card.read_bytes()) or {}
    for config in about.get("configs") or ():
        for path in _paths_of(config):
            if path.startswith(("/", "~")) or re.search(r"[:\\]", path) or ".." in path.split("/"):
                raise DataError(
                    f"data.source = {source!r} would read {path}, which is outside of the data set.",
                    f"Do not trust this data set, or correct data_files and data_dir in its {card.name}.",
                )
        version = str(config.get("version", "0"))  # `datasets` names a cache folder by this version
        if not re.fullmatch(r"\w[\w.]*", version):
            raise DataError(
                f"data.source = {source!r} has the version {version!r}, which names another folder.",
                f"Do not trust this data set, or correct the version in its {card.name}.",
            )


def _paths_of(config: dict[str, Any]) -> Iterator[str]:
    """Yield the paths and patterns that one configuration in a data set's card names."""
    files = config.get("data_files") or []
    for one in [files] if isinstance(files, str) else files:
        path = one["path"] if isinstance(one, dict) else one
        yield from [path] if isinstance(path, str) else path
    yield config.get("data_dir") or ""


def copy_folder(section: SourceSection) -> Path:
    """Return the folder in which `datasets` writes its copy of a source's column."""
    import datasets

    base = cache_folder() / "text" if is_local(section.source) else Path(datasets.config.HF_DATASETS_CACHE)
    return base / f"column-{hashlib.sha256(section.column.encode()).hexdigest()[:16]}"


def copy_kept(section: SourceSection) -> AbstractContextManager[None]:
    """Return a context in which the copy on disk that `datasets` makes of a local source is kept, readable only for
    this user. The last process that leaves the context deletes the copy."""
    return shared_folder(copy_folder(section)) if is_local(section.source) else nullcontext()
