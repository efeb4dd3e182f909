from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendiloco.config.data import TokenizerSection
from opendiloco.data.tokenizer import ByteTokenizer, build_tokenizer, byte_symbols
from opendiloco.errors import DataError

PRETRAINED = ByteTokenizer().pretrained()


def test_every_byte_has_a_printable_symbol_of_its_own() -> None:
    symbols = byte_symbols()
    assert len(set(symbols)) == 256
    assert all(symbol.isprintable() and not symbol.isspace() for symbol in symbols)
    assert symbols[ord("A")] == "A"
    assert symbols[ord(" ")] == "Ġ"


@given(st.text())
def test_the_exported_tokenizer_has_the_training_ids_and_loses_nothing(text: str) -> None:
    ids = PRETRAINED(text, add_special_tokens=False)["input_ids"]
    assert ids == ByteTokenizer().encode_document(text.encode()).tolist()
    assert PRETRAINED.decode(ids) == text


def test_a_saved_tokenizer_trains_like_the_bytes_it_is_made_of(tmp_path: Path) -> None:
    PRETRAINED.save_pretrained(tmp_path)
    tokenizer = build_tokenizer(TokenizerSection(kind="pretrained", path=str(tmp_path)))
    assert (tokenizer.size, tokenizer.end) == (ByteTokenizer.size, ByteTokenizer.end)
    assert tokenizer.encode_document("für x:\n\t".encode()).tolist() == list("für x:\n\t".encode())


def test_a_tokenizer_that_is_nowhere(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer.path = .* cannot be loaded"):
        build_tokenizer(TokenizerSection(kind="pretrained", path=str(tmp_path)))


# Files ---------------------------------------------------------------------------------------------------------
def write_tokenizer(path: Path, *special: str) -> TokenizerSection:
    """A tokenizer.json of words, with these special tokens."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "peers": 1, "train": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
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
    with pytest.raises(DataError, match=r"tokenizer.end = '<end>' is no token of"):
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
