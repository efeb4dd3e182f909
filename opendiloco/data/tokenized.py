"""A source's tokens, whole or by the shard, and windows over them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from opendiloco.config.data import SourceSection
from opendiloco.data.corpus import Corpus, open_corpus
from opendiloco.data.token_cache import Piece, TokenCache, Tokens
from opendiloco.data.tokenizer import TokenArray, Tokenizer
from opendiloco.errors import DataError

FORMAT = 1
"""Raised when the same text is to become other tokens."""
SHARDS_OPEN = 4
"""A lease lies in few shards, and evaluation in the first. So many stay in memory, or on the disk."""


class Windows:
    """Consecutive windows of sequence_length + 1 tokens; each starts at the last token of the one before."""

    def __init__(self, tokens: TokenArray, sequence_length: int) -> None:
        self._tokens = tokens
        self.length = sequence_length
        self.count = max(0, (len(tokens) - 1) // sequence_length)

    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Token ids, shape (len(numbers), sequence_length + 1)."""
        offsets = numbers[:, None] * self.length + np.arange(self.length + 1)
        return np.asarray(self._tokens[offsets], np.int64)


class TokenizedSource:
    """A source through the run's tokenizer. Raises: DataError when it cannot be read."""

    def __init__(self, section: SourceSection, held_out: float, tokenizer: Tokenizer, cache: TokenCache) -> None:
        self.section = section
        self._corpus: Corpus = open_corpus(section)
        self._held_out = held_out
        self._tokenizer = tokenizer
        self._cache = cache
        self._kind = tokenizer.encode_document(b"").dtype.type

    def tokens(self) -> Tokens:
        """All of it. Raises: DataError, MachineError."""
        return self._cache.tokens(self._key(), self._kind, self._pieces)

    def shard(self, number: int, enough: int) -> Tokens:
        """A shard's first documents, up to so many tokens for training. Raises: DataError, MachineError."""
        prefix = f"{self._key(enough)}-"
        tokens = self._cache.tokens(f"{prefix}{number}", self._kind, lambda: self._pieces(number, enough))
        self._cache.drop_all_but(prefix, SHARDS_OPEN)
        return tokens

    def _key(self, enough: int = 0) -> str:
        section = self.section
        chosen = [section.subset, section.split, section.column, section.shards, enough, self._held_out]
        facts = [FORMAT, self._corpus.fingerprint, *chosen, self._tokenizer.identity]
        return str(blake3(json.dumps(facts).encode()).hexdigest(16))

    def _pieces(self, shard: int | None = None, enough: int | None = None) -> Iterator[Piece]:
        end, trained = np.array([self._tokenizer.end], self._kind), 0
        for document in self._corpus.documents(shard):
            tokens = np.concatenate([self._tokenizer.encode_document(document.text), end])
            held_out = document.is_held_out(self._held_out)
            yield held_out, tokens
            trained += 0 if held_out else len(tokens)
            if enough is not None and trained >= enough:
                return


class ShardedWindows:
    """A source's shards as windows, each tokenized when it is first needed; those needed last are kept open."""

    def __init__(self, source: TokenizedSource, shards: int, windows_per_shard: int, sequence_length: int) -> None:
        self.count = shards
        self.windows_per_shard = windows_per_shard
        self._source = source
        self._length = sequence_length
        self._open: OrderedDict[int, Tokens] = OrderedDict()

    def shard(self, number: int) -> Windows:
        """Raises: DataError when it has not one window; see `TokenizedSource.shard`."""
        windows = Windows(self._tokens(number).training, self._length)
        if windows.count == 0:
            raise DataError(
                f"shard {number} of data.source = {self._source.section.source!r} has not one window of "
                f"{self._length} tokens.",
                "Use fewer shards, each of more files, or a shorter training.sequence_length.",
            )
        return windows

    def held_out(self) -> Windows:
        """The held-out windows of the first shard. Its documents are held out wherever they are."""
        return Windows(self._tokens(0).held_out, self._length)

    def _tokens(self, number: int) -> Tokens:
        if number not in self._open:
            if len(self._open) == SHARDS_OPEN:
                self._open.popitem(last=False)
            self._open[number] = self._source.shard(number, self.windows_per_shard * self._length + 1)
        self._open.move_to_end(number)
        return self._open[number]
