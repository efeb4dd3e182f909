"""Tokenizers: text to token ids and back. In the default tokenizer, id b is byte b, and three special tokens follow.

The byte tokenizer also exists as a `tokenizers` object with the same ids, so that an exported model loads with
`AutoTokenizer` alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from opendiloco.config.data import BYTE_TOKENIZER_SIZE, TokenizerSection
from opendiloco.data.hub import TOKENIZER_FILES, check_tokenizer, pretrained_folder
from opendiloco.errors import DataError, MachineError, first_line

BEGIN, END, PADDING = 256, 257, 258  # ids of ByteTokenizer's special tokens, after those of the 256 bytes
SPECIAL_TOKENS = {"<|begin|>": BEGIN, "<|end|>": END, "<|padding|>": PADDING}

USUAL_ENDS = frozenset({"<|endoftext|>", "<|end_of_text|>", "<|eos|>", "<eos>", "</s>", "[EOS]"})
"""Usual names of the token that ends a document, for tokenizers that do not declare it."""

PROBES = (
    "It's 1234567 words -- don't  split\tthem,\r\n\n  or do.",
    'https://example.org/a_b?c=%20#d (x+=y**2) != "Z";',
    "Straße, naïve = nai\u0308ve, ﬁ, İ",
    "Привет, 你好世界, こんにちは, नमस्ते",
    "👩🏽‍🚀🎉\u00a0\u200b\x00\ufeff end",
    "ACGTTGCA",
)
"""Texts that two tokenizers with one vocabulary may cut differently: numbers, spaces, scripts, Unicode normal forms."""

TokenArray = NDArray[np.uint16] | NDArray[np.uint32]


class ByteTokenizer:
    """A tokenizer whose tokens are the bytes of the text: every text has one encoding, and no text is out of
    vocabulary."""

    size = BYTE_TOKENIZER_SIZE
    end = END
    """The id of the token that ends each document."""
    identity = "bytes"
    """Two tokenizers have the same identity only if they encode every text alike."""
    special: ClassVar[dict[str, int]] = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PADDING}
    """Ids of the special tokens, by their names in a model's config."""

    def encode_document(self, text: bytes) -> TokenArray:
        """Return the token ids of a document's UTF-8 text, without special tokens."""
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def byte_count(self, ids: NDArray[np.int64]) -> int:
        """Return the number of UTF-8 bytes of the text that consecutive token ids stand for, without special tokens."""
        return int((ids < BEGIN).sum())

    def encode_documents(self, texts: Sequence[bytes]) -> list[TokenArray]:
        """Return the token ids of each text, as `encode_document` returns them."""
        return [self.encode_document(text) for text in texts]

    def pretrained(self) -> Any:
        """Return a transformers tokenizer with the same token ids: byte-level BPE without merges."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        # In the `tokenizers` library, each byte has a symbol: a printable Latin-1 byte has its character, and the other
        # bytes have the remaining symbols, in order.
        symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
        others = (symbol for symbol in symbols if ord(symbol) > 255)
        vocabulary = {chr(byte) if chr(byte) in symbols else next(others): byte for byte in range(256)}
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


class _PretrainedTokenizer:
    """A transformers tokenizer with a token that ends each document: the manifest's `tokenizer.end`, or else the
    tokenizer's own end token. Raises: DataError if there is neither."""

    def __init__(self, tokenizer: Any, section: TokenizerSection) -> None:
        self._tokenizer = tokenizer
        model: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        if getattr(model, "dropout", None):
            model.dropout = None  # with BPE dropout, the same text would be encoded differently each time
        self.end = _end_of(tokenizer, section)
        if tokenizer.eos_token_id != self.end:
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(self.end)
        self.size = len(tokenizer)
        self.special = {"eos_token_id": self.end}
        self._encodes_batches = self._batches_agree()

    @property
    def identity(self) -> str:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        rules = backend.to_str() if backend is not None else repr(sorted(self._tokenizer.get_vocab().items()))
        return f"{type(self._tokenizer).__name__} {self.end} {rules}"

    def encode_document(self, text: bytes) -> TokenArray:
        return self._array(self._tokenizer.encode(_text(text), add_special_tokens=False, verbose=False))

    def encode_documents(self, texts: Sequence[bytes]) -> list[TokenArray]:
        if not self._encodes_batches:
            return [self.encode_document(text) for text in texts]
        return self._encode_batch(texts)

    def _encode_batch(self, texts: Sequence[bytes]) -> list[TokenArray]:
        """Return the token ids of each text. The `tokenizers` library encodes the whole batch on several threads."""
        backend = self._tokenizer.backend_tokenizer
        encoded = backend.encode_batch_fast([_text(text) for text in texts], add_special_tokens=False)
        return [self._array(one.ids) for one in encoded]

    def _batches_agree(self) -> bool:
        """Return True if the tokenizer encodes a batch of texts as it encodes each text alone. Some classes of
        transformers treat single texts specially."""
        texts = [text.encode() for text in (*PROBES, *self._tokenizer.all_special_tokens)]
        try:
            one_by_one = [self.encode_document(text).tolist() for text in texts]
            return [ids.tolist() for ids in self._encode_batch(texts)] == one_by_one
        except Exception:  # the `tokenizers` library does not support this tokenizer, or one of the texts
            return False

    def _array(self, ids: Sequence[int]) -> TokenArray:
        return np.asarray(ids, np.uint16) if self.size <= 2**16 else np.asarray(ids, np.uint32)

    def byte_count(self, ids: NDArray[np.int64]) -> int:
        """Return the number of UTF-8 bytes of the text that consecutive token ids stand for. A character that is cut at
        the text's start or end counts as the replacement character."""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return len(self._tokenizer.decode(ids.tolist(), **options).encode())

    def pretrained(self) -> Any:
        return self._tokenizer


