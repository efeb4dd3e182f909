from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from opendiloco.cli.run import _with_tokenizer_named
from opendiloco.config.data import TokenizerSection
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import SPECIAL_TOKENS, ByteTokenizer, build_tokenizer, digest_of_tokenizer
from opendiloco.errors import DataError, MachineError
from peers.errors import ManifestError

PRETRAINED = ByteTokenizer().pretrained()


@given(st.text())
def test_the_exported_tokenizer_has_the_training_ids_and_loses_nothing(text: str) -> None:
    assume(not any(token in text for token in SPECIAL_TOKENS))  # which the library takes for the tokens themselves
    ids = PRETRAINED(text, add_special_tokens=False)["input_ids"]
    assert ids == ByteTokenizer().encode_document(text.encode()).tolist()
    assert PRETRAINED.decode(ids) == text


def test_a_saved_tokenizer_trains_like_the_bytes_it_is_made_of(tmp_path: Path) -> None:
    PRETRAINED.save_pretrained(tmp_path)
    tokenizer = build_tokenizer(TokenizerSection(kind="pretrained", path=str(tmp_path)))
    assert (tokenizer.size, tokenizer.end) == (ByteTokenizer.size, ByteTokenizer.end)
    assert tokenizer.encode_document("für x:\n\t".encode()).tolist() == list("für x:\n\t".encode())


def test_tokens_count_as_the_bytes_of_their_text(tmp_path: Path) -> None:
    PRETRAINED.save_pretrained(tmp_path)
    tokenizer, text = build_tokenizer(TokenizerSection(kind="pretrained", path=str(tmp_path))), "für x:\n\t".encode()
    ids = np.array([*tokenizer.encode_document(text), tokenizer.end], np.int64)
    assert tokenizer.byte_count(ids) == ByteTokenizer().byte_count(ids) == len(text)


