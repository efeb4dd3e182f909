"""The endless deterministic order of a run's training samples: it maps a sample number to a window of a source.

A mixture deals sample numbers to the sources in exact proportions. An amendment in the log may set another mixture from
a sample number on. The p-th sample of a source with N windows is window `permutation_e(p mod N)` of epoch e = p div N.
So a peer only has to remember a sample number to go on exactly where it stopped, and leases that are disjoint within an
epoch are disjoint in text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from opendiloco.config.data import MixturePhase
from opendiloco.data.tokenizer import TokenArray, Tokenizer
from peers.values.leases import SampleRange

FEISTEL_ROUNDS = 6  # in theory four rounds suffice (Luby, Rackoff 1988), but small data sets have few bits to mix

Numbers = NDArray[np.int64]


def numbers_of(lease: Iterable[SampleRange]) -> Numbers:
    """Return the sample numbers of a lease as one array, in the order of the lease's ranges."""
    parts = [np.arange(piece.start, piece.stop, dtype=np.int64) for piece in lease]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


class _Permutation:
    """A seeded permutation of 0 … size - 1 in O(1) memory, the same on every machine and numpy version.

    A Feistel network over the next even power of two. A value outside of the range is permuted again until it falls
    inside ("cycle walking"), so the result is a bijection.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self._size = size
        self._half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half_bits)) - 1)
        root = _mix(_mix(np.array([seed], np.uint64)) ^ np.array([epoch], np.uint64))
        self._keys = _mix(root + np.arange(FEISTEL_ROUNDS).astype(np.uint64))

    def __call__(self, positions: Numbers) -> Numbers:
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
    """Return a 64-bit hash of each 64-bit value, by SplitMix64's output function (Steele, Lea, Flood 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Mixture:
    """A rule that assigns sample numbers to sources in exact proportions: of any sum(shares) consecutive numbers,
    source s gets shares[s].

    Within such a cycle, each number goes to the source that is furthest behind its share (smooth weighted round robin),
    so that every stretch of numbers is close to the proportions.
    """

    def __init__(self, shares: Sequence[int] = (1,)) -> None:
        self.shares = np.array(shares, np.int64)
        self.cycle = int(self.shares.sum())
        self._source = np.empty(self.cycle, np.int64)
        self._place = np.empty(self.cycle, np.int64)
        """For each sample number in a cycle: the count of smaller numbers in the cycle that have the same source."""
        behind, dealt = np.zeros_like(self.shares), np.zeros_like(self.shares)
        for number in range(self.cycle):
            behind += self.shares
            source = int(np.argmax(behind))
            behind[source] -= self.cycle
            self._source[number], self._place[number] = source, dealt[source]
            dealt[source] += 1

    def assign(self, sample_numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the text source (as its index) of each sample, and the sample's index among all samples of its source.
        Both arrays have the shape of `sample_numbers`."""
        cycles, places = np.divmod(sample_numbers, self.cycle)
        sources = self._source[places]
        return sources, cycles * self.shares[sources] + self._place[places]

    def dealt(self, count: int) -> Numbers:
        """Return, as an array, how many of the numbers from 0 to `count` - 1 each source gets."""
        cycles, rest = divmod(count, self.cycle)
        return cycles * self.shares + np.bincount(self._source[:rest], minlength=len(self.shares))


_mixture_of = lru_cache(maxsize=64)(Mixture)


class Mixtures:
    """The assignment of sample numbers to sources in phases, each with its own mixture. In a new phase, each source
    goes on at the sample where it stopped, so each sample of a source is assigned once."""

    def __init__(self, phases: Sequence[MixturePhase]) -> None:
        """Create the assignment of sample numbers to sources. The phases must be sorted by their first sample numbers,
        and the first phase must begin with number 0."""
        self.phases = tuple(phases)
        self._firsts = np.array([phase.first for phase in phases], np.int64)
        self._mixtures = [_mixture_of(phase.shares) for phase in phases]
        self._dealt = [np.zeros(len(phases[0].shares), np.int64)]
        """For each phase: the number of samples of each source that the phases before it have dealt."""
        for mixture, (before, after) in zip(self._mixtures, pairwise(phases), strict=False):
            self._dealt.append(self._dealt[-1] + mixture.dealt(after.first - before.first))

    def assign(self, sample_numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the text source (as its index) of each sample, and the sample's index among all samples of its source.
        Both arrays have the shape of `sample_numbers`."""
        sources, positions = np.empty_like(sample_numbers), np.empty_like(sample_numbers)
        for phase, here in _groups(np.searchsorted(self._firsts, sample_numbers, side="right") - 1):
            found, places = self._mixtures[phase].assign(sample_numbers[here] - self._firsts[phase])
            sources[here], positions[here] = found, places + self._dealt[phase][found]
        return sources, positions


class Windows:
    """The consecutive windows of sequence_length + 1 tokens in an array of tokens. Each window begins with the last
    token of the window before."""

    def __init__(self, tokens: TokenArray, sequence_length: int) -> None:
        self._tokens = tokens
        self.length = sequence_length
        self.count = max(0, (len(tokens) - 1) // sequence_length)

    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the windows with these numbers as token ids of shape (len(numbers), sequence_length + 1)."""
        offsets = numbers[:, None] * self.length + np.arange(self.length + 1)
        return np.asarray(self._tokens[offsets], np.int64)


class Shuffled:
    """The endless order of one source's windows: each epoch reads all shards in a permuted order, and each shard's
    windows in a permuted order.

    Neighbouring positions are mostly in one shard, so a lease needs few shards. A shard with fewer than
    `windows_per_shard` windows repeats some. A read calls `prepare` with the number of the shard that is needed next:
    the expected shard (see `expect`), or else the epoch's next shard.
    """

    def __init__(
        self,
        shard: Callable[[int], Windows],
        shards: int,
        windows_per_shard: int,
        seed: int,
        prepare: Callable[[int], None] | None = None,
    ) -> None:
        self._shard = shard
        self._shards = shards
        self._windows_per_shard = windows_per_shard
        self._seed = seed
        self._prepare = prepare
        self._next_visit: dict[int, int] = {}  # by visit (the reading of one shard): the visit expected next

    @classmethod
    def whole(cls, windows: Windows, seed: int) -> Shuffled:
        """Return the order of a source without shards, whose windows are treated as a single shard."""
        return cls(lambda _: windows, 1, windows.count, seed)

    def read(self, positions: Numbers) -> Numbers:
        """Return the windows at these positions of the order, as token ids of shape (len(positions), sequence_length +
        1)."""
        visits, places = np.divmod(positions, self._windows_per_shard)

        def read(visit: int, here: NDArray[np.bool_]) -> Numbers:  # `visit` counts the shards read, over all epochs
            windows = self._shard(self._visited(visit))
            chosen = _Permutation(self._windows_per_shard, self._seed, visit)(places[here])
            found = windows.read(chosen % windows.count)
            if self._prepare is not None:
                self._prepare(self._visited(self._next_visit.get(visit, visit + 1)))
            return found

        return _read_by_key(visits, read)

    def expect(self, positions: Numbers) -> None:
        """Record the positions that will be read next, in this order, so that `read` prepares the right shard in
        advance."""
        visits = positions // self._windows_per_shard
        self._next_visit = dict(pairwise(dict.fromkeys(visits.tolist())))

    def _visited(self, visit: int) -> int:
        """Return the number of the shard that is read in visit number `visit`, counted from 0 over all epochs."""
        epoch, place = divmod(visit, self._shards)
        return int(_Permutation(self._shards, self._seed, epoch)(np.array([place]))[0])


class SampleOrder:
    """The endless order of a run's training samples, over all sources."""

    def __init__(self, sources: Sequence[Shuffled], mixture: Mixture, document_end: int | None = None) -> None:
        self._sources = sources
        self._mixtures = Mixtures([MixturePhase(0, tuple(mixture.shares.tolist()))])
        self.document_end = document_end
        """The id of the token that ends a document, if attention and loss stay within documents; else None."""
        self._leased: Numbers = np.empty(0, np.int64)

    def mix(self, phases: Sequence[MixturePhase]) -> None:
        """Set the mixtures of later phases. A mixture applies from its phase's first sample number on; before the first
        of these phases, the original mixture applies. Samples before a new phase do not change."""
        wanted = (self._mixtures.phases[0], *phases)
        if wanted != self._mixtures.phases:
            self._mixtures = Mixtures(wanted)

    def expect(self, lease: Numbers) -> None:
        """Record the sample numbers of the lease that is read next. Predict where the lease after it begins, from the
        distance between the first numbers of the last two leases."""
        if not len(lease) or np.array_equal(lease, self._leased):
            return
        before, self._leased = self._leased, lease
        step = int(lease[0] - before[0]) if len(before) and lease[0] > before[-1] else int(lease[-1] - lease[0]) + 1
        sources, positions = self._mixtures.assign(np.concatenate([lease, lease[:1] + step]))
        for source, here in _groups(sources):
            self._sources[source].expect(positions[here])

    def read(self, numbers: Numbers) -> Numbers:
        """Return the training samples with these numbers as token ids of shape (len(numbers), sequence_length + 1)."""
        sources, positions = self._mixtures.assign(numbers)
        return _read_by_key(sources, lambda source, here: self._sources[source].read(positions[here]))


class HeldOutWindows:
    """The held-out windows of all sources, numbered consecutively from the first source to the last."""

    def __init__(
        self, parts: Sequence[Windows], mixture: Mixture | None = None, document_end: int | None = None
    ) -> None:
        self._parts = parts
        self._mixture = mixture or Mixture()
        self._counts = np.array([part.count for part in parts], np.int64)
        self._starts = np.cumsum(self._counts) - self._counts
        self.document_end = document_end
        """See `SampleOrder.document_end`."""

    @property
    def count(self) -> int:
        """The number of held-out windows in all sources together."""
        return int(self._counts.sum())

    def spread(self, windows: int) -> NDArray[np.int64]:
        """Return the numbers of at most `windows` held-out windows: from each source in the mixture's proportion,
        evenly spread over the source."""
        shares = self._mixture.shares
        is_read = shares > 0
        enough = int(np.min(self._counts[is_read] * self._mixture.cycle // shares[is_read]))
        sources, places = self._mixture.assign(np.arange(min(windows, enough), dtype=np.int64))
        wanted = np.bincount(sources, minlength=len(self._parts))
        chosen: NDArray[np.int64] = self._starts[sources] + places * self._counts[sources] // wanted[sources]
        return chosen

    def digest(self, windows: int) -> str:
        """Return a digest, 64 hexadecimal digits, of the token ids that an evaluation on `windows` windows reads. Two
        losses can be compared if their digests are equal."""
        read = self.read(self.spread(windows)).astype("<u4")
        return str(blake3(repr((read.shape, self.document_end)).encode() + read.tobytes()).hexdigest())

    def bytes_per_token(self, windows: int, tokenizer: Tokenizer) -> float:
        """Return the mean bytes of text per token, over the tokens that an evaluation on `windows` windows predicts."""
        read = self.read(self.spread(windows))
        inputs, targets = read[:, :-1], read[:, 1:]
        within = np.ones(targets.shape, bool) if self.document_end is None else inputs != self.document_end
        size = sum(tokenizer.byte_count(ids[kept]) for ids, kept in zip(targets, within, strict=True))
        return max(size, 1) / max(int(within.sum()), 1)

    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the held-out windows with these numbers as token ids of shape (len(numbers), sequence_length + 1)."""
        sources = np.searchsorted(self._starts, numbers, side="right") - 1
        return _read_by_key(
            sources, lambda source, here: self._parts[source].read(numbers[here] - self._starts[source])
        )


def _groups(keys: Numbers) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Yield each distinct value in the array `keys`, with a mask that is True at the elements equal to the value."""
    for key in np.unique(keys):
        yield int(key), keys == key


def _read_by_key(keys: Numbers, read: Callable[[int, NDArray[np.bool_]], Numbers]) -> Numbers:
    """Return an array with a window for each element of `keys`, in the order of `keys`. `read(key, mask)` returns the
    windows of the elements that equal `key`, which are those at which `mask` is True."""
    parts = [(here, read(key, here)) for key, here in _groups(keys)]
    if len(parts) == 1:
        return parts[0][1]
    windows = np.empty((len(keys), parts[0][1].shape[1]), np.int64)
    for here, part in parts:
        windows[here] = part
    return windows


# Batches --------------------------------------------------------------------------------------------------------------
AHEAD = 2  # number of batches read in advance; with only one, training would wait for a slow read


class Batches:
    """An iterable over training samples in batches of `batch_size` windows, possibly fewer in the last batch. `numbers`
    are the numbers of the samples.

    A thread reads up to `AHEAD` batches in advance. `waited` is the seconds that training has waited for batches,
    including the first. Its share of the training time is reported as `data_wait_share`.

    Iteration raises the exceptions of reading. The thread ends with the iteration, also with one that stops early.
    """

    def __init__(self, samples: SampleOrder, numbers: NDArray[np.int64], batch_size: int) -> None:
        self.waited = 0.0
        self._samples = samples
        self._parts = deque(numbers[start : start + batch_size] for start in range(0, len(numbers), batch_size))

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """Yield each batch as token ids of shape (windows in the batch, sequence_length + 1). An object can be iterated
        only once."""
        reader = ThreadPoolExecutor(1, "batches")
        reading: deque[Future[NDArray[np.int64]]] = deque()
        try:
            while self._parts or reading:
                while self._parts and len(reading) <= AHEAD:
                    reading.append(reader.submit(self._samples.read, self._parts.popleft()))
                asked = time.monotonic()
                batch = reading.popleft().result()
                self.waited += time.monotonic() - asked
                yield batch
        finally:
            reader.shutdown(cancel_futures=True)
