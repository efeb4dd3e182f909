from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from opendiloco.config import DataSection
from opendiloco.corpus import is_held_out, is_local, read_documents, volunteered
from opendiloco.errors import DataError


def test_the_default_corpus_is_the_standard_librarys_source() -> None:
    documents = list(read_documents(DataSection()))
    texts = {document.text for document in documents}
    assert (Path(sysconfig.get_path("stdlib")) / "asyncio" / "base_events.py").read_bytes() in texts
    assert sum(len(document.text) for document in documents) > 5_000_000
    held_out = sum(len(document.text) for document in documents if document.held_out)
    assert 0.01 < held_out / sum(len(document.text) for document in documents) < 0.12
    assert [document.text for document in read_documents(DataSection())] == [document.text for document in documents]


def test_a_folder_of_text_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.md").write_bytes(b"second \xff")
    (tmp_path / "a.txt").write_bytes(b"first")
    (tmp_path / "picture.png").write_bytes(b"not text")
    documents = list(read_documents(DataSection(source=str(tmp_path))))
    assert [document.text for document in documents] == [b"first", b"second \xff"]


@pytest.fixture
def _own_dataset_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("_own_dataset_cache")
def test_a_folder_of_dataset_files_is_read_through_datasets(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"body": "one"}\n{"body": "zwölf"}\n', encoding="utf-8")
    documents = list(read_documents(DataSection(source=str(folder), column="body")))
    assert [document.text for document in documents] == [b"one", "zwölf".encode()]
    with pytest.raises(DataError, match=r"data.column = 'text' is not in .* Choose one of: body"):
        list(read_documents(DataSection(source=str(folder))))


@pytest.mark.usefixtures("_own_dataset_cache")
def test_a_source_that_is_nowhere_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"data.source = .*empty.* cannot be loaded") as caught:
        list(read_documents(DataSection(source=str(tmp_path / "empty"))))
    assert caught.value.exit_code == 7
    assert "stdlib" in caught.value.remedy


@pytest.mark.parametrize(
    ("source", "local"),
    [
        ("stdlib", False),
        ("wikitext", False),
        ("allenai/c4", False),
        ("/home/volunteer/letters", True),
        ("~/letters", True),
        ("../letters", True),
        (".ssh", True),
        ("home/volunteer/letters", True),
        ("file:///home", True),
        ("letters", True),  # there is such a folder
    ],
)
def test_what_could_be_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, local: bool
) -> None:
    (tmp_path / "letters").mkdir()
    monkeypatch.chdir(tmp_path)
    assert is_local(source) is local


def test_a_volunteer_names_what_may_be_read(tmp_path: Path) -> None:
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "a.txt").write_bytes(b"for all")
    (tmp_path / "secret.txt").write_bytes(b"for nobody")
    theirs = DataSection(source=str(tmp_path), held_out=0.2)
    with pytest.raises(DataError, match="what you have not named is not read") as caught:
        volunteered(theirs, None)
    assert caught.value.exit_code == 7
    assert "--data FOLDER" in caught.value.remedy
    section = volunteered(theirs, tmp_path / "public")
    assert section.held_out == 0.2
    assert [document.text for document in read_documents(section)] == [b"for all"]
    assert volunteered(DataSection(), None) == DataSection()


def test_held_out_is_a_fixed_draw_with_the_given_probability() -> None:
    names = [f"document {number}".encode() for number in range(4000)]
    chosen = {name for name in names if is_held_out(name, 0.05)}
    assert 140 < len(chosen) < 260
    assert chosen <= {name for name in names if is_held_out(name, 0.1)}
