from __future__ import annotations

from pathlib import Path

import pytest

from opendiloco.errors import MachineError
from opendiloco.storage.run_folder import Journal
from peers.log.header import Member
from peers.log.state import LogState
from peers.values.leases import SampleRange
from peers.values.wire import digest_of
from tests.peers.logs import next_header


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    log = LogState("run", digest_of(b"manifest"), samples_per_lease=8, tokens_per_sample=10)
    first = next_header(log, [Member(peer="A", tokens=80, samples=(SampleRange(0, 8),))], digest_of(b"payload 0"))
    second = next_header(
        log.append(first), [Member(peer="A", tokens=80, samples=(SampleRange(8, 16),))], digest_of(b"payload 1")
    )
    journal.append(first, digest_of(b"state 1"))
    journal.append(second, digest_of(b"state 2"))
    assert list(journal) == [(first, digest_of(b"state 1")), (second, digest_of(b"state 2"))]


def test_a_disk_that_takes_nothing_is_a_clear_error(tmp_path: Path) -> None:
    log = LogState("run", digest_of(b"manifest"), samples_per_lease=8, tokens_per_sample=10)
    header = next_header(log, [Member(peer="A", tokens=80, samples=(SampleRange(0, 8),))], digest_of(b"payload"))
    with pytest.raises(MachineError, match="journal"):
        Journal(tmp_path / "no such folder" / "journal.jsonl").append(header, digest_of(b"state"))


def test_a_file_that_cannot_be_had_is_found_out_before_anything_is_appended(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="journal"):
        Journal(tmp_path / "no such folder" / "journal.jsonl")
    (tmp_path / "journal.jsonl").write_text("kept\n")
    Journal(tmp_path / "journal.jsonl")
    assert (tmp_path / "journal.jsonl").read_text() == "kept\n"
