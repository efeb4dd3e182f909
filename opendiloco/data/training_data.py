"""A worker's training data: the tokens of each source, read whole or shard by shard, in the run's sample order."""

from __future__ import annotations

import json
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from opendiloco.config.data import SourceSection
from opendiloco.config.run_config import RunConfig
from opendiloco.data.corpus import MOST_NOT_UTF8, NOT_TEXT, Document, open_corpus, tokenizing
from opendiloco.data.sample_order import HeldOutWindows, Mixture, SampleOrder, Shuffled, Windows
from opendiloco.data.token_files import (
    Piece,
    TokenCache,
    Tokens,
    digest_of_tokens,
    dtype_of_tokens,
    is_token_folder,
    open_token_folder,
)
from opendiloco.data.tokenizer import TokenArray, Tokenizer
from opendiloco.errors import DataError
from opendiloco.stages import StageProgress
from peers.values.wire import printable

logger = logging.getLogger(__name__)

TOKENIZING = 2
"""Version of the tokenization. Increase it when the same text gives different tokens."""
BATCH_BYTES, BATCH_DOCUMENTS = 1 << 22, 1 << 10
"""Limits for one batch of text to tokenize."""
LONG = 1_000_000
"""Least bytes of a long document. Its end is held out; of shorter documents, some are held out as a whole."""
SHARDS_OPEN = 4
"""Shards of a source that stay in memory, or on disk. A lease lies in few shards; evaluation reads the first shard."""


