"""What a worker reads: training samples by their numbers, and held-out windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from opendiloco.config.data import SourceSection
from opendiloco.config.run_config import RunConfig
from opendiloco.data.sample_order import Mixture, SampleOrder, ShuffledShards, ShuffledWindows, Source
from opendiloco.data.token_cache import TokenCache
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
        read = self.read(self.spread(windows)).astype("<u4")
        return str(blake3(repr((read.shape, self.document_end)).encode() + read.tobytes()).hexdigest())

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


def load_data(config: RunConfig, tokenizer: Tokenizer, cache: TokenCache | None = None) -> TrainingData:
    """Tokenize what a run reads, or open what was tokenized before. Of a source with shards, only the first is read.

    Raises: DataError when a source cannot be read, or has less than one batch of windows; MachineError.
    """
    data, mixture = config.data, Mixture(config.data.shares)
    end = tokenizer.end if config.training.document_mask else None
    orders, held_out = list[Source](), list[Windows]()
    for place, section in enumerate(data.all_sources):
        source = TokenizedSource(section, data.held_out, tokenizer, cache or TokenCache())
        order, windows = _ordered(source, config, data.shuffle_seed + place)
        orders.append(order)
        held_out.append(windows)
    return TrainingData(SampleOrder(orders, mixture, end), HeldOutWindows(held_out, mixture, end))


def _ordered(source: TokenizedSource, config: RunConfig, seed: int) -> tuple[Source, Windows]:
    """A source's training samples in their order, and its held-out windows."""
    section, length = source.section, config.training.sequence_length
    if section.shards is not None and section.windows_per_shard is not None:
        shards = ShardedWindows(source, section.shards, section.windows_per_shard, length)
        _check_count(section, config, shards.shard(0), shards.held_out())
        return ShuffledShards(shards, seed), shards.held_out()
    tokens = source.tokens()
    training, held_out = Windows(tokens.training, length), Windows(tokens.held_out, length)
    _check_count(section, config, training, held_out)
    return ShuffledWindows(training, seed), held_out


def _check_count(section: SourceSection, config: RunConfig, training: Windows, held_out: Windows) -> None:
    more = "" if section.shards is None else ", a larger windows_per_shard"
    for part, windows in (("training", training), ("held-out", held_out)):
        if windows.count < config.training.batch_size:
            raise DataError(
                f"data.source = {section.source!r} has {windows.count} {part} windows of {windows.length} tokens; "
                f"a batch needs {config.training.batch_size}.",
                f"Give more text{more}, a shorter training.sequence_length, or another data.held_out fraction.",
            )