Tokenizer: TypeAlias = ByteTokenizer | _PretrainedTokenizer


def _text(document: bytes) -> str:
    return document.decode("utf-8", errors="replace")


def _end_of(tokenizer: Any, section: TokenizerSection) -> int:
    """Return the id of the token that ends a document. Raises: DataError if the manifest and the tokenizer name no such
    token, or more than one."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    if section.end is not None:
        candidates = [section.end] if section.end in tokenizer.get_vocab() else []
    elif tokenizer.eos_token is not None:
        candidates = [tokenizer.eos_token]
    else:
        candidates = [token for token in special if token in USUAL_ENDS]
    if len(candidates) == 1:
        return int(tokenizer.convert_tokens_to_ids(candidates[0]))
    known = f"one of its special tokens: {', '.join(special)}" if special else "a token of its vocabulary"
    if section.end is not None:
        raise DataError(f"tokenizer.end = {section.end!r} is not a token of {section.path!r}.", f"Name {known}.")
    raise DataError(
        f"tokenizer.path = {section.path!r} does not say which token ends a document.", f"Set tokenizer.end to {known}."
    )


def digest_of_tokenizer(tokenizer: Tokenizer) -> str:
    """Return a digest, 64 hexadecimal digits, of a tokenizer's vocabulary, end token and encodings of `PROBES`. Unlike
    `identity`, the digest depends neither on the tokenizer's files nor on library versions."""
    vocabulary = sorted(tokenizer.pretrained().get_vocab().items())
    facts = [vocabulary, tokenizer.end, [_ids_if_any(tokenizer, text) for text in PROBES]]
    return blake3(json.dumps(facts).encode()).hexdigest()


def _ids_if_any(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """Return the token ids of a text; None if the tokenizer has no token for a part of the text."""
    try:
        return list(map(int, tokenizer.encode_document(text.encode())))
    except Exception:  # the `tokenizers` library raises plain Exception
        return None


def build_tokenizer(section: TokenizerSection) -> Tokenizer:
    """Return the tokenizer of a run's manifest. Raises: DataError if the tokenizer cannot be loaded, or has no token
    that ends a document; MachineError if its digest differs from the manifest's."""
    if section.path is None:
        return ByteTokenizer()
    tokenizer = _load(section)
    if section.digest is not None and (found := digest_of_tokenizer(tokenizer)) != section.digest:
        raise MachineError(
            f"the run's tokenizer has the digest {section.digest}; tokenizer.path = {section.path!r} has {found} here.",
            "Get the run's tokenizer from its organiser.",
        )
    return tokenizer


def _load(section: TokenizerSection) -> Tokenizer:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if section.kind == "pretrained":
            folder = pretrained_folder(str(section.path), *TOKENIZER_FILES)
            check_tokenizer(folder)
            made = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            return _PretrainedTokenizer(made, section)
        return _PretrainedTokenizer(PreTrainedTokenizerFast(tokenizer_file=section.path), section)
    except DataError:
        raise
    except Exception as error:  # the `tokenizers` library raises plain Exception
        wanted = (
            "a tokenizer's hub name, or its folder as ./folder or /folder,"
            if section.kind == "pretrained"
            else "a tokenizer.json"
        )
        raise DataError(
            f"tokenizer.path = {section.path!r} cannot be loaded: {first_line(error)}",
            f"Give {wanted} that exists; on a machine without internet, give a local one.",
        ) from error
