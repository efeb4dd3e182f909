"""A run's log on disk: what was written is read back, and what is damaged is found out, named and left out."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.log.chain import Entry, Stretch
from peers.log.folder import (
    ENTRIES,
    PAYLOADS,
    LogFolder,
    LogFolderError,
    RunLog,
    _entry_line,
    _first_line,
    _read_entry,
    _read_first_line,
    payload_path,
    read_chain,
)
from peers.log.header import Header, Member
from peers.log.state import LogError, LogState
from peers.values.chunks import ChunkedPayload
from peers.values.leases import SampleRange
from peers.values.wire import digest_of, pack, unpack
from tests.peers.logs import LOG, certificate, chain_of, next_header

BLOCK = 8  # bytes
PayloadOf = Callable[[int], ChunkedPayload]


def payload(number: int) -> ChunkedPayload:
    """200 blocks, the last of them short, in 67 chunks."""
    return ChunkedPayload.cut(memoryview(b"%08d" % number * 199 + b"end"), BLOCK)


def lineage(count: int, payload_of: PayloadOf = payload, log: LogState = LOG) -> list[Header]:
    """Headers of `count` entries of two peers, from the end of `log` on."""
    headers = []
    for _ in range(count):
        index = log.position.index
        leases = log.leases or {"a": (SampleRange(0, 20),), "b": (SampleRange(20, 40),)}
        roster = [Member(peer=peer, tokens=100, samples=leases[peer]) for peer in "ab"]
        headers.append(next_header(log, roster, payload_of(index).digest))
        log = log.append(headers[-1])
    return headers


HEADERS = lineage(5)
CERTIFICATE = certificate(LOG.at(HEADERS[1]), HEADERS[2])
FORK = lineage(3, lambda index: payload(index + 100), LOG.at(HEADERS[1]))  # entries 2, 3 and 4, otherwise


def changed(header: Header, **fields: object) -> Header:
    return unpack(Header, pack(header.model_copy(update=fields)))


def told(headers: Sequence[Header], is_whole: bool = True) -> Stretch:
    """Consecutive headers as another peer tells them; those from the beginning of the run are never whole."""
    return chain_of(headers).stretch(headers[0].index, headers[-1].index + 1, is_whole)


def state(index: int) -> bytes:
    return digest_of(b"state after %d" % index)


def fill(log: RunLog, headers: list[Header] = HEADERS, payload_of: PayloadOf = payload) -> None:
    for header in headers:
        log.append(header, state(header.index), payload_of(header.index))


def opened(path: Path) -> LogFolder:
    return LogFolder.open(path, LOG, BLOCK)


@pytest.fixture(params=["folder", "memory"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunLog]:
    """One of each kind; what the folder's says at the end is what it says when it is opened again."""
    if request.param == "memory":
        yield RunLog(LOG)
    else:
        folder = opened(tmp_path / "log")
        yield folder
        assert listed(opened(tmp_path / "log")) == listed(folder)


def listed(log: RunLog) -> list[tuple[Header | None, bytes | None]]:
    return [(log.header_at(index), log.state_digest_at(index)) for index in range(log.first, log.next_index)]


def test_an_empty_log(log: RunLog) -> None:
    assert (log.first, log.next_index, len(log)) == (0, 0, 0)
    assert log.headers(0, 10) == []
    assert log.header_at(0) is None
    assert log.state_digest_at(0) is None
    assert log.payload(payload(0).digest) is None


def test_what_was_appended_is_there(log: RunLog) -> None:
    fill(log)
    assert (log.first, log.next_index, len(log)) == (0, 5, 5)
    assert listed(log) == [(header, state(index)) for index, header in enumerate(HEADERS)]
    assert log.headers(1, 3) == HEADERS[1:3]
    assert log.headers(3, 99) == HEADERS[3:]
    assert log.header_at(-1) is None
    for index, header in enumerate(HEADERS):
        assert log.payload(header.payload) == payload(index)


def test_an_entry_that_is_there_is_appended_again(log: RunLog) -> None:
    log.append(HEADERS[0], None, None)
    log.append(HEADERS[1], None, None)
    log.append(HEADERS[0], state(0), payload(0))
    log.append(HEADERS[0], None, None)
    assert listed(log) == [(HEADERS[0], state(0)), (HEADERS[1], None)]
    assert log.payload(HEADERS[0].payload) == payload(0)


def test_a_heavier_lineage_takes_the_place_of_what_was_there(log: RunLog) -> None:
    fill(log)
    fill(log, FORK[:1], lambda index: payload(index + 100))
    assert log.headers(0, 9) == [*HEADERS[:2], FORK[0]]
    fill(log, FORK[1:], lambda index: payload(index + 100))
    assert log.headers(0, 9) == HEADERS[:2] + FORK


