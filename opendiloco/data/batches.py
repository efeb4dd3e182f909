"""Batches that are read ahead of the training that they are for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from opendiloco.data.sample_order import SampleOrder

AHEAD = 2


class Batches:
    """The samples with these numbers, `batch_size` windows at a time; the last batch may be smaller.

    A thread reads up to `ahead` batches while the one before them is trained. `waited` is how many seconds training
    has waited for a batch, the first one included: as a share of the time that training took, its `data_wait`.

    Iterating raises what reading raises, and leaves no thread behind, also when it ends early.
    """

    def __init__(self, samples: SampleOrder, numbers: NDArray[np.int64], batch_size: int, ahead: int = AHEAD) -> None:
        self.waited = 0.0
        self._samples = samples
        self._parts = deque(numbers[start : start + batch_size] for start in range(0, len(numbers), batch_size))
        self._ahead = ahead

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """Token ids, shape (windows in the batch, sequence_length + 1). Only once."""
        reader = ThreadPoolExecutor(1, "batches")
        reading: deque[Future[NDArray[np.int64]]] = deque()
        try:
            while self._parts or reading:
                while self._parts and len(reading) <= self._ahead:
                    reading.append(reader.submit(self._samples.read, self._parts.popleft()))
                asked = time.monotonic()
                batch = reading.popleft().result()
                self.waited += time.monotonic() - asked
                yield batch
        finally:
            reader.shutdown(cancel_futures=True)
