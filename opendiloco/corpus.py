"""Where documents come from, and which of them are held out for evaluation.

The default corpus is the source of the Python standard library that runs this process: about 12 MB on every machine,
nothing to download. Machines with another Python version have somewhat other text; that is fine, since a sample number
only says where to read, and peers exchange what they learned, never what they read.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from opendiloco.config import DataSection
from opendiloco.errors import DataError, first_line

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py"})
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


@dataclass(frozen=True)
class Document:
    """One text. `held_out` depends on the name (or the content, where there is no name) and on nothing else."""

    text: bytes
    held_out: bool


def volunteered(section: DataSection, folder: Path | None) -> DataSection:
    """The section as a volunteer's machine may read it: with `folder` for a source, if one is given.

    A manifest's author, a stranger, must not choose which of a volunteer's files are read: what a model was trained on
    can be got out of it again.

    Raises: DataError when the source is local and no folder is given.
    """
    if folder is not None:
        return section.model_copy(update={"source": str(folder.absolute())})
    if is_local(section.source):
        raise DataError(
            f"data.source = {section.source!r} is a place on this machine; what you have not named is not read.",
            "Name the folder with the run's text, or with text of yours to train on: --data FOLDER.",
        )
    return section


def is_local(source: str) -> bool:
    """Whether a source is, or could be, a file or folder of this machine's instead of a data set on the hub."""
    return source != "stdlib" and (HUB_NAME.fullmatch(source) is None or Path(source).exists())


def read_documents(section: DataSection) -> Iterator[Document]:
    """All documents of a corpus, in an order that is the same on every machine that has the same files.

    Raises: DataError when the source cannot be read.
    """
    if section.source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [path for path in root.rglob("*.py") if not EXCLUDED_FOLDERS & set(path.relative_to(root).parts[:-1])]
        return _from_files(root, files, section.held_out)
    folder = Path(section.source)
    if folder.is_dir():
        files = [path for path in folder.rglob("*") if path.suffix in TEXT_SUFFIXES]
        if files:
            return _from_files(folder, files, section.held_out)
    return _from_datasets(section)


def _from_files(root: Path, files: list[Path], fraction: float) -> Iterator[Document]:
    names = sorted((path.relative_to(root).as_posix(), path) for path in files)
    for name, path in names:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}).", "Correct its permissions.") from error
        yield Document(text, is_held_out(name.encode(), fraction))


def _from_datasets(section: DataSection) -> Iterator[Document]:
    """Rows of a dataset: a folder of Parquet, JSON, CSV or Arrow files, or a name on the hub."""
    import datasets

    try:
        rows = datasets.load_dataset(section.source, split=section.split)
    except Exception as error:  # datasets raises many unrelated classes for what is not there
        raise DataError(
            f"data.source = {section.source!r}, split {section.split!r}, cannot be loaded: {first_line(error)}",
            'Give a folder with text or dataset files, a dataset\'s hub name, or "stdlib".',
        ) from error
    if section.column not in rows.column_names:
        raise DataError(
            f"data.column = {section.column!r} is not in {section.source!r}.",
            f"Choose one of: {', '.join(rows.column_names)}.",
        )
    for row in rows:
        text = row[section.column].encode()
        yield Document(text, is_held_out(text, section.held_out))


def is_held_out(identity: bytes, fraction: float) -> bool:
    """Whether the document with this identity is for evaluation only: a fixed draw with probability `fraction`."""
    draw = int.from_bytes(hashlib.sha256(identity).digest()[:8], "big")
    return draw < fraction * 2**64
