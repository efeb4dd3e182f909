from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opendiloco.config.data import MixturePhase, SourceSection
from opendiloco.config.run_config import RunConfig
from opendiloco.data import training_data
from opendiloco.data.corpus import Document
from opendiloco.data.sample_order import HeldOutWindows, Mixture, Windows
from opendiloco.data.token_files import TokenCache
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import TokenizedSource, TrainingData, load_data
from opendiloco.errors import DataError

END = ByteTokenizer.end


def test_documents_end_with_the_end_token_and_held_out_ones_are_never_trained_on(
    small_content: dict[str, Any], tmp_path: Path
) -> None:
    for letter in string.ascii_letters:
        (tmp_path / f"{letter}.txt").write_text(letter * 50, encoding="utf-8")
    section = {"source": str(tmp_path), "held_out": 0.3}
    data = load_data(RunConfig.from_manifest_content(small_content | {"data": section}), ByteTokenizer())
    held_out = set(data.held_out.read(np.arange(data.held_out.count)).ravel())
    trained = set(data.samples.read(np.arange(1000)).ravel())
    assert trained & held_out == {ByteTokenizer.end}
    assert len(trained | held_out) == len(string.ascii_letters) + 1


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("training", {"training": {"inner_steps": 1, "batch_size": 100_000, "sequence_length": 16}}),
        ("held-out", {"held_out": 1e-12}),
    ],
)
def test_too_small_a_corpus(
    small_content: dict[str, Any], part: str, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    if "held_out" in changes:
        changes = {"data": small_content["data"] | changes}
    config = RunConfig.from_manifest_content(small_content | changes)
    with pytest.raises(DataError, match=rf"has \d+ {part} windows of 16 tokens; a batch needs") as caught:
        load_data(config, ByteTokenizer())
    assert caught.value.remedy
    assert "are held out" not in caplog.text, "the error is enough"


@pytest.mark.parametrize(
    ("sizes", "held_out"),
    [
        ([1200], [400]),  # the only document
        ([0, 1200, 0], [400]),
        ([3000, 50, 50, 50], [1000]),  # a long one, of 2,000 bytes or more, beside short ones
        ([3000, 2000], [1000, 667]),
    ],
)
def test_of_a_long_document_and_of_the_only_one_the_end_is_held_out(
    small_content: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: list[int],
    held_out: list[int],
) -> None:
    monkeypatch.setattr(training_data, "LONG", 2000)
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.txt").write_bytes(bytes(n % 127 for n in range(size)))
    section = SourceSection(source=str(tmp_path))
    source = TokenizedSource(section, 1 / 3, ByteTokenizer(), TokenCache(tmp_path / "cache"))
    pieces = [(part, tokens) for part, tokens in source.pieces() if len(tokens) > 51]
    assert [len(tokens) for part, tokens in pieces if part] == held_out
    assert all(tokens[-1] == END for _, tokens in pieces)
    both = zip(pieces[::2], pieces[1::2], strict=True)
    read = [np.concatenate([trained[:-1], apart[:-1]]) for (_, trained), (_, apart) in both]
    assert [tokens.tolist() for tokens in read] == [[n % 127 for n in range(size)] for size in sizes if size > 51]
    assert len([part for part, _ in source.pieces(only_held_out=True) if part]) >= len(held_out)


def test_documents_without_text_or_in_another_encoding_are_counted(
    small_content: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes("Zwölf Boxkämpfer".encode("latin-1") * 100)
    for number in range(99):
        (tmp_path / f"c{number}.txt").write_bytes("Zwölf Boxkämpfer".encode() * 100)
    source = TokenizedSource(SourceSection(source=str(tmp_path)), 0.5, ByteTokenizer(), TokenCache(tmp_path / "cache"))
    assert len(list(source.pieces())) == 100
    assert "skipped 1 of 101 documents, because they are empty" in caplog.text
    assert "1 of 101 documents are not UTF-8, such as b.txt. Convert them" in caplog.text
    for path in tmp_path.glob("*.txt"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="all 101 documents are empty or null"):
        list(source.pieces())


@pytest.mark.parametrize(("text", "remedy"), [(b"\xe4", "iconv -f ISO-8859-1"), (b"\xff\0", "It has NUL bytes")])
def test_text_files_of_which_many_are_not_utf8_are_refused(tmp_path: Path, text: bytes, remedy: str) -> None:
    """Regression: a run was made of random bytes, with a warning only."""
    (tmp_path / "a.txt").write_bytes(text * 1000)
    source = TokenizedSource(SourceSection(source=str(tmp_path)), 0.5, ByteTokenizer(), TokenCache(tmp_path / "cache"))
    with pytest.raises(DataError, match=f"1 of 1 documents are not UTF-8, such as a.txt.*{remedy}"):
        list(source.pieces())


def test_a_held_out_part_that_is_far_from_the_wanted_one_is_told(
    small_content: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training_data.check_share("good", 0.05, 9_000, 1_000)
    assert not caplog.text
    training_data.check_share("texts", 0.05, 8_000, 2_000)
    warning = "'texts': 20.0% of tokens are held out, but data.held_out = 0.05; cut the text into more documents"
    warning += ": 180 of about one size will do"
    assert warning in caplog.text
    for number, size in enumerate([500, 500, 20_000]):
        (tmp_path / f"{number}.txt").write_text("a" * size, encoding="utf-8")
    data = {"source": str(tmp_path), "held_out": 0.3}
    load_data(RunConfig.from_manifest_content(small_content | {"data": data}), ByteTokenizer())
    assert f"{str(tmp_path)!r}: " in caplog.text


# Mixtures ------------------------------------------------------------------------------------------------------
def write_letters(folder: Path, letter: str, files: int, size: int = 200) -> dict[str, Any]:
    """A source whose documents are all of one letter."""
    folder.mkdir()
    for number in range(files):
        (folder / f"{number:03}.txt").write_text(letter * size, encoding="utf-8")
    return {"source": str(folder)}


def load(small_content: dict[str, Any], cache: TokenCache | None = None, **data: Any) -> TrainingData:
    return load_data(RunConfig.from_manifest_content(small_content | {"data": data}), ByteTokenizer(), cache)


def letters(windows: Any) -> str:
    """The letter that most of each window is of."""
    return "".join(chr(np.bincount(window[window != END]).argmax()) for window in windows)


def test_a_mixture_reads_its_sources_in_proportion(small_content: dict[str, Any], tmp_path: Path) -> None:
    sources = [
        write_letters(tmp_path / "a", "a", 60) | {"weight": 0.5},
        write_letters(tmp_path / "b", "b", 20) | {"weight": 0.3},
        write_letters(tmp_path / "c", "c", 30) | {"weight": 0.2},
    ]
    data = load(small_content, sources=sources, held_out=0.2)
    read = letters(data.samples.read(np.arange(2000)))
    for start in (0, 7, 1990):
        part = read[start : start + 10]
        assert [part.count(letter) for letter in "abc"] == [5, 3, 2]
    assert letters(data.samples.read(np.arange(35, 85))) == read[35:85]
    chosen = letters(data.held_out.read(data.held_out.spread(20)))
    assert [chosen.count(letter) for letter in "abc"] == [10, 6, 4]


def test_sources_of_one_size_are_not_shuffled_alike(small_content: dict[str, Any]) -> None:
    data = load(small_content, sources=[{"source": "stdlib"}, {"source": "stdlib"}])
    first, second = data.samples.read(np.arange(0, 40, 2)), data.samples.read(np.arange(1, 40, 2))
    assert not np.array_equal(first, second)


def test_the_short_form_reads_what_a_table_reads(small_content: dict[str, Any]) -> None:
    source = small_content["data"]["source"]
    short = load(small_content, source=source, held_out=0.2)
    long = load(small_content, sources=[{"source": source, "weight": 3}], held_out=0.2)
    assert np.array_equal(short.samples.read(np.arange(300)), long.samples.read(np.arange(300)))


def test_a_source_with_weight_0_is_open_and_read_once_that_is_amended(
    small_content: dict[str, Any], tmp_path: Path
) -> None:
    """Evaluation goes on with the manifest's mixture, so that losses can be compared."""
    sources = [write_letters(tmp_path / "a", "a", 60), write_letters(tmp_path / "b", "b", 20) | {"weight": 0}]
    data, alone = (
        load(small_content, sources=sources, held_out=0.2),
        load(small_content, sources=sources[:1], held_out=0.2),
    )
    numbers = np.arange(60)
    assert np.array_equal(data.samples.read(numbers), alone.samples.read(numbers))
    spread = data.held_out.spread(1000)
    assert np.array_equal(data.held_out.read(spread), alone.held_out.read(alone.held_out.spread(1000)))
    data.samples.mix([MixturePhase(20, (0, 1))])
    assert set(data.samples.read(np.arange(20, 40)).flatten().tolist()) <= {ord("b"), 256, 257, 258}
    assert np.array_equal(data.samples.read(numbers[:20]), alone.samples.read(numbers[:20]))


def test_held_out_windows_are_evenly_spread_and_none_is_read_twice() -> None:
    parts = [Windows(np.arange(start, start + count + 1, dtype=np.uint16), 1) for start, count in ((0, 90), (500, 7))]
    alone, mixed = HeldOutWindows(parts[:1]), HeldOutWindows(parts, Mixture([3, 1]))
    assert alone.spread(9).tolist() == list(range(0, 90, 10))
    assert alone.spread(1000).tolist() == list(range(90))
    read = mixed.read(mixed.spread(8))[:, 0]
    assert read.tolist() == [0, 15, 500, 30, 45, 60, 503, 75]
    for windows in (5, 20, 28, 1000):
        read = mixed.read(mixed.spread(windows))[:, 0]
        assert len(set(read)) == len(read) == min(windows, 28), "7 windows are a quarter of 28"


# Much text -----------------------------------------------------------------------------------------------------
def test_what_is_read_from_the_disk_is_what_is_read_from_memory(small_content: dict[str, Any], tmp_path: Path) -> None:
    data = small_content["data"]
    in_memory = load(small_content, TokenCache(tmp_path / "unused"), **data)
    on_disk = [load(small_content, TokenCache(tmp_path / "used", few=0), **data) for _ in range(2)]
    assert not (tmp_path / "unused").exists()
    assert len([path for path in (tmp_path / "used").iterdir() if path.is_dir()]) == 1
    for other in on_disk:
        assert np.array_equal(in_memory.samples.read(np.arange(500)), other.samples.read(np.arange(500)))
        chosen = in_memory.held_out.spread(50)
        assert np.array_equal(in_memory.held_out.read(chosen), other.held_out.read(chosen))


@pytest.mark.parametrize(
    "change",
    [{"held_out": 0.3}, {"sources": [{"split": "test"}]}, {"sources": [{"column": "body"}]}],
)
def test_tokens_are_kept_apart_by_all_that_determines_them(
    small_content: dict[str, Any], tmp_path: Path, change: dict[str, Any]
) -> None:
    cache, source = TokenCache(tmp_path / "tokens", few=0), write_letters(tmp_path / "a", "a", 60)

    def kept() -> int:
        return len([path for path in (tmp_path / "tokens").iterdir() if path.is_dir()])

    load(small_content, cache, sources=[source], held_out=0.2)
    load(small_content, cache, sources=[source], held_out=0.2)
    assert kept() == 1
    changed = {"held_out": 0.2} | change | {"sources": [source | change.get("sources", [{}])[0]]}
    load(small_content, cache, **changed)
    assert kept() == 2
    (tmp_path / "a" / "000.txt").write_text("another text", encoding="utf-8")
    load(small_content, cache, **changed)
    assert kept() == 3


# Shards --------------------------------------------------------------------------------------------------------
def sharded(folder: Path, few: int = 0) -> tuple[dict[str, Any], TokenCache]:
    """Seven shards of 20 windows each, of 8 files that have more."""
    source = write_letters(folder / "text", "x", 0) | {"shards": 7, "windows_per_shard": 20}
    for number in range(56):
        name = f"{number % 7}-{number // 7}"
        (folder / "text" / f"{number:03}.txt").write_text(f"{name} " * 20, encoding="utf-8")
    return source, TokenCache(folder / "tokens", few)


def test_only_what_is_held_out_is_tokenized_for_evaluation(
    small_content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = list[bytes]()
    encode = ByteTokenizer.encode_document

    def note(tokenizer: ByteTokenizer, text: bytes) -> Any:
        encoded.append(text)
        return encode(tokenizer, text)

    monkeypatch.setattr(ByteTokenizer, "encode_document", note)
    source, cache = sharded(tmp_path)
    data = load(small_content, cache, sources=[source], held_out=0.2)
    shard = [path for path in (tmp_path / "text").iterdir() if int(path.stem) % 7 == 0]
    held_out = [path.read_bytes() for path in shard if Document(b"", path.name.encode()).is_held_out(0.2)]
    assert 0 < len(held_out) < len(shard)
    assert sorted(filter(None, encoded)) == sorted(filter(None, held_out))
    tokens = set(b"".join(held_out)) | {END}
    assert set(data.held_out.read(np.arange(data.held_out.count)).ravel()) <= tokens


def test_several_processes_make_the_held_out_text_of_shards_once(small_content: dict[str, Any], tmp_path: Path) -> None:
    source, _ = sharded(tmp_path)
    for is_shared in (False, True):
        load(small_content, TokenCache(tmp_path / "kept", is_shared=is_shared), sources=[source], held_out=0.2)
        assert (tmp_path / "kept").exists() == is_shared


@pytest.mark.parametrize("few", [0, 10**6])
def test_a_peer_tokenizes_the_shards_that_its_samples_are_in(
    small_content: dict[str, Any], tmp_path: Path, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = sharded(tmp_path, few)
    data = load(small_content, cache, sources=[source], held_out=0.2)
    opened: list[Path] = []
    read_bytes = Path.read_bytes

    def note(path: Path) -> bytes:
        opened.extend([path] if path.suffix == ".txt" else [])
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", note)
    for _ in range(2):
        data.samples.read(np.arange(43, 57))
        assert len({int(path.stem) % 7 for path in opened}) <= 1, "a lease of 14 samples within a shard of 20"
    assert len(opened) <= 8


def test_an_epoch_of_shards_is_trained_from_few_of_them_at_a_time(
    small_content: dict[str, Any], tmp_path: Path
) -> None:
    source, cache = sharded(tmp_path)
    data = load(small_content, cache, sources=[source], held_out=0.2)
    epochs = [np.concatenate([data.samples.read(np.array([n])) for n in range(e, e + 140)]) for e in (0, 140)]
    assert np.unique(epochs[0], axis=0).tolist() == np.unique(epochs[1], axis=0).tolist()
    assert epochs[0].tolist() != epochs[1].tolist()
    kept = [path for path in (tmp_path / "tokens").iterdir() if "-" in path.name]
    assert len(kept) == 4, "of seven"
    again = load(small_content, cache, sources=[source], held_out=0.2)
    assert np.array_equal(again.samples.read(np.arange(140)), epochs[0])


def test_no_document_that_is_held_out_is_trained_on_in_any_shard(small_content: dict[str, Any], tmp_path: Path) -> None:
    source, cache = sharded(tmp_path)
    for number in range(56):
        (tmp_path / "text" / f"{number:03}.txt").write_text(chr(200 + number) * 100, encoding="utf-8")
    data = load(small_content, cache, sources=[source], held_out=0.2)
    held_out = {tuple(window) for window in data.held_out.read(np.arange(data.held_out.count)) if END not in window}
    trained = {tuple(window) for window in data.samples.read(np.arange(140)) if END not in window}
    assert held_out
    assert not held_out & trained


def test_a_shard_without_a_window(small_content: dict[str, Any], tmp_path: Path) -> None:
    source, cache = sharded(tmp_path)
    for number in range(3, 56, 7):
        (tmp_path / "text" / f"{number:03}.txt").write_text("", encoding="utf-8")
    data = load(small_content, cache, sources=[source], held_out=0.2)
    with pytest.raises(DataError, match=r"shard 3 of data.source = .* is shorter than one window of 16 tokens"):
        data.samples.read(np.arange(140))
