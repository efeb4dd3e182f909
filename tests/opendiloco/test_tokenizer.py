from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendiloco.data_config import TokenizerSection
from opendiloco.errors import DataError
from opendiloco.tokenizer import ByteTokenizer, build_tokenizer, byte_symbols

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
