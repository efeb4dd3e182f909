from __future__ import annotations

import codecs
import gzip
import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from opendiloco.config.data import SourceSection
from opendiloco.data import corpus
from opendiloco.data.corpus import Document, open_corpus
from opendiloco.errors import DataError

ROWS = ["one", "zwölf", "drei\nZeilen"]


def texts(section: SourceSection, shard: int | None = None) -> list[str]:
    return [document.text.decode() for document in open_corpus(section).documents(shard)]


def source(folder: Path, **keys: Any) -> SourceSection:
    return SourceSection(source=str(folder), **keys)


pytestmark = pytest.mark.usefixtures("own_dataset_cache")


def write_rows(folder: Path, kind: str, rows: list[str], name: str = "train", rows_in_group: int | None = None) -> None:
    import pyarrow as pa
    from pyarrow import csv, feather, parquet

    folder.mkdir(exist_ok=True)
    path, table = folder / f"{name}.{kind}", pa.table({"body": rows, "number": list(range(len(rows)))})
    match kind:
        case "parquet":
            parquet.write_table(table, path, rows_in_group)
        case "csv":
            csv.write_csv(table, path)
        case "arrow":
            feather.write_feather(table, path, compression="uncompressed")
        case "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()), encoding="utf-8")
        case "json":
            path.write_text(json.dumps(table.to_pylist()), encoding="utf-8")


def test_the_default_corpus_is_the_standard_librarys_source() -> None:
    documents = list(open_corpus(SourceSection(source="stdlib")).documents())
    assert (Path(sysconfig.get_path("stdlib")) / "asyncio" / "base_events.py").read_bytes() in {
        document.text for document in documents
    }
    assert sum(len(document.text) for document in documents) > 5_000_000
    held_out = sum(len(document.text) for document in documents if document.is_held_out(0.05))
    assert 0.01 < held_out / sum(len(document.text) for document in documents) < 0.12
    assert documents == list(open_corpus(SourceSection(source="stdlib")).documents())