def test_another_first_entry(log: RunLog) -> None:
    fill(log)
    [other] = lineage(1, lambda index: payload(7))
    log.append(other, state(0), payload(7))
    assert log.headers(0, 9) == [other]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_header_from_further_on_begins_the_log_anew_and_what_leads_up_to_it_is_added(
    log: RunLog, before: int
) -> None:
    fill(log, HEADERS[:before])
    log.append(HEADERS[3], state(3), None)
    assert (log.first, log.next_index) == (3, 4)
    log.append(HEADERS[4], state(4), payload(4))
    assert log.headers(0, 9) == HEADERS[3:]
    log.prepend(told(HEADERS[1:3]))
    log.prepend(Stretch())
    assert (log.first, len(log)) == (1, 4)
    log.prepend(told(HEADERS[:1]))
    assert log.headers(0, 9) == HEADERS
    assert [log.state_digest_at(index) for index in range(5)] == [None, None, None, state(3), state(4)]


def test_headers_that_lead_elsewhere_are_refused(log: RunLog) -> None:
    with pytest.raises(LogError):
        log.prepend(told(HEADERS[:1]))  # up to what?
    log.append(HEADERS[3], state(3), None)
    last = told(HEADERS[1:3]).contents[1:]
    gap = Stretch(contents=((HEADERS[0], None), *last))
    untrue = Stretch(contents=((changed(HEADERS[1], lineage_tokens=1), None), *last))
    elsewhere = Stretch(contents=((changed(HEADERS[0], previous=digest_of(b"another manifest")), None),))
    other_run = Stretch(contents=((changed(HEADERS[2], run="other"), None),))
    for headers in (HEADERS[1:2], HEADERS[:2], HEADERS[1:4], FORK[:1], [*HEADERS[:2], FORK[0]]):
        with pytest.raises(LogError, match="lead up to entry 3"):
            log.prepend(told(headers))
    for stretch in (gap, untrue, elsewhere, other_run):
        with pytest.raises(LogError):
            log.prepend(stretch)
    assert log.headers(0, 9) == HEADERS[3:4]


def test_a_payload_of_another_entry_is_refused(log: RunLog) -> None:
    with pytest.raises(LogError, match="payload"):
        log.append(HEADERS[0], state(0), payload(1))
    assert len(log) == 0


def test_a_log_without_a_disk_keeps_only_some_payloads() -> None:
    log = RunLog(LOG, kept_bytes=0)
    fill(log)
    log.prune(3)
    assert [log.payload(header.payload) is not None for header in HEADERS] == [False, False, True, True, True]
    assert len(log) == 5


def test_payloads_that_a_checkpoint_covers_are_pruned(tmp_path: Path) -> None:
    log = opened(tmp_path)
    fill(log)
    (tmp_path / PAYLOADS / "notes.payload").touch()
    log.prune(3)
    assert sorted(path.name[:2] for path in (tmp_path / PAYLOADS).iterdir()) == ["3-", "4-", "no"]
    assert log.payload(HEADERS[2].payload) is None
    assert log.payload(HEADERS[3].payload) == payload(3)
    assert len(log) == 5


def test_a_payload_can_be_read_after_it_was_pruned(tmp_path: Path) -> None:
    log = opened(tmp_path)
    fill(log)
    read = log.payload(HEADERS[0].payload)
    log.prune(5)
    assert read == payload(0)


@given(st.lists(st.tuples(st.sampled_from(HEADERS + FORK), st.booleans(), st.booleans()), max_size=12))
def test_whatever_is_appended_is_the_end_of_one_lineage(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Header, bool, bool]]
) -> None:
    path = tmp_path_factory.mktemp("log")
    folder, memory = opened(path), RunLog(LOG)
    for header, has_state, is_restarted in steps:
        for log in (folder, memory):
            log.append(header, state(header.index) if has_state else None, None)
            assert log.header_at(header.index) == header
            chain = log.headers(log.first, log.next_index)
            assert all(after.previous == before.digest for before, after in pairwise(chain))
        assert listed(folder) == listed(memory)
        folder = opened(path) if is_restarted else folder
    assert listed(opened(path)) == listed(memory)


# Damage -----------------------------------------------------------------------------------------------------------
def test_a_last_line_that_was_cut_short_anywhere_is_cut_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(opened(tmp_path), HEADERS[:3])
    file = tmp_path / ENTRIES
    whole = file.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for stop in range(start, len(whole)):
        file.write_bytes(whole[:stop])
        caplog.clear()
        assert len(opened(tmp_path)) == 2
        assert file.read_bytes() == whole[:start]
        assert ("line 4" in caplog.text) == (stop > start)
    log = opened(tmp_path)
    fill(log, HEADERS[2:])
    assert listed(opened(tmp_path)) == listed(log)
    assert len(log) == 5


