"""What a worker reads: training samples by their numbers, and held-out windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from opendiloco.config.data import SourceSection
from opendiloco.config.run_config import RunConfig
from opendiloco.data.sample_order import (
    Mixture,
    SampleOrder,
    ShuffledShards,
    ShuffledWindows,
    Source,
    digest_of_windows,
)
from opendiloco.data.token_cache import TokenCache
from opendiloco.data.token_files import Tokens, digest_of_tokens
from opendiloco.data.token_folder import is_token_folder, open_token_folder
from opendiloco.data.tokenized import ShardedWindows, TokenizedSource, Windows
from opendiloco.data.tokenizer import Tokenizer
from opendiloco.errors import DataError


class HeldOutWindows:
    """The sources' held-out windows, numbered through from the first source's first on."""

    def __init__(
        self, parts: Sequence[Windows], mixture: Mixture | None = None, document_end: int | None = None
    ) -> None:
        self._parts = parts
        self._mixture = mixture or Mixture()
        self._counts = np.array([part.count for part in parts], np.int64)
        self.document_end = document_end
        """See `SampleOrder.document_end`."""

    @property
    def count(self) -> int:
        """Windows in all sources together."""
        return int(self._counts.sum())

    def spread(self, windows: int) -> NDArray[np.int64]:
        """The numbers of at most so many windows in the mixture's proportions, evenly spread over each source."""
        enough = int(np.min(self._counts * self._mixture.cycle // self._mixture.shares))
        sources, places = self._mixture.assign(np.arange(min(windows, enough), dtype=np.int64))
        wanted = np.bincount(sources, minlength=len(self._parts))
        starts = np.cumsum(self._counts) - self._counts
        chosen: NDArray[np.int64] = starts[sources] + places * self._counts[sources] // wanted[sources]
        return chosen

    def digest(self, windows: int) -> str:
        """Return 64 hexadecimal digits, of the tokens that an evaluation on so many windows reads.

        Losses can be compared where it is the same.
        """
        return digest_of_windows(self.read(self.spread(windows)), self.document_end)

    def bytes_per_token(self, windows: int, tokenizer: Tokenizer) -> float:
        """Return how many bytes of text a token stands for that an evaluation on so many windows predicts."""
        read = self.read(self.spread(windows))
        inputs, targets = read[:, :-1], read[:, 1:]
        within = np.ones(targets.shape, bool) if self.document_end is None else inputs != self.document_end
        size = sum(tokenizer.byte_count(ids[kept]) for ids, kept in zip(targets, within, strict=True))
        return max(size, 1) / max(int(within.sum()), 1)

    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Token ids, shape (len(numbers), sequence_length + 1)."""
        starts = np.cumsum(self._counts) - self._counts
        sources = np.searchsorted(starts, numbers, side="right") - 1
        windows = np.empty((len(numbers), self._parts[0].length + 1), np.int64)
        for source in np.unique(sources):
            here = sources == source
            windows[here] = self._parts[source].read(numbers[here] - starts[source])
        return windows


@dataclass(frozen=True)
class TrainingData:
    """The sample order for training, and the windows for evaluation."""

    samples: SampleOrder
    held_out: HeldOutWindows


TokenizeAhead = Callable[[int, int], None]
"""Called with the place of a source and the number of one of its shards that is soon needed; returns at once."""


def load_data(
    config: RunConfig,
    tokenizer: Tokenizer,
    cache: TokenCache | None = None,
    tokenize_ahead: TokenizeAhead | None = None,
) -> TrainingData:
    """Tokenize what a run reads, or open what was tokenized before. Of a source with shards, only what is held out is
    read; shards follow when they are needed, or before, if there is somebody who tokenizes ahead.

    Raises: DataError when a source cannot be read, or has less than one batch of windows; MachineError.
    """
    data, mixture = config.data, Mixture(config.data.shares)
    end = tokenizer.end if config.training.document_mask else None
    orders, held_out = list[Source](), list[Windows]()
    for place, section in enumerate(data.all_sources):
        ahead = None if tokenize_ahead is None else partial(tokenize_ahead, place)
        seed, kept = data.shuffle_seed + place, cache or TokenCache()
        if section.shards is not None:
            order, windows = _sharded(section, config, tokenizer, kept, seed, ahead)
        else:
            tokens = read_tokens(section, data.held_out, tokenizer, kept)
            order, windows = _whole(section, config, tokens, seed)
        orders.append(order)
        held_out.append(windows)
    return TrainingData(SampleOrder(orders, mixture, end), HeldOutWindows(held_out, mixture, end))


def read_tokens(section: SourceSection, held_out: float, tokenizer: Tokenizer, cache: TokenCache) -> Tokens:
    """Return all tokens of a source without shards. Raises: DataError when they are not those that it names."""
    if is_token_folder(section.source):
        tokens = open_token_folder(section.source, tokenizer, held_out, cache)
    else:
        tokens = TokenizedSource(section, held_out, tokenizer, cache).tokens()
    if section.digest is not None and (found := digest_of_tokens(tokens)) != section.digest:
        raise DataError(
            f"the run's data.digest is {section.digest}; the tokens of {section.source!r} have {found}.",
            "Get the text or tokens that the run means.",
        )
    return tokens


def shards_of(
    section: SourceSection,
    config: RunConfig,
    tokenizer: Tokenizer,
    cache: TokenCache,
    tokenize_ahead: Callable[[int], None] | None = None,
) -> ShardedWindows:
    """Return a source's shards. Raises: DataError when it cannot have any."""
    assert section.shards is not None
    assert section.windows_per_shard is not None
    if is_token_folder(section.source):
        raise DataError(
            f"data.shards = {section.shards} of {section.source!r}, a folder of tokens, which is mapped as it is.",
            "Remove shards and windows_per_shard.",
        )
    source = TokenizedSource(section, config.data.held_out, tokenizer, cache)
    length = config.training.sequence_length
    return ShardedWindows(source, section.shards, section.windows_per_shard, length, tokenize_ahead)


def _sharded(
    section: SourceSection,
    config: RunConfig,
    tokenizer: Tokenizer,
    cache: TokenCache,
    seed: int,
    tokenize_ahead: Callable[[int], None] | None,
) -> tuple[Source, Windows]:
    """Return a source's training samples in their order, and its held-out windows: as many as are evaluated."""
    shards = shards_of(section, config, tokenizer, cache, tokenize_ahead)
    held_out = shards.held_out(max(config.evaluation.windows, config.training.batch_size))
    _check_count(section, config, "held-out", held_out)
    return ShuffledShards(shards, seed), held_out


def _whole(section: SourceSection, config: RunConfig, tokens: Tokens, seed: int) -> tuple[Source, Windows]:
    length = config.training.sequence_length
    training, held_out = Windows(tokens.training, length), Windows(tokens.held_out, length)
    _check_count(section, config, "training", training)
    _check_count(section, config, "held-out", held_out)
    return ShuffledWindows(training, seed), held_out


def _check_count(section: SourceSection, config: RunConfig, part: str, windows: Windows) -> None:
    more = "" if section.shards is None else ", in its first shard"
    if windows.count < config.training.batch_size:
        raise DataError(
            f"data.source = {section.source!r} has {windows.count} {part} windows of {windows.length} tokens; "
            f"a batch needs {config.training.batch_size}.",
            f"Give more text{more}, a shorter training.sequence_length, or another data.held_out fraction.",
        )
