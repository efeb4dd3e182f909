"""The driver's part in keeping votes (R10): one after another, and in words when it can't."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peers.driver.driver import Driver, _remembered, _VotesKeeper
from peers.log.votes import VotesFile, VotesFileError
from peers.protocol.effects import KeepVotes
from peers.protocol.events import Event, VotesKept, VotesNotKept
from peers.protocol.voting import VotingRecord

RECORD = VotingRecord(run="run", peer="b", incarnation=5)
FULL = "no space is left"


class Host:
    """A driver that only notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Event] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.replication = SimpleNamespace(recorder=self)

    async def finish(self) -> None:
        """Wait for entries: there are none."""

    def handle(self, event: Event) -> None:
        self.told.append(event)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))


def kept(file: VotesFile | None, *records: VotingRecord) -> list[Event]:
    """Return what the protocol hears when these records are to be kept at once."""
    host = Host()

    async def scenario() -> None:
        keeper = _VotesKeeper(file, cast(Driver, host))
        for record in records:
            keeper.keep(KeepVotes(record))
        await asyncio.gather(*host.tasks)
        keeper.close()

    asyncio.run(scenario())
    return host.told


def test_r10_records_are_written_in_their_order(tmp_path: Path) -> None:
    file = VotesFile(tmp_path)
    records = [RECORD.model_copy(update={"forgotten": number}) for number in range(20)]
    assert kept(file, *records) == [VotesKept()] * 20
    assert _remembered(file, "run", "b", is_new=True) == records[-1]


def test_r10_what_a_full_disk_does_not_take_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(self: VotesFile, record: bytes) -> None:
        raise VotesFileError(FULL)

    monkeypatch.setattr(VotesFile, "write", is_full)
    assert kept(VotesFile(tmp_path), RECORD) == [VotesNotKept(FULL)]


def test_without_a_file_votes_are_kept_in_memory() -> None:
    assert kept(None, RECORD) == [VotesKept()]
    assert _remembered(None, "run", "b", is_new=False) is None


def test_a_new_peer_without_a_file_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: the first start in a run logged a missing file, as if votes were lost."""
    with caplog.at_level(logging.INFO):
        assert _remembered(VotesFile(tmp_path), "run", "b", is_new=True) is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("run", "peer", "data", "says"),
    [
        ("run", "b", None, "does not exist"),
        ("run", "b", b"half", "damaged"),
        ("another", "b", RECORD.pack(), "is of peer b in run run"),
        ("run", "c", RECORD.pack(), "is of peer b in run run"),
    ],
    ids=["missing", "damaged", "another run", "another peer"],
)
def test_r10_a_record_that_is_none_of_this_peer_is_not_used_and_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, run: str, peer: str, data: bytes | None, says: str
) -> None:
    file = VotesFile(tmp_path)
    if data is not None:
        file.write(data)
    with caplog.at_level(logging.INFO):
        assert _remembered(file, run, peer, is_new=data is not None) is None
    (record,) = caplog.records
    assert record.levelname == "INFO", "it mends itself"
    assert says in record.getMessage()
    assert record.getMessage().endswith(
        "; this peer does not vote until it is in an outer step; nothing needs to be done"
    )