def test_every_flipped_bit_of_a_line_is_noticed() -> None:
    """Of the chain alone, one in the last header would not be."""
    whole = Entry.whole(HEADERS[2], state(2), CERTIFICATE)
    brief = whole.brief(LOG.at(HEADERS[1]), HEADERS[2])
    for entry in (brief, whole, Entry.whole(HEADERS[2], None)):
        assert _read_entry(_entry_line(entry)) == entry
    for line, read in ((_entry_line(brief), _read_entry), (_first_line(LOG), _read_first_line)):
        for place in range(len(line)):
            for bit in range(8):
                flipped = bytearray(line)
                flipped[place] ^= 1 << bit
                with pytest.raises(LogError, match="corrupt"):
                    read(bytes(flipped))


EMPTY_DIGEST = _entry_line(Entry.whole(HEADERS[2], None)).replace(b"null", b'""')


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"[]\n",
        b"7\n",
        b"{}\n",
        b"\0" * 64 + b"\n",
        b"[" * 9999,
        b'{"header":1,"state_digest":null}\n',
        EMPTY_DIGEST,
    ],
)
def test_other_lines_are_no_entries(line: bytes) -> None:
    with pytest.raises(LogError):
        _read_entry(line)
    with pytest.raises(LogError):
        _read_first_line(line)


def test_a_damaged_line_in_the_middle_ends_the_log_and_nothing_is_thrown_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(opened(tmp_path))
    file = tmp_path / ENTRIES
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    assert opened(tmp_path).headers(0, 9) == HEADERS[:2]
    assert f"{file}, line 4" in caplog.text
    assert (tmp_path / "entries.damaged").read_bytes() == damaged
    assert opened(tmp_path).payload(HEADERS[4].payload) == payload(4)


@pytest.mark.parametrize(
    ("headers", "whole"),
    [
        ([HEADERS[0], HEADERS[2]], 1),
        ([HEADERS[0], HEADERS[1], FORK[1]], 2),
        ([changed(HEADERS[0], previous=digest_of(b"other"))], 0),
        ([HEADERS[0], changed(HEADERS[1], lineage_tokens=9)], 1),
        ([changed(HEADERS[2], run="other")], 0),
        ([HEADERS[2], HEADERS[3]], 2),
    ],
)
def test_a_line_that_does_not_follow_ends_the_log(tmp_path: Path, headers: list[Header], whole: int) -> None:
    file = tmp_path / ENTRIES
    file.write_bytes(_first_line(LOG) + b"".join(_entry_line(Entry.whole(header, None)) for header in headers))
    seen: list[Header] = []
    chain, problem = read_chain(file, LOG, lambda entry, header, before: seen.append(header))
    assert seen == list(chain.headers(0, 9)) == headers[:whole]
    assert (problem is None) == (whole == len(headers))
    assert read_chain(file)[0].entries == chain.entries, "what entries depend on is in the file"
    assert opened(tmp_path).headers(0, 9) == headers[:whole]


def test_a_log_of_another_run_is_kept_and_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(opened(tmp_path))
    written = (tmp_path / ENTRIES).read_bytes()
    other = LogFolder.open(tmp_path, replace(LOG, run="other"), BLOCK)
    assert len(other) == 0
    assert f"line 1: it is of the run {LOG.run}" in caplog.text
    assert (tmp_path / "entries.damaged").read_bytes() == written


def test_a_file_without_a_first_line_has_no_entries(tmp_path: Path) -> None:
    file = tmp_path / ENTRIES
    file.touch()
    for empty_log in (LOG, None):
        chain, problem = read_chain(file, empty_log)
        assert (len(chain), problem) == (0, None)
    file.write_bytes(_entry_line(Entry.whole(HEADERS[0], None)))
    for empty_log in (LOG, None):
        chain, problem = read_chain(file, empty_log)
        assert len(chain) == 0
        assert "line 1: it is corrupt" in str(problem)


def test_the_file_grows_by_what_happened(tmp_path: Path) -> None:
    """Of a hundred members that all train their leases it says as much as of two."""
    log, sizes = opened(tmp_path), []
    at, names = LOG, [f"{number:052}" for number in range(100)]
    for _ in range(4):
        leases = at.leases or {peer: (SampleRange(20 * place, 20 * place + 20),) for place, peer in enumerate(names)}
        roster = [Member(peer=peer, tokens=100, samples=leases[peer]) for peer in names]
        header = next_header(at, roster, payload(0).digest)
        log.append(header, state(0), None)
        at = at.append(header)
        sizes.append((tmp_path / ENTRIES).stat().st_size)
    assert max(after - before for before, after in pairwise(sizes)) < 500
    assert opened(tmp_path).headers(3, 4) == [at.last]