class TokenizedSource:
    """A reader of a source's documents as token ids of the run's tokenizer. Raises: DataError if the source cannot be
    read."""

    def __init__(self, section: SourceSection, held_out: float, tokenizer: Tokenizer, cache: TokenCache) -> None:
        self.section = section
        self._corpus = open_corpus(section)
        self._held_out = held_out
        self._tokenizer = tokenizer
        self._cache = cache
        self._dtype = dtype_of_tokens(tokenizer)

    def tokens(self) -> Tokens:
        """Return the tokens of all documents of the source. Raises: DataError, MachineError."""
        return self._cache.tokens(self._key(), self._dtype, self.pieces)

    def shard(self, number: int, enough: int) -> Tokens:
        """Return the tokens of a shard's first documents, as many documents as are needed for `enough` training tokens.
        Raises: DataError, MachineError."""
        prefix = f"{self._key(enough)}-"
        progress = StageProgress(tokenizing(self.section, number)) if self._corpus.is_stream else None
        tokens = self._cache.tokens(
            f"{prefix}{number}", self._dtype, lambda: _until(self.pieces(number), enough, False, progress)
        )
        self._cache.drop_all_but(prefix, SHARDS_OPEN)
        return tokens

    def held_out(self, enough: int) -> Tokens:
        """Return the tokens of the first shard's first held-out documents, as many as are needed for `enough` tokens.

        If several processes need them, they are kept on disk however few they are, because finding them means reading
        many more documents. Raises: DataError, MachineError.
        """
        return self._cache.tokens(
            self._key(-enough),
            self._dtype,
            lambda: _until(self.pieces(0, only_held_out=True), enough, held_out=True),
            is_costly=True,
        )

    def pieces(self, shard: int | None = None, only_held_out: bool = False) -> Iterator[Piece]:
        """Yield the token ids of all documents in the source, or in one shard, as pairs (is_held_out, token ids). With
        `only_held_out`, skip documents without a held-out part. Raises: DataError."""
        documents = self._full_documents(shard)
        first = list(islice(documents, 2))
        is_only = len(first) == 1
        for batch in _batches(chain(first, documents)):
            is_cut = [is_only or one.size >= LONG for one in batch]
            chosen = [
                (one, cut)
                for one, cut in zip(batch, is_cut, strict=True)
                if not only_held_out or cut or one.is_held_out(self._held_out)
            ]
            for (document, cut), tokens in zip(chosen, self._encode([one for one, _ in chosen]), strict=True):
                if cut:
                    place = len(tokens) - round(self._held_out * len(tokens))
                    yield False, np.concatenate([tokens[:place], tokens[-1:]])
                    yield True, tokens[place:]
                else:
                    yield document.is_held_out(self._held_out), tokens

    def _full_documents(self, shard: int | None) -> Iterator[Document]:
        """Yield the documents of the source, or of one shard, that are not empty, and log how many are empty or not
        UTF-8. Raises: DataError if of a whole source all documents are empty, or more than MOST_NOT_UTF8 not UTF-8."""
        total = empty = foreign = 0
        example: Document | None = None
        for document in self._corpus.documents(shard):
            total += 1
            if document.size == 0:
                empty += 1
                continue
            if not _is_utf8(document.text):
                foreign += 1
                example = example or document
            yield document
        name = repr(self.section.source)
        if shard is None and total and empty == total:
            raise DataError(
                f"data.source = {name}: all {total:,} documents are empty or null.",
                "Give documents with text; for rows, set data.column to the column of text.",
            )
        if empty:
            logger.info(
                "data.source = %s: skipped %s of %s documents, because they are empty", name, f"{empty:,}", f"{total:,}"
            )
        if example is not None:
            such = printable(example.identity[:60].decode(errors="replace"))
            found = f"data.source = {name}: {foreign:,} of {total:,} documents are not UTF-8, such as {such}"
            remedy = NOT_TEXT if b"\0" in example.text else "Convert them (from Latin-1: iconv -f ISO-8859-1 -t UTF-8)."
            if shard is None and foreign > MOST_NOT_UTF8 * total:
                raise DataError(f"{found}.", remedy)
            logger.warning("%s. %s", found, remedy)

    def _key(self, enough: int = 0) -> str:
        section = self.section
        chosen = [section.subset, section.split, section.column, section.shards, enough, self._held_out]
        facts = [TOKENIZING, self._corpus.fingerprint, *chosen, self._tokenizer.identity]
        return str(blake3(json.dumps(facts).encode()).hexdigest(16))

    def _encode(self, documents: Sequence[Document]) -> Iterator[TokenArray]:
        """Yield the token ids of each document, followed by the id of the token that ends a document."""
        end = np.array([self._tokenizer.end], self._dtype)
        texts = [document.text for document in documents if document.tokens is None]
        encoded = iter(self._tokenizer.encode_documents(texts) if texts else [])
        for document in documents:
            if document.tokens is None:
                yield np.concatenate([next(encoded), end])
            else:
                tokens = self._checked(document.tokens)
                is_closed = tokens.size > 0 and tokens[-1] == self._tokenizer.end
                yield tokens if is_closed else np.concatenate([tokens, end])

    def _checked(self, tokens: NDArray[np.int64]) -> TokenArray:
        """Check and return the token ids of a document that the source stores as ids. Raises: DataError if an id is not
        in the run's vocabulary."""
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self._tokenizer.size:
            wrong = int(tokens.min() if tokens.min() < 0 else tokens.max())
            raise DataError(
                f"data.column = {self.section.column!r} of {self.section.source!r} has the token id {wrong}; the run's "
                f"tokenizer has ids below {self._tokenizer.size}.",
                "Use the tokenizer that made these ids, or a column of text.",
            )
        checked: TokenArray = tokens.astype(self._dtype)
        return checked


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield the documents in lists of about `BATCH_BYTES` of text and at most `BATCH_DOCUMENTS` documents."""
    batch, size = list[Document](), 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_BYTES or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _until(
    pieces: Iterable[Piece], enough: int, held_out: bool, progress: StageProgress | None = None
) -> Iterator[Piece]:
    """Yield pieces until the held-out ones (if `held_out`), or else the training ones, have `enough` tokens. Report the
    share of `enough` that is reached to `progress`."""
    counted = 0
    for piece in pieces:
        yield piece
        counted += len(piece[1]) if piece[0] == held_out else 0
        if progress is not None:
            progress.so_far(counted / enough)
        if counted >= enough:
            return


class _ShardedWindows:
    """The windows of a source with shards. A shard is tokenized when it is first needed, or in advance, and the
    `SHARDS_OPEN` most recently used shards stay open.

    `tokenize_ahead` is called with the number of a shard that is needed soon, and must return at once.
    """

    def __init__(
        self,
        source: TokenizedSource,
        windows_per_shard: int,
        sequence_length: int,
        tokenize_ahead: Callable[[int], None] | None = None,
    ) -> None:
        self.windows_per_shard = windows_per_shard
        self._source = source
        self._length = sequence_length
        self._open: OrderedDict[int, Tokens] = OrderedDict()
        self._tokenize_ahead = tokenize_ahead

    def shard(self, number: int) -> Windows:
        """Return the training windows of shard `number`. Raises: DataError if the shard has no window; exceptions of
        `TokenizedSource.shard`."""
        if number not in self._open:
            if len(self._open) == SHARDS_OPEN:
                self._open.popitem(last=False)
            self._open[number] = self._source.shard(number, self.windows_per_shard * self._length + 1)
        self._open.move_to_end(number)
        windows = Windows(self._open[number].training, self._length)
        if windows.count == 0:
            raise DataError(
                f"shard {number} of data.source = {self._source.section.source!r} is shorter than one window of "
                f"{self._length} tokens.",
                "Use fewer shards, so that each has more text, or a shorter training.sequence_length.",
            )
        return windows

    def soon(self, number: int) -> None:
        """Request that shard `number` is tokenized in advance, because it is needed soon, unless the shard is open."""
        if self._tokenize_ahead is not None and number not in self._open:
            self._tokenize_ahead(number)

    def held_out(self, windows: int) -> Windows:
        """Return the first held-out windows of the first shard, `windows` of them or a few more. The held-out documents
        of the other shards are not read."""
        return Windows(self._source.held_out(windows * self._length + 1).held_out, self._length)


@dataclass(frozen=True)
class TrainingData:
    """A run's training samples in their order, and its held-out windows for evaluation."""

    samples: SampleOrder
    held_out: HeldOutWindows

    @classmethod
    def blank(cls, length: int) -> TrainingData:
        """Return training data for a worker that reads no text: no training samples, and one held-out window of
        `length` + 1 zeros."""
        return cls(SampleOrder([], Mixture()), HeldOutWindows([Windows(np.zeros(length + 1, np.uint16), length)]))


