from __future__ import annotations

import time

import pytest

from peers.values.system import next_sequence


def test_sequences_rise_whatever_the_clock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two within a millisecond, or a clock that was set back, ended the archive of all runs."""
    nanoseconds = 5_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: nanoseconds)
    assert next_sequence(0) == 5000
    assert next_sequence(5000) == 5001
    nanoseconds = 1_000_000_000
    assert next_sequence(5001) == 5002
    assert next_sequence(5002, 7000) == 7001, "what was heard of our own key comes first"
    nanoseconds = 9_000_000_000
    assert next_sequence(5002, 7000) == 9000