def test_a_tokenizer_that_is_nowhere(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer.path = .* cannot be loaded"):
        build_tokenizer(TokenizerSection(kind="pretrained", path=str(tmp_path)))


# Files ---------------------------------------------------------------------------------------------------------
def write_tokenizer(path: Path, *special: str, words: str = "peers train", cut: str = "Whitespace") -> TokenizerSection:
    """A tokenizer.json of words, with these special tokens."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words.split()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = getattr(pre_tokenizers, cut)()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(path))
    return TokenizerSection(kind="file", path=str(path))


def test_a_tokenizer_file(tmp_path: Path) -> None:
    section = write_tokenizer(tmp_path / "tokenizer.json", "[PAD]", "</s>")
    tokenizer = build_tokenizer(section)
    tokens = tokenizer.encode_document(b"peers peers train alone")
    assert tokens.tolist() == [1, 1, 2, 0]
    assert tokens.dtype == "uint16"
    assert (tokenizer.size, tokenizer.end) == (5, 4)
    assert tokenizer.special == {"eos_token_id": 4}
    tokenizer.pretrained().save_pretrained(tmp_path / "saved")
    saved = build_tokenizer(TokenizerSection(kind="pretrained", path=str(tmp_path / "saved")))
    assert saved.end == tokenizer.end, "who loads an exported model need not know"


@pytest.mark.parametrize("kind", ["file", "pretrained"])
def test_the_end_of_documents_can_be_named(tmp_path: Path, kind: str) -> None:
    section = write_tokenizer(tmp_path / "tokenizer.json", "</s>", "<stop>")
    if kind == "pretrained":
        build_tokenizer(section).pretrained().save_pretrained(tmp_path / "saved")
        section = TokenizerSection(kind="pretrained", path=str(tmp_path / "saved"))
    tokenizer = build_tokenizer(section.model_copy(update={"end": "<stop>"}))
    assert tokenizer.end == 4
    assert tokenizer.pretrained().eos_token == "<stop>"
    assert tokenizer.identity != build_tokenizer(section).identity
    with pytest.raises(DataError, match=r"tokenizer.end = '<end>' is not a token of"):
        build_tokenizer(section.model_copy(update={"end": "<end>"}))


@pytest.mark.parametrize("special", [(), ("<stop>",), ("</s>", "<eos>")])
def test_a_tokenizer_that_does_not_say_how_documents_end(tmp_path: Path, special: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match="does not say which token ends a document") as caught:
        build_tokenizer(write_tokenizer(tmp_path / "tokenizer.json", *special))
    assert "Set tokenizer.end" in caught.value.remedy
    assert all(token in caught.value.remedy for token in special)


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_file_that_is_no_tokenizer(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"tokenizer.path = .*tokenizer.json' cannot be loaded") as caught:
        build_tokenizer(TokenizerSection(kind="file", path=str(tmp_path / "tokenizer.json")))
    assert "Give a tokenizer.json" in caught.value.remedy


# The organiser's tokenizer ------------------------------------------------------------------------------------------
def test_the_digest_is_the_tokenizers_own_wherever_it_comes_from(tmp_path: Path) -> None:
    section = write_tokenizer(tmp_path / "tokenizer.json", "</s>")
    tokenizer = build_tokenizer(section)
    digest = digest_of_tokenizer(tokenizer)
    tokenizer.pretrained().save_pretrained(tmp_path / "saved")
    saved = build_tokenizer(TokenizerSection(kind="pretrained", path=str(tmp_path / "saved"), digest=digest))
    assert digest_of_tokenizer(saved) == digest


def test_a_vocabulary_without_the_unknown_has_a_digest_too(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    def section_of(order: str) -> TokenizerSection:
        tokenizer = Tokenizer(models.WordLevel({base: number for number, base in enumerate(order)}))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
        tokenizer.save(str(tmp_path / f"{order}.json"))
        return TokenizerSection(kind="file", path=str(tmp_path / f"{order}.json"))

    dna = build_tokenizer(section_of("ACGT"))
    assert dna.encode_document(b"GATTACA").tolist() == [2, 0, 3, 3, 0, 1, 0]
    digest = digest_of_tokenizer(dna)
    build_tokenizer(section_of("ACGT").model_copy(update={"digest": digest}))
    with pytest.raises(MachineError):
        build_tokenizer(section_of("TGCA").model_copy(update={"digest": digest}))


def test_a_text_is_cut_the_same_way_every_time(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, models

    merges = [("a", "b"), ("ab", "ab"), ("abab", "abab")]
    vocabulary = {token: number for number, token in enumerate(["a", "b", "ab", "abab", "abababab"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, dropout=0.5))
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    assert len({tuple(tokenizer.encode("ab" * 40).ids) for _ in range(20)}) > 1, "else this test says nothing"
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = build_tokenizer(TokenizerSection(kind="file", path=str(tmp_path / "tokenizer.json")))
    assert {tuple(loaded.encode_document(b"ab" * 40).tolist()) for _ in range(20)} == {(4,) * 10}


@pytest.mark.parametrize(
    ("special", "words", "cut"),
    [
        (["</s>", "<stop>"], "peers train", "Whitespace"),
        (["</s>"], "train peers", "Whitespace"),
        (["</s>"], "peers train", "WhitespaceSplit"),
    ],
)
def test_another_tokenizer_than_the_runs_is_refused(tmp_path: Path, special: list[str], words: str, cut: str) -> None:
    """With another vocabulary, the same in another order, and other rules for where a token ends."""
    meant = digest_of_tokenizer(build_tokenizer(write_tokenizer(tmp_path / "meant.json", "</s>")))
    section = write_tokenizer(tmp_path / "found.json", *special, words=words, cut=cut)
    with pytest.raises(
        MachineError, match=f"has the digest {meant}; tokenizer.path = .*found.json' has [0-9a-f]{{64}}"
    ):
        build_tokenizer(section.model_copy(update={"digest": meant}))


def test_a_run_is_created_with_the_digest_of_its_tokenizer(
    small_content: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bytes_run = RunConfig.from_manifest_content(small_content)
    assert _with_tokenizer_named(bytes_run) == bytes_run
    section = write_tokenizer(tmp_path / "tokenizer.json", "</s>")
    config = bytes_run.model_copy(update={"tokenizer": section})
    named = _with_tokenizer_named(config)
    assert named.tokenizer.digest == digest_of_tokenizer(build_tokenizer(section))
    assert _with_tokenizer_named(named) == named
    other = section.model_copy(update={"digest": "ab" * 32})
    with pytest.raises(MachineError, match="ab" * 32):
        _with_tokenizer_named(config.model_copy(update={"tokenizer": other}))
    nowhere = config.model_copy(update={"tokenizer": other.model_copy(update={"path": "/nowhere"})})
    assert _with_tokenizer_named(nowhere) == nowhere
    assert "the tokenizer's digest is not checked, because tokenizer.path = '/nowhere' cannot be loaded" in caplog.text
    nameless = config.model_copy(update={"tokenizer": section.model_copy(update={"path": "/nowhere"})})
    assert _with_tokenizer_named(nameless) == nameless
    assert "the tokenizer's digest is not added to the run, because " in caplog.text


@pytest.mark.parametrize(
    ("tokenizer", "problem"),
    [
        ({"kind": "file", "path": "t.json", "digest": "AB"}, "tokenizer.digest = 'AB': not 64 hexadecimal digits"),
        ({"digest": "ab" * 32}, 'path, end and digest need kind = "pretrained" or "file"'),
    ],
)
def test_a_digest_out_of_place(small_content: dict[str, object], tokenizer: dict[str, str], problem: str) -> None:
    with pytest.raises(ManifestError, match=problem):
        RunConfig.from_manifest_content(small_content | {"tokenizer": tokenizer})


# Batches -------------------------------------------------------------------------------------------------------------
TEXTS = [text.encode() for text in ("", "peers train", "peers  alone", "</s>", "a </s> b", "\ufffd", "train " * 500)]


@pytest.mark.parametrize("truncated", [False, True])
def test_a_batch_has_the_ids_that_its_texts_have(tmp_path: Path, truncated: bool) -> None:
    from tokenizers import Tokenizer

    section = write_tokenizer(tmp_path / "tokenizer.json", "</s>")
    if truncated:
        rules = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        rules.enable_truncation(4)
        rules.enable_padding(length=8)
        rules.save(str(tmp_path / "tokenizer.json"))
    for tokenizer in (build_tokenizer(section), ByteTokenizer()):
        batch = tokenizer.encode_documents([*TEXTS, b"peers \xff"])
        assert [ids.tolist() for ids in batch] == [
            tokenizer.encode_document(text).tolist() for text in [*TEXTS, b"peers \xff"]
        ]
        assert {ids.dtype for ids in batch} == {tokenizer.encode_document(b"").dtype}


def test_a_tokenizer_whose_class_does_more_than_its_library_encodes_texts_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedTokenizerFast

    section = write_tokenizer(tmp_path / "tokenizer.json", "</s>")
    encode = PreTrainedTokenizerFast.encode
    monkeypatch.setattr(PreTrainedTokenizerFast, "encode", lambda self, text, **keys: [1, *encode(self, text, **keys)])
    tokenizer = build_tokenizer(section)
    assert [ids.tolist() for ids in tokenizer.encode_documents([b"train", b"peers"])] == [[1, 2], [1, 1]]