def test_a_folder_of_text_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.md").write_bytes(b"second \xff")
    (tmp_path / "a.txt").write_bytes(b"first")
    (tmp_path / "README.md").write_bytes(b"zeroth")
    (tmp_path / "picture.png").write_bytes(b"not text")
    documents = list(open_corpus(source(tmp_path)).documents())
    assert [document.text for document in documents] == [b"zeroth", b"first", b"second \xff"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json", "csv", "arrow"])
def test_a_folder_of_dataset_files_is_read_through_datasets(tmp_path: Path, kind: str, streaming: bool) -> None:
    write_rows(tmp_path / "rows", kind, ROWS)
    (tmp_path / "rows" / "README.md").write_text("# Rows\n", encoding="utf-8")  # data sets have one
    assert texts(source(tmp_path / "rows", column="body", streaming=streaming)) == ROWS
    with pytest.raises(DataError, match=r"data.column = 'text' is not in .* Choose one of: body, number"):
        texts(source(tmp_path / "rows", streaming=streaming))
    with pytest.raises(DataError, match=r"data.column = 'number' of .* has int, not text"):
        texts(source(tmp_path / "rows", column="number", streaming=streaming))


def test_splits(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows", "jsonl", ROWS)
    write_rows(tmp_path / "rows", "jsonl", ["other"], "test")
    assert texts(source(tmp_path / "rows", column="body", split="test")) == ["other"]
    assert texts(source(tmp_path / "rows", column="body", split="train[1:]")) == ROWS[1:]
    with pytest.raises(DataError, match=r"data.split = 'tset' is not in .* Choose one of: test, train"):
        texts(source(tmp_path / "rows", column="body", split="tset"))


def test_a_missing_text_is_an_empty_document(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": null}\n', encoding="utf-8")
    assert texts(source(tmp_path)) == ["a", ""]


@pytest.mark.parametrize(
    ("kind", "shards", "ninth"),
    [
        ("txt", 3, None),
        ("parquet", 3, None),
        ("parquet", 17, (3, 4, 5)),  # the second of three parts of a file of three row groups
        ("parquet", 30, (1, 6)),  # the second of five
        ("jsonl", 17, (1, 4, 7)),
    ],
)
def test_shards_are_disjoint_and_together_all_there_is(
    tmp_path: Path, kind: str, shards: int, ninth: tuple[int, ...] | None
) -> None:
    """Shards are whole files; or, where they are more than the seven files, parts of one: row groups, or rows."""
    for number in range(7):
        if kind == "txt":
            (tmp_path / f"{number}.txt").write_text(str(number), encoding="utf-8")
        else:
            write_rows(tmp_path, kind, [f"{number} {row}" for row in range(9)], f"train-{number}", rows_in_group=3)
    section = source(tmp_path, column="body", shards=shards, windows_per_shard=10)
    read = [texts(section, shard) for shard in range(shards)]
    assert all(read)
    assert sorted(text for shard in read for text in shard) == sorted(texts(source(tmp_path, column="body")))
    assert ninth is None or read[8] == [f"1 {row}" for row in ninth]


def test_of_a_parquet_file_only_the_row_groups_of_a_shard_are_read(tmp_path: Path) -> None:
    from pyarrow import parquet

    write_rows(tmp_path, "parquet", [f"{row:02}" * 1000 for row in range(30)], rows_in_group=3)
    about = parquet.ParquetFile(tmp_path / "train.parquet").metadata
    damaged = bytearray((tmp_path / "train.parquet").read_bytes())
    for group in range(10):
        if group % 5 != 2:
            damaged[(start := about.row_group(group).column(0).data_page_offset) : start + 20] = bytes(20)
    (tmp_path / "train.parquet").write_bytes(damaged)
    section = source(tmp_path, column="body", shards=5, windows_per_shard=10)
    assert [text[:2] for text in texts(section, 2)] == ["06", "07", "08", "21", "22", "23"]
    with pytest.raises(DataError, match=r"column 'body': .*train.parquet cannot be read: .*Invalid data"):
        texts(section, 1)


def test_more_shards_than_texts(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"{number}.txt").write_text(str(number), encoding="utf-8")
    with pytest.raises(DataError, match=r"data.shards = 8 of .*, which has 7 files") as caught:
        texts(source(tmp_path, shards=8, windows_per_shard=10), 0)
    assert "use 7 shards or fewer" in caught.value.remedy


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_fingerprint_changes_with_a_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"train.{kind}"
    path.write_text('{"text": "a"}\n', encoding="utf-8")
    before = open_corpus(source(tmp_path)).fingerprint
    assert open_corpus(source(tmp_path)).fingerprint == before
    path.write_text('{"text": "longer"}\n', encoding="utf-8")
    assert open_corpus(source(tmp_path)).fingerprint != before


def test_a_source_that_is_nowhere_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"data.source = .*empty.* cannot be loaded") as caught:
        texts(source(tmp_path / "empty"))
    assert caught.value.exit_code == 7
    assert "stdlib" in caught.value.remedy


def test_held_out_is_a_fixed_draw_with_the_given_probability() -> None:
    documents = [Document(b"", f"document {number}".encode()) for number in range(4000)]
    chosen = {document for document in documents if document.is_held_out(0.05)}
    assert 140 < len(chosen) < 260
    assert chosen <= {document for document in documents if document.is_held_out(0.1)}


def test_a_file_or_a_pattern_is_a_source(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain", encoding="utf-8")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"two\nlines"))
    for kind in ("jsonl", "parquet", "csv"):
        write_rows(tmp_path / kind, kind, ROWS)
        assert texts(source(tmp_path / kind / f"train.{kind}", column="body")) == ROWS
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "row"}\n'))
    assert texts(source(tmp_path / "a.txt")) == ["plain"]
    assert texts(source(tmp_path / "*.txt*")) == ["plain", "two\nlines"]
    assert texts(source(tmp_path / "c.jsonl*")) == ["row"]
    with pytest.raises(DataError, match=r"has files of the formats csv, json\.") as caught:
        texts(source(tmp_path / "**" / "train.[cj]s*"))
    assert ".jsonl" in caught.value.remedy
    with pytest.raises(DataError, match=r"is not on this machine"):
        texts(source(tmp_path / "*.rst"))
    with pytest.raises(DataError, match=rf"has a tilde. Write it out: {Path.home()}/nowhere/texts"):
        texts(SourceSection(source="~/nowhere/texts"))


LINES = '{"text": "one"}\n{"text": "two", "meta": 1}\n{"meta": {"a": "b"}, "text": "three"}\n'


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("files", "read"),
    [
        ({"a.jsonl": '{"text": "one"}\n', "b.jsonl": '{"text": "two", "meta": 1}\n'}, ["one", "two"]),
        ({"a.jsonl": LINES}, ["one", "two", "three"]),
        ({"a.jsonl": f"\ufeff{LINES}"}, ["one", "two", "three"]),
        ({"a.jsonl": '{"meta": 1}\n{"text": "one"}\n{"text": null}\n'}, ["", "one", ""]),
        ({"a.jsonl": '{"text": "one"}\n{"text": "tw\nno\n{"text": "\\ud800"}\n'}, ["one", "?"]),
        ({"a.jsonl": "", "b.jsonl": '{"text": "two"}'}, ["two"]),
        ({"a.csv": "text,n\none,1\n", "b.csv": "m,text\n2,two\n"}, ["one", "two"]),
    ],
)
def test_only_the_named_column_is_read(tmp_path: Path, files: dict[str, str], read: list[str], streaming: bool) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert texts(source(tmp_path, streaming=streaming)) == read


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_files_that_differ_in_other_columns(tmp_path: Path, streaming: bool) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"text": ["one"]}), tmp_path / "a.parquet")
    parquet.write_table(pa.table({"n": [1.5], "text": ["two"]}), tmp_path / "b.parquet")
    parquet.write_table(pa.table({"n": [1.5]}), tmp_path / "c.parquet")
    assert texts(source(tmp_path, streaming=streaming)) == ["one", "two", ""]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", "", r"has no JSON objects among its 0 rows.* such as {[^}]*}\.$"),
        ("a.jsonl", '{"tags": ["a"], "none": []}\n', r"Choose one of: tags, none\.$"),
        ("a.jsonl", '{"rows": [{"text": "a"}]}\n{"rows": 1}\n', r"Choose one of: rows\. If KEY lists the rows"),
        ("a.jsonl", "no\n", "has no JSON objects among its 1 rows"),
        ("a.jsonl", '{"body": "a", "n": 1}\n', r"data.column = 'text' is not in .* Choose one of: body, n\.$"),
        (
            "a.json",
            '{"train": [{"text": "a"}]}',
            r"Choose one of: train\. If KEY lists the rows: `jq",
        ),
        (
            "a.json",
            '{\n"train": [\n{"text":\n"a"}]}',
            r"among its 4 rows.* If KEY lists the rows: `jq",
        ),
        (
            "a.jsonl",
            '{"text": "a"}\n{"text": [1]}\n',
            r"column 'text': .*a\.jsonl cannot be read: row 2 has list, but row 1 has str",
        ),
        ("a.csv", "text,n\none,1\ntwo,1,2\n", r"a\.csv cannot be read: .*Expected 2 fields in line 3, saw 3"),
        ("a.csv", "", r"a\.csv cannot be read: No columns"),
        ("a.csv", "n;text\n1;one\n", r"Choose one of: n;text\. The first line of a CSV file must name"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_file_and_cause(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=said):
        texts(source(tmp_path))


def test_a_folder_without_text_is_told_in_our_words(tmp_path: Path) -> None:
    for _ in ("empty", "with a file of another kind"):
        with pytest.raises(DataError, match=r"cannot be loaded: it has no files of text, such as \.txt, "):
            open_corpus(source(tmp_path))
        (tmp_path / "a.bin").write_bytes(b"a")


def test_the_first_row_that_is_no_json_object_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": "b\n{"text": "c"}\n3\n', encoding="utf-8")
    assert texts(source(tmp_path)) == ["a", "c"]
    assert f"skipped rows that are not JSON objects in {tmp_path / 'a.jsonl'}: row 3 first, 2 of 4 rows" in caplog.text


@pytest.mark.parametrize(("lines", "is_refused"), [(2, True), (200, False)])
def test_rows_that_are_not_utf8_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lines: int, is_refused: bool
) -> None:
    """Regression: they counted as rows that are not JSON objects."""
    rows = [b'{"text": "zwei"}'] * lines
    rows[1] = '{"text": "zwölf"}'.encode("latin-1")
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(rows))
    said = f"not UTF-8: line 2 first, 1 of {lines} lines"
    if is_refused:
        with pytest.raises(DataError, match=f"{said}.*iconv"):
            texts(source(tmp_path))
    else:
        assert texts(source(tmp_path)) == ["zwei"] * (lines - 1)
        assert said in caplog.text
    assert "not JSON objects" not in caplog.text


