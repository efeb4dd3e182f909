"""Data sets of strangers: nothing is opened or fetched but their own files, and only text and tokens are read."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from opendiloco.config.data import SourceSection
from opendiloco.data import corpus
from opendiloco.data.corpus import open_corpus
from opendiloco.errors import DataError

pytestmark = pytest.mark.usefixtures("own_dataset_cache")

IMAGE = {"_type": "Image"}
TEXT = {"dtype": "string", "_type": "Value"}
ROWS = ["one", "two", "three"]


class Web:
    """A server that notes each request."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.requests = list[str]()


@pytest.fixture
def web() -> Iterator[Web]:
    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            noted.requests.append(self.rfile.readline().decode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        noted = Web(server.server_port)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield noted
        server.shutdown()
        thread.join()


opened = list[str]()


def note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and str(arguments[0]).endswith("private.png"):
        opened.append(str(arguments[0]))


@pytest.fixture(scope="module", autouse=True)
def _noting() -> None:
    sys.addaudithook(note)  # there is no way to remove one


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A file of the volunteer's, which must not be opened."""
    path = tmp_path / "private.png"
    path.write_bytes(b"not for strangers")
    opened.clear()
    return path


def write_parquet(path: Path, columns: dict[str, tuple[dict[str, Any], list[Any]]]) -> None:
    """Write columns with the types that the file's metadata give them."""
    import datasets
    import pyarrow as pa
    from pyarrow import parquet

    path.parent.mkdir(exist_ok=True)
    schema = datasets.Features.from_dict({name: feature for name, (feature, _) in columns.items()}).arrow_schema
    parquet.write_table(pa.table({name: rows for name, (_, rows) in columns.items()}, schema), path)


def at(place: str) -> dict[str, str | None]:
    """Return an image as a row has it."""
    return {"bytes": None, "path": place}


def texts(folder: Path, **keys: Any) -> list[str]:
    return [document.text.decode() for document in open_corpus(SourceSection(source=str(folder), **keys)).documents()]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "feature",
    [
        IMAGE,
        {"_type": "Image", "decode": False},
        {"_type": "Audio"},
        {"_type": "Video"},
        {"_type": "Pdf"},
        {"_type": "Nifti"},
        {"_type": "List", "feature": IMAGE},
    ],
    ids=str,
)
def test_a_text_column_that_the_file_calls_an_image(
    tmp_path: Path, web: Web, private: Path, feature: dict[str, Any], streaming: bool
) -> None:
    for name, place in (("url", f"{web.url}/a.png"), ("path", str(private))):
        row = [at(place)] if feature["_type"] == "List" else at(place)
        write_parquet(tmp_path / name / "train.parquet", {"text": (feature, [row])})
        with pytest.raises(DataError, match=r"data.column = 'text' of .* has the type .*, not text") as caught:
            texts(tmp_path / name, streaming=streaming)
        assert "column of text" in caught.value.remedy
    assert (web.requests, opened) == ([], [])


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_beside_the_text_are_not_decoded(tmp_path: Path, web: Web, private: Path, streaming: bool) -> None:
    columns: dict[str, tuple[dict[str, Any], list[Any]]] = {
        "text": (TEXT, ROWS),
        "web": (IMAGE, [at(f"{web.url}/a.png")] * 3),
        "here": (IMAGE, [at(str(private))] * 3),
    }
    write_parquet(tmp_path / "rows" / "train.parquet", columns)
    assert texts(tmp_path / "rows", streaming=streaming) == ROWS
    with pytest.raises(DataError, match=r"data.column = 'body' is not in"):
        texts(tmp_path / "rows", streaming=streaming, column="body")
    assert (web.requests, opened) == ([], [])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("field", ["dataset_info", "configs"])
