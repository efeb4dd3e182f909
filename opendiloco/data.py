"""Tokens, windows, and the run's endless deterministic sample order.

Sample i is window `permutation_e(i mod N)` of epoch e = i div N, where N windows make one pass. A sample number is thus
all that must be remembered to go on exactly where a peer stopped, and lease ranges that are disjoint within an epoch
are disjoint in text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opendiloco.config import RunConfig
from opendiloco.corpus import read_documents
from opendiloco.errors import DataError
from opendiloco.tokenizer import TokenArray, Tokenizer

FEISTEL_ROUNDS = 6


class Permutation:
    """A seeded permutation of 0 … size - 1 in O(1) memory, the same on every machine and numpy version.

    A Feistel network over the next even power of two; values that fall outside are sent through again until they
    fall inside ("cycle walking"), which keeps it a bijection.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self._size = size
        self._half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half_bits)) - 1)
        root = _mix(_mix(np.array([seed], np.uint64)) ^ np.array([epoch], np.uint64))
        self._keys = _mix(root + np.arange(FEISTEL_ROUNDS).astype(np.uint64))

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each of `positions` is sent; any shape."""
        values = self._scramble(positions.astype(np.uint64))
        while np.any(outside := values >= self._size):
            values[outside] = self._scramble(values[outside])
        return values.astype(np.int64)

    def _scramble(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half_bits, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half_bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea, Flood 2014): 64 bits in, 64 well mixed bits out, modulo 2^64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Windows:
    """Consecutive windows of sequence_length + 1 tokens; each starts at the last token of the one before."""

    def __init__(self, tokens: TokenArray, sequence_length: int) -> None:
        self._tokens = tokens
        self.length = sequence_length
        self.count = max(0, (len(tokens) - 1) // sequence_length)

    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Token ids, shape (len(numbers), sequence_length + 1)."""
        offsets = numbers[:, None] * self.length + np.arange(self.length + 1)
        tokens: NDArray[np.int64] = self._tokens[offsets].astype(np.int64)
        return tokens


class SampleOrder:
    """The endless order of training samples over a corpus's windows."""

    def __init__(self, windows: Windows, seed: int) -> None:
        self._windows = windows
        self._seed = seed

    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples with these numbers as token ids, shape (len(numbers), sequence_length + 1)."""
        epochs, positions = np.divmod(numbers, self._windows.count)
        chosen = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            chosen[here] = Permutation(self._windows.count, self._seed, int(epoch))(positions[here])
        return self._windows.read(chosen)


@dataclass(frozen=True)
class TrainingData:
    """What a worker reads: the sample order for training, and the held-out windows in their natural order."""

    samples: SampleOrder
    held_out: Windows


def load_data(config: RunConfig, tokenizer: Tokenizer) -> TrainingData:
    """Read and tokenize the whole corpus into memory: 2 bytes per token with the byte tokenizer, 4 otherwise.

    Raises: DataError when either part has less than one batch of windows.
    """
    training, held_out = _tokenize(config, tokenizer)
    length, batch_size = config.training.sequence_length, config.training.batch_size
    for part, windows in (("training", training), ("held-out", held_out)):
        if windows.count < batch_size:
            raise DataError(
                f"data.source = {config.data.source!r} has {windows.count} {part} windows of {length} tokens; "
                f"a batch needs {batch_size}.",
                "Give more text, a shorter training.sequence_length, or another data.held_out fraction.",
            )
    return TrainingData(SampleOrder(training, config.data.shuffle_seed), held_out)


def _tokenize(config: RunConfig, tokenizer: Tokenizer) -> tuple[Windows, Windows]:
    parts: dict[bool, list[Any]] = {False: [], True: []}
    end = np.array([tokenizer.end])
    for document in read_documents(config.data):
        tokens = tokenizer.encode_document(document.text)
        parts[document.held_out] += [tokens, end.astype(tokens.dtype)]
    length = config.training.sequence_length
    training, held_out = (
        Windows(np.concatenate(pieces) if pieces else np.empty(0, np.uint16), length) for pieces in parts.values()
    )
    return training, held_out
