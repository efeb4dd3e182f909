"""SIGUSR1 before and after a volunteer listens: it waits, or is ignored, and ends no process."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from opendiloco.owner.again import listen_again, toggles_held_back


@pytest.fixture
def heard() -> Iterator[list[int]]:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield heard
    signal.signal(signal.SIGUSR1, before)


def test_a_toggle_waits_until_somebody_listens(heard: list[int]) -> None:
    with toggles_held_back():
        signal.raise_signal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
        assert heard == []
        listen_again()
        assert heard == [signal.SIGUSR1]


@pytest.mark.usefixtures("heard")
def test_a_toggle_that_nobody_heard_ends_nothing() -> None:
    with toggles_held_back():
        signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
