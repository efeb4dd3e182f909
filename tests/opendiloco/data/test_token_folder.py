"""Tokens that were made beforehand: read as they are, the same samples as the text's, and nothing that is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from opendiloco.cli import main
from opendiloco.cli.run import _with_tokens_named
from opendiloco.config.run_config import RunConfig
from opendiloco.data.token_files import (
    Piece,
    TokenCache,
    Tokens,
    digest_of_tokens,
    open_token_folder,
    read_about,
    write_token_folder,
)
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import TrainingData, _read_tokens, load_data
from opendiloco.errors import DataError
from tests.opendiloco.conftest import write_corpus

ROOT = Path(__file__).parents[3]
TOKENIZER = ByteTokenizer()
SPLIT = 0.2


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    return TokenCache(tmp_path / "cache")


def pieces() -> Iterator[Piece]:
    for number in range(40):
        yield number % 4 == 0, np.array([number + 60] * 30 + [TOKENIZER.end], np.uint16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_token_folder(tmp_path / "tokens", pieces(), TOKENIZER, SPLIT)
    return tmp_path / "tokens"


def load(content: dict[str, Any], cache: TokenCache, **data: Any) -> TrainingData:
    return load_data(RunConfig.from_manifest_content(content | {"data": data}), TOKENIZER, cache)


def write_run(path: Path, source: Path) -> Path:
    """The example as a run.toml that reads a folder."""
    text = (ROOT / "examples" / "tiny.toml").read_text(encoding="utf-8")
    path.write_text(re.sub(r'source = ".*"', f'source = "{source}"\nheld_out = {SPLIT}', text), encoding="utf-8")
    return path


def tokenize(*arguments: object) -> str:
    """What the command prints."""
    done = CliRunner().invoke(main, ["tokenize", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


# Made and read -------------------------------------------------------------------------------------------------------
def test_samples_are_those_of_the_text_that_was_tokenized(
    small_content: dict[str, Any], tmp_path: Path, cache: TokenCache
) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    said = tokenize(write_run(tmp_path / "run.toml", corpus), "--out", tmp_path / "tokens")
    text = load(small_content, cache, source=str(corpus), held_out=SPLIT)
    made = load(small_content, cache, source=str(tmp_path / "tokens"), held_out=SPLIT)
    assert np.array_equal(text.samples.read(np.arange(600)), made.samples.read(np.arange(600)))
    assert text.held_out.digest(50) == made.held_out.digest(50)
    digest = read_about(tmp_path / "tokens").digest
    assert f"data.digest: {digest}" in said
    load(small_content, cache, source=str(corpus), held_out=SPLIT, digest=digest)


def test_they_are_mapped_and_nothing_is_copied(folder: Path, cache: TokenCache, tmp_path: Path) -> None:
    tokens = open_token_folder(str(folder), TOKENIZER, SPLIT, cache)
    assert isinstance(tokens.training, np.memmap)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert digest_of_tokens(Tokens(tokens.training, tokens.held_out)) == read_about(folder).digest
    assert digest_of_tokens(tokens) == read_about(folder).digest


def test_ids_that_were_made_elsewhere_become_a_folder(tmp_path: Path, cache: TokenCache) -> None:
    run = write_run(tmp_path / "run.toml", tmp_path)
    np.arange(250, dtype="<u4").tofile(tmp_path / "train.bin")
    np.arange(9, dtype="<u4").tofile(tmp_path / "validation.bin")
    files = "--tokens", tmp_path / "train.bin", "--held-out", tmp_path / "validation.bin"
    tokenize(run, "--out", tmp_path / "tokens", *files, "--dtype", "uint32")
    tokens = open_token_folder(str(tmp_path / "tokens"), TOKENIZER, 0.5, cache)
    assert tokens.training.tolist() == list(range(250))
    assert tokens.held_out.tolist() == list(range(9))
    np.array([5, 259], "<u4").tofile(tmp_path / "train.bin")
    done = CliRunner().invoke(
        main, ["tokenize", str(run), "--out", str(tmp_path / "no"), *map(str, files), "--dtype", "uint32"]
    )
    assert done.exit_code == DataError.exit_code
    assert "token 1 is 259; the tokenizer has ids below 259" in done.output
    assert not (tmp_path / "no").exists()
    (tmp_path / "train.bin").write_bytes(b"odd")
    done = CliRunner().invoke(main, ["tokenize", str(run), "--out", str(tmp_path / "no"), *map(str, files)])
    assert "has 3 bytes, which is not a multiple of an id's 2 bytes" in done.output


def test_a_folder_is_checked_once_on_a_machine(
    folder: Path, cache: TokenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    check = "opendiloco.data.token_files._check_values"
    monkeypatch.setattr(check, lambda folder, about: read.append(folder))
    for _ in range(2):
        open_token_folder(str(folder), TOKENIZER, SPLIT, cache)
    assert read == [folder]
    (folder / "training").touch()
    open_token_folder(str(folder), TOKENIZER, SPLIT, cache)
    assert read == [folder, folder], "its file may be another now"


# What is wrong with one ----------------------------------------------------------------------------------------------
def change(folder: Path, **changes: Any) -> None:
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    (folder / "about.json").write_text(json.dumps(about | changes), encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "theirs"}, "format is 'theirs'"),
        ({"dtype": "<f4"}, "dtype is '<f4'"),
        ({"dtype": "<u4"}, r"dtype = '<u4'; the run's tokenizer needs '<u2'"),
        ({"vocabulary": 300}, r"vocabulary = 300; the run's tokenizer needs 259"),
        ({"end": 3}, "end = 3; the run's tokenizer needs 257"),
        ({"tokenizer": "0" * 64}, "tokenizer = '0000"),
        ({"split": 0.5}, r"split = 0.5; the run's data.held_out needs 0.2"),
        ({"training": {"tokens": 7, "digest": "0" * 64}}, r"training has 1860 bytes; about.json says 14"),
        (
            {"training": {"tokens": 930, "digest": "0" * 64}},
            r"digest [0-9a-f]{64}; about.json says training.digest = 000",
        ),
        ({"training": {"tokens": -1, "digest": "0" * 64}}, "training.tokens is '-1'"),
        ({"more": 1}, "more is '1'"),
    ],
)
def test_what_is_not_what_it_says_is_refused(
    folder: Path, cache: TokenCache, changes: dict[str, Any], said: str
) -> None:
    change(folder, **changes)
    with pytest.raises(DataError, match=said) as caught:
        open_token_folder(str(folder), TOKENIZER, SPLIT, cache)
    assert "tokenize" in caught.value.remedy


def test_files_that_are_damaged_are_refused(folder: Path, cache: TokenCache) -> None:
    good = (folder / "held_out").read_bytes()
    for content, said in (
        (good[:-2], "has 618 bytes; about.json says 620"),
        (good[:-2] + b"\xff\xff", "token 309 is 65535; the tokenizer has ids below 259"),
        (good[:-2] + b"\0\0", "held_out.digest = "),
    ):
        (folder / "held_out").write_bytes(content)
        with pytest.raises(DataError, match=said):
            open_token_folder(str(folder), TOKENIZER, SPLIT, cache)
    (folder / "held_out").unlink()
    with pytest.raises(DataError, match="held_out cannot be read"):
        open_token_folder(str(folder), TOKENIZER, SPLIT, cache)


def test_it_has_no_shards(small_content: dict[str, Any], folder: Path, cache: TokenCache) -> None:
    source = {"source": str(folder), "shards": 2, "windows_per_shard": 5}
    with pytest.raises(DataError, match=r"data.shards = 2 of .*, a folder of tokens"):
        load(small_content, cache, sources=[source], held_out=SPLIT)


# The organiser's tokens ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("is_short", [True, False])
def test_the_organisers_digest_is_in_the_manifest_and_other_tokens_are_refused(
    small_content: dict[str, Any], folder: Path, tmp_path: Path, cache: TokenCache, is_short: bool
) -> None:
    source = {"source": str(folder)}
    data = {"held_out": SPLIT} | (source if is_short else {"sources": [source]})
    config = RunConfig.from_manifest_content(small_content | {"data": data})
    [named] = _with_tokens_named(config).data.all_sources
    assert named.digest == read_about(folder).digest
    _read_tokens(named, SPLIT, TOKENIZER, cache)
    write_token_folder(tmp_path / "other", list(pieces())[:-1], TOKENIZER, SPLIT)
    other = named.model_copy(update={"source": str(tmp_path / "other")})
    with pytest.raises(DataError, match=rf"data.digest is {named.digest}; the tokens of .*other"):
        _read_tokens(other, SPLIT, TOKENIZER, cache)
    wrong = config.model_copy(update={"data": config.data.with_sources((other,))})
    with pytest.raises(DataError, match=rf"data.digest = {named.digest}"):
        _with_tokens_named(wrong)


# Data sets of token ids ----------------------------------------------------------------------------------------------
DOCUMENTS = [[number + 60] * 30 for number in range(40)]


@pytest.fixture
def saved(tmp_path: Path, own_dataset_cache: None) -> Path:
    import datasets

    rows = datasets.Dataset.from_dict({"input_ids": DOCUMENTS, "number": list(range(40))})
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows, "test": rows.select(range(2))}).save_to_disk(str(tmp_path / "several"))
    return tmp_path


@pytest.mark.parametrize("name", ["one", "several"])
def test_a_folder_that_datasets_has_saved_is_read(
    small_content: dict[str, Any], saved: Path, name: str, cache: TokenCache
) -> None:
    source = {"source": str(saved / name), "column": "input_ids"}
    data = load(small_content, cache, sources=[source], held_out=SPLIT)
    ids = set(data.samples.read(np.arange(200)).ravel().tolist())
    held_out = set(data.held_out.read(np.arange(data.held_out.count)).ravel().tolist())
    assert ids | held_out == {*range(60, 100), TOKENIZER.end}
    assert ids & held_out == {TOKENIZER.end}
    with pytest.raises(DataError, match=r"data.column = 'number' of .* has int, not text"):
        load(small_content, cache, sources=[source | {"column": "number"}], held_out=SPLIT)
    sharded = source | {"shards": 4, "windows_per_shard": 8}
    assert load(small_content, cache, sources=[sharded], held_out=0.4).samples.read(np.arange(32)).shape == (32, 17)
    with pytest.raises(DataError, match=r"data.shards = 41 of .*, which has 40 rows"):
        load(small_content, cache, sources=[sharded | {"shards": 41}], held_out=0.4)


def test_documents_that_are_closed_already_are_not_closed_twice(
    small_content: dict[str, Any], tmp_path: Path, cache: TokenCache, own_dataset_cache: None
) -> None:
    import datasets

    closed = [[*document, TOKENIZER.end] for document in DOCUMENTS]
    for name, rows in (("open", DOCUMENTS), ("closed", closed)):
        datasets.Dataset.from_dict({"ids": rows}).save_to_disk(str(tmp_path / name))
    section = RunConfig.from_manifest_content(small_content).data.all_sources[0]
    tokens = [
        _read_tokens(
            section.model_copy(update={"source": str(tmp_path / name), "column": "ids"}), 1e-9, TOKENIZER, cache
        )
        for name in ("open", "closed")
    ]
    assert np.array_equal(tokens[0].training, tokens[1].training)


@pytest.mark.parametrize("wrong", [-1, 259])
def test_ids_that_the_tokenizer_does_not_have(
    small_content: dict[str, Any], tmp_path: Path, cache: TokenCache, wrong: int, own_dataset_cache: None
) -> None:
    import datasets

    datasets.Dataset.from_dict({"ids": [*DOCUMENTS, [5, wrong]]}).save_to_disk(str(tmp_path / "rows"))
    with pytest.raises(DataError, match=rf"data.column = 'ids' of .* has the token id {wrong}; .* ids below 259"):
        load(small_content, cache, sources=[{"source": str(tmp_path / "rows"), "column": "ids"}], held_out=SPLIT)


def test_a_saved_folder_that_names_files_elsewhere(
    saved: Path, small_content: dict[str, Any], cache: TokenCache
) -> None:
    state = json.loads((saved / "one" / "state.json").read_text(encoding="utf-8"))
    state["_data_files"] = [{"filename": "../../secret.arrow"}]
    (saved / "one" / "state.json").write_text(json.dumps(state), encoding="utf-8")
    with pytest.raises(DataError, match=r"would read .*secret.arrow, which is outside of the data set"):
        load(small_content, cache, sources=[{"source": str(saved / "one"), "column": "input_ids"}], held_out=SPLIT)