@pytest.mark.parametrize("place", range(0, 1595, 29))
def test_a_damaged_payload_is_named_and_removed(tmp_path: Path, place: int, caplog: pytest.LogCaptureFixture) -> None:
    log = opened(tmp_path)
    fill(log, HEADERS[:2])
    path = payload_path(tmp_path / PAYLOADS, 1, HEADERS[1].payload)
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 4
    path.write_bytes(damaged)
    assert log.payload(HEADERS[1].payload) is None
    assert str(path) in caplog.text
    assert not path.exists()
    assert log.payload(HEADERS[0].payload) == payload(0)
    log.append(HEADERS[1], None, payload(1))
    assert log.payload(HEADERS[1].payload) == payload(1)


@pytest.mark.parametrize("size", [0, 1, 8, 800, 1594, 1600])
def test_a_payload_of_another_length_is_removed(tmp_path: Path, size: int) -> None:
    log = opened(tmp_path)
    fill(log, HEADERS[:1])
    path = payload_path(tmp_path / PAYLOADS, 0, HEADERS[0].payload)
    path.write_bytes(path.read_bytes()[:size].ljust(size))
    assert log.payload(HEADERS[0].payload) is None
    assert not path.exists()


def test_a_payload_is_digested_as_in_a_round() -> None:
    from tests.peers.transfer.test_buffers import OWN, buffers

    mine = buffers()
    cut = ChunkedPayload.cut(memoryview(OWN), BLOCK)
    assert len(cut.chunk_digests) == mine.size.chunks
    assert cut.chunk_digests[3] == digest_of(OWN[slice(*mine.chunk_bytes(3))])


# Disks ------------------------------------------------------------------------------------------------------------
def full(*args: object, **kwargs: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LogFolderError, match=r"cannot keep the run's log in .*file/log: Not a directory\. \w"):
        opened(tmp_path / "file" / "log")


def test_a_folder_that_was_moved_away_may_be_moved_back(tmp_path: Path) -> None:
    here, there = tmp_path / "log", tmp_path / "elsewhere"
    log = opened(here)
    here.rename(there)
    with pytest.raises(LogFolderError, match=r"No such file or directory\. If the folder is gone, move it back"):
        log.append(HEADERS[0], state(0), None)
    there.rename(here)
    log.append(HEADERS[1], state(1), None)
    assert listed(opened(here)) == listed(log)


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    opened(tmp_path)
    left = [tmp_path / "entries.jsonl.partial", tmp_path / PAYLOADS / "3-00000000.payload.partial"]
    others = [tmp_path / "mine.partial", tmp_path / PAYLOADS / "mine.partial"]
    for path in (*left, *others):
        path.write_bytes(b"half")
    opened(tmp_path)
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in others)


def test_a_disk_that_fills_up_amid_an_entry_leaves_no_part_of_it(tmp_path: Path) -> None:
    """`log verify` would call it damage, and so would the next start."""
    log = opened(tmp_path)
    fill(log, HEADERS[:2])
    size = (tmp_path / ENTRIES).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, hard))
    try:
        with pytest.raises(LogFolderError, match="File too large"):
            log.append(HEADERS[2], state(2), None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / ENTRIES).stat().st_size == size


def test_what_a_full_disk_did_not_take_is_written_with_the_next_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(tmp_path)
    fill(log, HEADERS[:1])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(LogFolderError, match=r"No space left on device\. Free some space there\."):
            log.append(HEADERS[1], state(1), payload(1))
    with (tmp_path / ENTRIES).open("ab") as file:
        file.write(_entry_line(Entry.whole(HEADERS[1], state(1)))[:50])  # as far as it came
    assert log.next_index == 2
    log.append(HEADERS[2], state(2), payload(2))
    again = opened(tmp_path)
    assert listed(again) == listed(log)
    assert again.headers(0, 9) == HEADERS[:3]
    assert [again.payload(header.payload) is not None for header in HEADERS[:3]] == [True, False, True]


def test_an_entry_is_kept_when_its_payload_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(tmp_path)
    fill(log, HEADERS[:1])
    monkeypatch.setattr("peers.log.folder.write_whole", full)
    with pytest.raises(LogFolderError):
        log.append(HEADERS[1], state(1), payload(1))
    monkeypatch.undo()
    assert opened(tmp_path).headers(0, 9) == HEADERS[:2]


def test_a_disk_that_cannot_be_read_costs_the_payload_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = opened(tmp_path)
    fill(log, HEADERS[:1])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        assert log.payload(HEADERS[0].payload) is None
    assert "cannot read" in caplog.text
    assert log.payload(HEADERS[0].payload) == payload(0)
    monkeypatch.setattr(Path, "unlink", full)
    with pytest.raises(LogFolderError):
        log.prune(1)


def test_a_log_is_a_few_hundred_bytes_an_entry(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    fill(opened(tmp_path))
    assert (tmp_path / ENTRIES).stat().st_size < 5 * (2 * len(pack(HEADERS[4])) + 300)
    assert not caplog.records