def test_a_card_that_calls_the_text_an_image(
    tmp_path: Path, web: Web, private: Path, field: str, streaming: bool
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = [{"text": f"{web.url}/a.png"}, {"text": str(private)}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    types = "features:\n  - name: text\n    dtype: image\n"
    card = {
        "dataset_info": f"dataset_info:\n  {types}",
        "configs": f"configs:\n- config_name: default\n  data_files: train.jsonl\n  {types}",
    }
    (folder / "README.md").write_text(f"---\n{card[field]}---\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"has the type Image\(.*, not text"):
        texts(folder, streaming=streaming)
    assert (web.requests, opened) == ([], [])


def test_a_saved_folder_with_images(tmp_path: Path, web: Web, private: Path) -> None:
    import datasets
    import pyarrow as pa

    folder = tmp_path / "rows"
    folder.mkdir()
    types = datasets.Features(text=datasets.Value("string"), web=datasets.Image(), here=datasets.Image())
    rows = {"text": ROWS, "web": [at(f"{web.url}/a.png")] * 3, "here": [at(str(private))] * 3}
    with pa.ipc.new_stream(folder / "data.arrow", types.arrow_schema) as stream:
        stream.write_table(pa.table(rows, types.arrow_schema))
    state: dict[str, Any] = {"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "a", "_split": None}
    state |= {"_format_type": "torch", "_format_columns": None, "_format_kwargs": {}, "_output_all_columns": True}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    (folder / "dataset_info.json").write_text(json.dumps({"features": types.to_dict()}), encoding="utf-8")
    assert texts(folder) == ROWS
    with pytest.raises(DataError, match=r"data.column = 'web' of .* has the type Image\(.*, not text"):
        texts(folder, column="web")
    assert (web.requests, opened) == ([], [])


@pytest.mark.parametrize("split", ["..", "../../other", "/etc", "a/b", ".hidden", "train[1:]/x", "a\\b"])
def test_a_split_is_no_path(split: str) -> None:
    with pytest.raises(ValueError, match="not a split such as"):
        SourceSection(source="some/texts", split=split)


@pytest.mark.parametrize("split", ["train", "en-de", "train[:10%]", "train[-5:]+test", "train[:50%](closest) + v.2"])
def test_splits_that_are_some(split: str) -> None:
    assert SourceSection(source="some/texts", split=split).split == split


@pytest.mark.parametrize("revision", ["../../x", "/etc", "a/../b", "..", "a\\b"])
def test_a_revision_is_no_path(revision: str) -> None:
    with pytest.raises(ValueError, match="not a branch, a tag or a commit"):
        SourceSection(source="some/texts", revision=revision)
    assert SourceSection(source="some/texts", revision="refs/convert/parquet").revision


@pytest.mark.parametrize("card", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "entry",
    [
        "data_files: {web}/train.jsonl",
        "data_files:\n  - split: train\n    path: [train.jsonl, '{web}/*.jsonl']",
        "data_files: zip://train.jsonl::{web}/a.zip",
        "data_files: {private}",
        "data_files: ../*.png",
        "data_files: ~/*.jsonl",
        "data_dir: {web}",
        "data_dir: /etc",
        "data_files: train.jsonl\n  version: ../../../../elsewhere",
    ],
)
def test_a_card_names_nothing_elsewhere(tmp_path: Path, web: Web, private: Path, card: str, entry: str) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    configs = "configs:\n- config_name: default\n  " + entry.format(web=web.url, private=private) + "\n"
    (folder / card).write_text(f"---\n{configs}---\n" if card == "README.md" else configs, encoding="utf-8")
    with pytest.raises(DataError, match=r"is outside of the data set|names another folder"):
        open_corpus(SourceSection(source=str(folder)))
    assert (web.requests, opened) == ([], [])


@pytest.mark.parametrize("name", ["picture.png", "train.tar", "notes.h5", "a.xml"])
def test_formats_of_other_things_than_text(tmp_path: Path, name: str) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / name).write_bytes(b"")
    with pytest.raises(DataError, match="has files of the format") as caught:
        open_corpus(SourceSection(source=str(tmp_path / "rows")))
    assert "parquet" in caught.value.remedy


@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    monkeypatch.setattr(corpus, "LONGEST", 100)
    for name, row in (("text", "a" * 101), ("tokens", [1] * 101)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(json.dumps({"text": row}) + "\n", encoding="utf-8")
        with pytest.raises(DataError, match=r"data.column = 'text' of .* has a row of 101 .*; 100 is the most"):
            texts(tmp_path / name, streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_small_file_of_gigabytes_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    """All rows refer to one text, so a file's size says nothing of what it takes to read it."""
    import pyarrow as pa
    from pyarrow import parquet

    monkeypatch.setattr(corpus, "PIECE_BYTES", 1 << 26)
    text, rows = "a" * (1 << 20), 4096  # 4 GB
    table = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * rows), pa.array([text]))})
    (tmp_path / "rows").mkdir()
    parquet.write_table(table, tmp_path / "rows" / "train.parquet", store_schema=False)
    before = pa.total_allocated_bytes(), pa.default_memory_pool().max_memory()
    with pytest.raises(DataError, match=r"the rows of .*train.parquet take more than 1?\d\d,"):
        texts(tmp_path / "rows", streaming=streaming)
    assert pa.default_memory_pool().max_memory() - before[1] < 1 << 28


def test_a_file_may_have_many_times_its_size_in_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What text repeats itself is no attack."""
    monkeypatch.setattr(corpus, "PIECE_BYTES", 1 << 10)
    rows = [f"{number} {'again and ' * 400}" for number in range(1000)]
    write_parquet(tmp_path / "rows" / "train.parquet", {"text": (TEXT, rows)})
    assert (tmp_path / "rows" / "train.parquet").stat().st_size * 10 < sum(map(len, rows))
    assert texts(tmp_path / "rows", streaming=False) == rows


PIECES = {"train.json.gz": b'{"text": "%s"}', "train.txt.gz": b"%s", "train.jsonl.gz": b'["%s"]'}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", PIECES)
def test_a_small_file_of_one_long_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, streaming: bool
) -> None:
    """Regression: a compressed megabyte took many gigabytes, before anything looked at the rows."""
    monkeypatch.setattr(corpus, "PIECE_BYTES", 1 << 24)
    monkeypatch.setattr(corpus, "LONGEST_LINE", 1 << 20)
    (tmp_path / "rows").mkdir()
    for count, is_read in ((1 << 18, True), (1 << 26, False)):
        (tmp_path / "rows" / name).write_bytes(gzip.compress(PIECES[name] % (b"a" * count), 1))
        if is_read:
            assert texts(tmp_path / "rows", streaming=streaming) == ["a" * count]
            continue
        with pytest.raises(DataError, match=r"a file has more than 1\d?,\d{3},\d{3} bytes in one piece") as caught:
            texts(tmp_path / "rows", streaming=streaming)
        assert caught.value.exit_code == 7


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_many_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    monkeypatch.setattr(corpus, "TABLE_BYTES", 1000)
    rows = [f"{number} {'a' * number}" for number in range(333)]
    for part in (0, 1):
        write_parquet(tmp_path / "rows" / f"train-{part}.parquet", {"text": (TEXT, rows[part::2])})
    assert texts(tmp_path / "rows", streaming=streaming) == rows[0::2] + rows[1::2]
