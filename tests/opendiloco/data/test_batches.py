from __future__ import annotations

import threading

import numpy as np
import pytest

from opendiloco.data.sample_order import Batches, Mixture, Numbers, SampleOrder, Shuffled, Windows
from opendiloco.errors import DataError

NUMBERS = np.array([3, 4, 5, 9, 10, 11, 12])


class Samples(SampleOrder):
    """Notes what was read, by which thread; reads only while `gate` is open; number 11 can be made to fail."""

    def __init__(self, breaks: bool = False) -> None:
        tokens = np.arange(101, dtype=np.uint16)
        super().__init__([Shuffled.whole(Windows(tokens, 4), 0)], Mixture())
        self.read_by: list[threading.Thread] = []
        self.was_read = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self._breaks = breaks

    def read(self, numbers: Numbers) -> Numbers:
        assert self.gate.wait(30), "waiting for the gate to open"
        if self._breaks and 11 in numbers:
            raise DataError("11 is gone.", "Look for it.")
        self.read_by.append(threading.current_thread())
        self.was_read.release()
        return super().read(numbers)


def test_batches_are_the_samples_in_their_order() -> None:
    samples = Samples()
    expected = [samples.read(part).tolist() for part in (NUMBERS[:3], NUMBERS[3:6], NUMBERS[6:])]
    assert [batch.tolist() for batch in Batches(samples, NUMBERS, 3)] == expected
    assert list(Batches(samples, NUMBERS[:0], 3)) == []


def test_they_are_read_ahead_by_another_thread_but_not_too_far() -> None:
    samples = Samples()
    reading = iter(Batches(samples, NUMBERS, 1))
    next(reading)
    for _ in range(3):
        assert samples.was_read.acquire(timeout=30), "waiting for two more batches than the one in use"
    assert not samples.was_read.acquire(blocking=False)
    assert threading.current_thread() not in samples.read_by
    assert len(list(reading)) == 6


def test_who_stops_early_leaves_no_thread() -> None:
    samples, before = Samples(), set(threading.enumerate())
    for _ in Batches(samples, NUMBERS, 1):
        break
    assert set(threading.enumerate()) <= before
    assert len(samples.read_by) <= 4


def test_what_goes_wrong_is_raised_where_the_batch_is_needed() -> None:
    before, seen = set(threading.enumerate()), list[Numbers]()
    with pytest.raises(DataError, match="11 is gone"):
        seen.extend(Batches(Samples(breaks=True), NUMBERS, 2))
    assert len(seen) == 2
    assert set(threading.enumerate()) <= before


def test_the_time_that_training_waits_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on by a second whenever it is read: once before each wait, and once after."""
    ticks = iter(range(100))
    monkeypatch.setattr("opendiloco.data.sample_order.time.monotonic", lambda: float(next(ticks)))
    reading = Batches(Samples(), NUMBERS, 3)
    assert reading.waited == 0.0
    assert len(list(reading)) == 3
    assert reading.waited == 3.0
