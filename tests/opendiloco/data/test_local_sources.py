"""A manifest's author chooses none of a volunteer's files."""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_IMODE
from typing import Any

import pytest

from opendiloco.config.data import DataSection, SourceSection
from opendiloco.data.corpus import open_corpus
from opendiloco.data.own_files import check_files, is_local, local_sources, volunteered, with_paths_marked
from opendiloco.errors import DataError

pytestmark = pytest.mark.usefixtures("own_dataset_cache")


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
        ("linked", True),  # and such a link, to nothing
        ("json", True),  # all JSON files of the current folder
        ("json/texts", False),
        ("Notes.MD", True),
        ("data.txt", True),  # no data set without an owner has such a name
        ("rows.jsonl", True),
        ("people/data.json", False),
    ],
)
def test_what_could_be_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, local: bool
) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "linked").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    assert is_local(source) is local


def test_a_volunteer_names_what_may_be_read(tmp_path: Path) -> None:
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "a.txt").write_bytes(b"for all")
    (tmp_path / "secret.txt").write_bytes(b"for nobody")
    theirs = DataSection(source=str(tmp_path), held_out=0.2)
    with pytest.raises(DataError, match="what you have not named is not read") as caught:
        volunteered(theirs)
    assert caught.value.exit_code == 7
    assert "--data FOLDER" in caught.value.remedy
    section = volunteered(theirs, [tmp_path / "public"])
    assert section.held_out == 0.2
    assert [document.text for document in open_corpus(section.all_sources[0]).documents()] == [b"for all"]
    assert volunteered(DataSection()) == DataSection()
    assert volunteered(DataSection(), [tmp_path]).all_sources[0].source == str(tmp_path), "if there is only one"


def mixture(*sources: str) -> DataSection:
    tables: list[Any] = [{"source": source, "weight": 1 + place} for place, source in enumerate(sources)]
    return DataSection.model_validate({"sources": tables})


def test_every_local_source_of_a_mixture_is_replaced_by_a_folder_that_was_named(tmp_path: Path) -> None:
    theirs = mixture("/etc", "allenai/c4", "/root", "stdlib")
    assert local_sources(theirs) == ["/etc", "/root"]
    for name in ("a", "b"):
        with pytest.raises(DataError, match=f"{name}' is not on this machine"):  # before torch is imported to read it
            volunteered(theirs, [tmp_path / "a", tmp_path / "b"])
        (tmp_path / name).mkdir()
    ours = volunteered(theirs, [tmp_path / "a", tmp_path / "b"])
    assert [one.source for one in ours.all_sources] == [
        str(tmp_path / "a"),
        "allenai/c4",
        str(tmp_path / "b"),
        "stdlib",
    ]
    assert ours.shares == theirs.shares == (1, 2, 3, 4)
    for folders in ([], [tmp_path], [tmp_path] * 3):
        with pytest.raises(DataError, match=r"2 local sources, '/etc', '/root', and \d folders are given") as caught:
            volunteered(theirs, folders)
        assert "in this order" in caught.value.remedy


def test_a_path_that_looks_like_a_hub_name_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: in a folder without that file the name meant a data set on the hub."""
    (tmp_path / "text.txt").touch()
    monkeypatch.chdir(tmp_path)
    marked = with_paths_marked(mixture("stdlib", "allenai/c4", "text.txt", "/etc"))
    assert [one.source for one in marked.all_sources] == ["stdlib", "allenai/c4", "./text.txt", "/etc"]
    assert marked.weights == (1, 2, 3, 4)
    assert with_paths_marked(DataSection(source="text.txt")).source == "./text.txt"
    assert with_paths_marked(DataSection()) == DataSection()


def test_a_mixture_without_local_sources_takes_no_folder(tmp_path: Path) -> None:
    assert volunteered(mixture("stdlib", "allenai/c4")) == mixture("stdlib", "allenai/c4")
    with pytest.raises(DataError, match="none of the run's sources is local"):
        volunteered(mixture("stdlib", "allenai/c4"), [tmp_path])


def test_the_copy_of_an_own_text_is_private(tmp_path: Path) -> None:
    cache = Path(os.environ["XDG_CACHE_HOME"])
    (tmp_path / "own.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n', encoding="utf-8")
    corpus = open_corpus(SourceSection(source=str(tmp_path)))
    for _ in range(2):
        documents, others = iter(corpus.documents()), iter(corpus.documents())
        assert [next(documents).text, next(others).text] == [b"a", b"a"]
        [copy] = cache.rglob("*.arrow")
        private = cache / "diloco-peer"
        assert copy.is_relative_to(private / "text")
        assert S_IMODE(private.stat().st_mode) == S_IMODE((private / "text").stat().st_mode) == 0o700
        del others
        assert copy.exists(), "the first one still reads it"
        assert [one.text for one in documents] == [b"b"]
        assert not list((private / "text").iterdir())
    assert [path.name for path in cache.iterdir()] == ["diloco-peer"]


HUB = "hf://datasets/some/texts@0123abc/"


@pytest.mark.parametrize(
    "file",
    ["/home/volunteer/.ssh/id", "file:///etc/passwd", "http://10.0.0.1/", "s3://bucket/a", f"{HUB}a.zip::/etc/passwd"],
)
def test_a_data_set_on_the_hub_is_made_of_files_on_the_hub(file: str) -> None:
    check_files("some/texts", [f"{HUB}train.parquet"])
    with pytest.raises(DataError, match="outside of the data set"):
        check_files("some/texts", [f"{HUB}train.parquet", file])


def test_the_formats_of_datasets_are_no_names_of_data_sets() -> None:
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    assert all(map(is_local, _PACKAGED_DATASETS_MODULES))


def test_a_folder_that_is_named_like_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "train.jsonl").write_text('{"text": "inside"}\n', encoding="utf-8")
    (tmp_path / "private.jsonl").write_text('{"text": "outside"}\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    read = open_corpus(SourceSection(source="json")).documents()
    assert [document.text for document in read] == [b"inside"]


@pytest.mark.parametrize("name", ["text", "json", "parquet"])
def test_a_format_is_no_data_set(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` takes such a name for all files in the working directory."""
    (tmp_path / "secret.txt").write_text("for nobody", encoding="utf-8")
    (tmp_path / "secret.json").write_text('{"text": "for nobody"}', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="is not on this machine"):
        open_corpus(SourceSection(source=name))


@pytest.mark.parametrize("elsewhere", ["{secret}", "../secret.jsonl"])
def test_a_folders_readme_names_no_files_elsewhere(elsewhere: str, tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret.jsonl", tmp_path / "folder"
    secret.write_text('{"text": "for nobody"}\n', encoding="utf-8")
    folder.mkdir()
    files = elsewhere.format(secret=secret)
    readme = f"---\nconfigs:\n- config_name: default\n  data_files: {files}\n---\n"
    (folder / "README.md").write_text(readme, encoding="utf-8")
    with pytest.raises(DataError, match=r"would read .*secret\.jsonl, which is outside of the data set"):
        open_corpus(SourceSection(source=str(folder)))