def test_binary_data_is_not_called_text_of_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\xff\xfa\x00\x93\n')
    with pytest.raises(DataError, match=r"line 2 first, 1 of 2 lines.* It has NUL bytes, so it is not text"):
        texts(source(tmp_path))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_byte_order_mark_names_the_encoding_and_is_no_text(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes("zwölf".encode(encoding))
    (tmp_path / "b.txt").write_bytes(codecs.BOM_UTF16_LE + b"odd")
    read = [document.text for document in open_corpus(source(tmp_path)).documents()]
    assert read == ["zwölf".encode(), codecs.BOM_UTF16_LE + b"odd"]


def test_hidden_files_are_no_text_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / ".texts"
    for name in ("a.txt", ".b.txt", ".git/c.txt", "d/.e/f.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")
    assert texts(source(folder)) == ["a.txt"]


def test_keys_that_text_files_do_not_have_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    assert texts(source(tmp_path)) == ["text"]
    assert not caplog.text
    texts(source(tmp_path, split="test"))
    assert "has text files, so data.split = 'test' and data.column = 'text' are ignored" in caplog.text


def test_another_column_is_not_that_of_an_earlier_reading(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "body": "two"}\n', encoding="utf-8")
    assert [texts(source(tmp_path, column=column)) for column in ("text", "body")] == [["one"], ["two"]]


def test_a_text_file_that_is_too_long_for_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "LONGEST", 100)
    (tmp_path / "a.txt").write_text("a" * 101, encoding="utf-8")
    with pytest.raises(DataError, match=r"a.txt has 101 bytes; 100 is the most for one document. .* split"):
        texts(source(tmp_path))