TokenizeAhead = Callable[[int, int], None]
"""Called with the index of a source and the number of a shard that is needed soon; must return at once."""


def load_data(
    config: RunConfig,
    tokenizer: Tokenizer,
    cache: TokenCache | None = None,
    tokenize_ahead: TokenizeAhead | None = None,
) -> TrainingData:
    """Return a run's training data: the tokens of its sources, from the cache or newly made. Of a source with shards,
    only the held-out text is read now; a shard is tokenized when it is needed, or in advance.

    Raises: DataError if a source cannot be read, or has fewer windows than one batch; MachineError.
    """
    data, mixture, length = config.data, Mixture(config.data.shares), config.training.sequence_length
    end = tokenizer.end if config.training.document_mask else None
    cache = cache or TokenCache()
    orders, held_out = list[Shuffled](), list[Windows]()
    for place, section in enumerate(data.all_sources):
        seed = data.shuffle_seed + place
        if section.shards is None:
            tokens = _read_tokens(section, data.held_out, tokenizer, cache)
            training, evaluation = Windows(tokens.training, length), Windows(tokens.held_out, length)
            _check_count(section, config, "training", training)
            _check_count(section, config, "held-out", evaluation)
            if not is_token_folder(section.source):
                check_share(section.source, data.held_out, tokens.training.size, tokens.held_out.size)
            orders.append(Shuffled.whole(training, seed))
        else:
            ahead = None if tokenize_ahead is None else partial(tokenize_ahead, place)
            shards = shards_of(section, config, tokenizer, cache, ahead)
            evaluation = shards.held_out(max(config.evaluation.windows, config.training.batch_size))
            _check_count(section, config, "held-out", evaluation)
            orders.append(Shuffled(shards.shard, section.shards, shards.windows_per_shard, seed, shards.soon))
        held_out.append(evaluation)
    return TrainingData(SampleOrder(orders, mixture, end), HeldOutWindows(held_out, mixture, end))


def _read_tokens(section: SourceSection, held_out: float, tokenizer: Tokenizer, cache: TokenCache) -> Tokens:
    """Return all tokens of a source without shards. Raises: DataError if the manifest names another digest of them."""
    if is_token_folder(section.source):
        tokens = open_token_folder(section.source, tokenizer, held_out, cache)
    else:
        tokens = TokenizedSource(section, held_out, tokenizer, cache).tokens()
    if section.digest is not None and (found := digest_of_tokens(tokens)) != section.digest:
        raise DataError(
            f"the run's data.digest is {section.digest}; the tokens of {section.source!r} have {found}.",
            "Get the run's text or tokens from its organiser.",
        )
    return tokens


def shards_of(
    section: SourceSection,
    config: RunConfig,
    tokenizer: Tokenizer,
    cache: TokenCache,
    tokenize_ahead: Callable[[int], None] | None = None,
) -> _ShardedWindows:
    """Return the windows of a source with shards. Raises: DataError if the source is a token folder, which has no
    shards."""
    assert section.windows_per_shard is not None
    if is_token_folder(section.source):
        raise DataError(
            f"data.shards = {section.shards} of {section.source!r}, a folder of tokens, which is mapped whole.",
            "Remove shards and windows_per_shard.",
        )
    source = TokenizedSource(section, config.data.held_out, tokenizer, cache)
    length = config.training.sequence_length
    return _ShardedWindows(source, section.windows_per_shard, length, tokenize_ahead)


def _check_count(section: SourceSection, config: RunConfig, part: str, windows: Windows) -> None:
    where = "" if section.shards is None else ", in its first shard"
    if windows.count >= config.training.batch_size:
        return
    fraction = config.data.held_out
    remedy = (
        f"Each document is held out with probability data.held_out = {fraction}; of a long one the end is held out. "
        f"Give more documents (files or rows){where}, a larger data.held_out, or"
        if part == "held-out"
        else f"Give more text{where}, a smaller data.held_out than {fraction}, or"
    )
    raise DataError(
        f"data.source = {section.source!r} has {windows.count} {part} windows of {windows.length} tokens; "
        f"a batch needs {config.training.batch_size}.",
        f"{remedy} a shorter training.sequence_length.",
    )


def check_share(source: str, wanted: float, training: int, held_out: int) -> None:
    """Log a warning if the held-out share of a source's tokens is less than a third of the share `wanted`, or more than
    three times as large. With `9 / wanted` documents of one size, fewer than 1 in 100 draws lead to the warning."""
    share = held_out / max(1, training + held_out)
    if not wanted / 3 <= share <= 3 * wanted:
        logger.warning(
            "data.source = %r: %.1f%% of tokens are held out, but data.held_out = %g; cut the text into more documents:"
            " %d of about one size will do",
            source,
            100 * share,
            wanted,
            math.ceil(9 / wanted),
        )
