"""Text to token ids and back. The default is bytes: id b is byte b, then three special tokens.

The byte tokenizer also exists as a real `tokenizers` object with the same ids, so that an exported model loads with
`AutoTokenizer` and needs nothing of ours.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from opendiloco.config import BYTE_TOKENIZER_SIZE, TokenizerSection
from opendiloco.errors import DataError, first_line

BEGIN, END, PADDING = 256, 257, 258
SPECIAL_TOKENS = {"<|begin|>": BEGIN, "<|end|>": END, "<|padding|>": PADDING}

TokenArray = NDArray[np.uint16] | NDArray[np.uint32]


class Tokenizer(Protocol):
    """What training needs from a tokenizer."""

    @property
    def size(self) -> int:
        """Number of token ids."""

    @property
    def end(self) -> int:
        """The id that closes each document."""

    @property
    def special(self) -> dict[str, int]:
        """Special ids under the names that a model's config has for them."""

    def encode_document(self, text: bytes) -> TokenArray:
        """Token ids of one document, without special tokens."""

    def pretrained(self) -> Any:
        """The same tokenizer as transformers knows it, for export and generation."""


class ByteTokenizer:
    """Every byte is a token, so every text has one encoding and nothing is out of vocabulary."""

    size = BYTE_TOKENIZER_SIZE
    end = END
    special: ClassVar[dict[str, int]] = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PADDING}

    def encode_document(self, text: bytes) -> TokenArray:
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def pretrained(self) -> Any:
        """A `PreTrainedTokenizerFast`: byte-level BPE without merges. Round-trips any valid UTF-8."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary | SPECIAL_TOKENS, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
        begin, end, padding = SPECIAL_TOKENS
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token=begin,
            eos_token=end,
            pad_token=padding,
            clean_up_tokenization_spaces=False,
        )


def byte_symbols() -> list[str]:
    """The printable character that byte-level tokenizers write for each of the 256 bytes, in byte order.

    Printable Latin-1 characters stand for themselves; the other bytes take the code points from 256 on, in order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    replacements = iter(range(256, 512))
    return [chr(byte if byte in printable else next(replacements)) for byte in range(256)]


class PretrainedTokenizer:
    """A transformers tokenizer from a folder or the hub. Raises: DataError when it cannot be loaded or has no end."""

    def __init__(self, path: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise DataError(
                f"tokenizer.path = {path!r} cannot be loaded: {first_line(error)}",
                "Give a tokenizer's folder or hub name; on a machine without internet, a folder.",
            ) from error
        if self._tokenizer.eos_token_id is None:
            raise DataError(f"tokenizer.path = {path!r} has no end-of-text token.", "Choose a tokenizer with one.")
        self.size = len(self._tokenizer)
        self.end = int(self._tokenizer.eos_token_id)
        self.special = {"eos_token_id": self.end}

    def encode_document(self, text: bytes) -> TokenArray:
        ids = self._tokenizer.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
        return np.asarray(ids, np.uint32)

    def pretrained(self) -> Any:
        return self._tokenizer


def build_tokenizer(section: TokenizerSection) -> Tokenizer:
    """The run's tokenizer. Raises: DataError."""
    return ByteTokenizer() if section.path is None else PretrainedTokenizer(section.path)
