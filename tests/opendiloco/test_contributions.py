"""Who has contributed what, by the log."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from opendiloco.contributions import Contribution, Contributions
from peers.log.folder import RunLog


class Entry:
    def __init__(self, **tokens: int) -> None:
        self.roster = [type("Member", (), {"peer": peer, "tokens": count})() for peer, count in tokens.items()]


class Log:
    """Entries, as far as a machine has them."""

    def __init__(self, *entries: Entry, first: int = 0) -> None:
        self.entries = list(entries)
        self.first = first
        self.reads: list[tuple[int, int]] = []

    @property
    def next_index(self) -> int:
        return self.first + len(self.entries)

    def headers(self, first: int, last: int) -> Sequence[Entry]:
        self.reads.append((first, last))
        return self.entries[first - self.first : last - self.first]


def read(contributions: Contributions, log: Log) -> None:
    contributions.read(log)  # type: ignore[arg-type]


def test_each_entry_counts_once() -> None:
    contributions, log = Contributions(), Log(Entry(a=10, b=30), Entry(a=10, c=0))
    read(contributions, log)
    log.entries.append(Entry(a=50))
    read(contributions, log)
    read(contributions, log)
    assert log.reads == [(0, 2), (2, 3)]
    assert contributions.of("a") == Contribution(tokens=70, rounds=3, share=0.7, rank=1, peers=3)
    assert contributions.of("b") == Contribution(tokens=30, rounds=1, share=0.3, rank=2, peers=3)
    assert contributions.of("c") == Contribution(tokens=0, rounds=0, share=0.0, rank=3, peers=3)
    assert contributions.of("new") == Contribution(tokens=0, rounds=0, share=0.0, rank=3, peers=4)


def test_a_log_may_begin_in_the_middle_and_be_replaced() -> None:
    contributions = Contributions()
    read(contributions, Log(Entry(a=10), Entry(a=10), first=7))
    read(contributions, Log(Entry(b=5), first=3))
    assert contributions.of("b") == Contribution(tokens=5, rounds=1, share=1.0, rank=1, peers=1)


def test_where_there_is_no_entry_nobody_has_contributed() -> None:
    assert Contributions().of("a") is None


@pytest.mark.parametrize("name", ["first", "next_index", "headers"])
def test_logs_are_like_that(name: str) -> None:
    assert hasattr(RunLog, name)
