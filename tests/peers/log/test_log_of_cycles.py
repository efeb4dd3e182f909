"""A log of several fragments in a folder, in memory and on its way to others: it grows, is cut and told by cycles."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from peers.log import chain as chain_module
from peers.log.chain import FRAMES, Chain, Entry, Stretch, header_of
from peers.log.folder import ENTRIES, PAYLOADS, LogFolder, RunLog, read_chain
from peers.log.header import NO_PAYLOAD, Header
from peers.log.state import LogError, LogState
from peers.transfer import lineage_fetch as headers_module
from peers.transfer.lineage_fetch import add_headers_before, serve_headers
from peers.values.chunks import ChunkedPayload
from peers.values.wire import digest_of, pack, unpack
from tests.peers.fakes import FakeTransport
from tests.peers.log.test_cycles import FRAGMENTS, LOG, entry
from tests.peers.logs import chain_of, next_header

BLOCK = 8  # bytes


def payload(index: int, fragment: int) -> ChunkedPayload:
    return ChunkedPayload.cut(memoryview(b"%08d" % (10 * index + fragment) * (3 + fragment)), BLOCK)


def lineage(count: int, log: LogState = LOG, offset: int = 0) -> tuple[list[Header], list[LogState]]:
    """The entries of so many cycles, and the log after each cycle. Nobody had trained the second fragment at first."""
    headers, logs = list[Header](), list[LogState]()
    for _ in range(count):
        for fragment in range(FRAGMENTS):
            index = log.position.index
            digest = payload(index + offset, fragment).digest
            if index == 0 and fragment == 1:
                view = log.of(1)
                absent = [view.expected(name).model_copy(update={"tokens": 0}) for name in "abc"]
                headers.append(next_header(view, absent, NO_PAYLOAD))
            else:
                headers.append(entry(log, fragment, payload=digest))
            log = log.append(headers[-1])
        logs.append(log)
    return headers, logs


HEADERS, LOGS = lineage(4)
FORK, FORKED = lineage(3, LOGS[1], offset=100)  # cycles 2, 3 and 4, otherwise


def state(index: int) -> bytes:
    return digest_of(b"state after %d" % index)


def fill(log: RunLog, headers: Sequence[Header] = HEADERS, seed: int = 0, offset: int = 0) -> None:
    """Apply entries, those of a cycle in any order. The last one of each brings the digest of the state."""
    for start in range(0, len(headers), FRAGMENTS):
        cycle = list(headers[start : start + FRAGMENTS])
        random.Random(seed + start).shuffle(cycle)
        for header in cycle:
            has_payload = header.payload != NO_PAYLOAD
            own = payload(header.index + offset, header.fragment) if has_payload else None
            log.append(header, state(header.index) if header is cycle[-1] else None, own)


def opened(path: Path) -> LogFolder:
    return LogFolder.open(path, LOG, BLOCK)


def listed(log: RunLog) -> list[object]:
    cycles = [(index, index + 1) for index in range(log.first, log.next_index)]
    return [
        (log.headers(*cycle), log.heads(*cycle), log.state_digest_at(cycle[0]), log.log_after(cycle[1]))
        for cycle in cycles
    ]


@pytest.fixture(params=["folder", "memory"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> RunLog:
    return RunLog(LOG) if request.param == "memory" else opened(tmp_path / "log")


@pytest.mark.parametrize("seed", range(4))
def test_entries_of_a_cycle_come_in_any_order(log: RunLog, seed: int) -> None:
    fill(log, seed=seed)
    assert (log.first, log.next_index, len(log)) == (0, 4, 4)
    assert log.headers(0, 9) == HEADERS
    assert log.headers(1, 2) == HEADERS[FRAGMENTS : 2 * FRAGMENTS]
    assert log.heads(0, 9) == [after.position.head for after in LOGS]
    assert log.heads_at([0, 1, 4, 5]) == {1: LOGS[0].position.head, 4: LOGS[3].position.head}
    assert [log.header_at(2, fragment) for fragment in range(FRAGMENTS)] == HEADERS[2 * FRAGMENTS : 3 * FRAGMENTS]
    assert log.header_at(2) == HEADERS[3 * FRAGMENTS - 1], "the one that closes it"
    assert [log.state_digest_at(index) for index in range(4)] == [state(index) for index in range(4)]
    assert [log.log_after(index + 1) for index in range(4)] == LOGS
    assert log.payload(HEADERS[4].payload) == payload(1, 1)
    if isinstance(log, LogFolder):
        assert listed(opened(log.path)) == listed(log)
        log.prune(3)
        assert log.payload(HEADERS[4].payload) is None
        assert len(list((log.path / PAYLOADS).iterdir())) == FRAGMENTS


def test_a_cycle_is_there_once_it_is_whole(log: RunLog) -> None:
    for header in HEADERS[: FRAGMENTS - 1]:
        log.append(header, None, None)
    assert (len(log), log.headers(0, 9), log.header_at(0)) == (0, [], None)
    log.append(HEADERS[FRAGMENTS - 1], state(0), None)
    assert log.headers(0, 9) == HEADERS[:FRAGMENTS]


def test_what_an_entry_lacked_is_added_later(log: RunLog) -> None:
    for header in HEADERS[:FRAGMENTS]:
        log.append(header, None, None)
    log.append(HEADERS[0], state(0), payload(0, 0))
    assert log.state_digest_at(0) == state(0)
    assert log.payload(HEADERS[0].payload) == payload(0, 0)
    assert len(log) == 1


def test_another_lineage_takes_over_by_whole_cycles(log: RunLog) -> None:
    fill(log)
    fill(log, FORK[: FRAGMENTS - 1], offset=100)
    assert log.headers(0, 9) == HEADERS
    fill(log, FORK, offset=100)
    assert log.headers(0, 9) == HEADERS[: 2 * FRAGMENTS] + FORK
    if isinstance(log, LogFolder):
        assert listed(opened(log.path)) == listed(log)


def test_a_log_begins_in_the_middle_and_what_led_there_is_put_before_it(log: RunLog) -> None:
    fill(log, HEADERS[2 * FRAGMENTS :])
    assert (log.first, log.next_index) == (2, 4)
    assert [log.log_after(index) for index in (3, 4)] == LOGS[2:]
    before = chain_of(HEADERS[: 2 * FRAGMENTS], LOG)
    with pytest.raises(LogError, match="lead up to entry 2"):
        log.prepend(before.stretch(0, 1, is_whole=True))
    log.prepend(before.stretch(1, 2, is_whole=True))
    log.prepend(before.stretch(0, 1, is_whole=True))
    assert log.headers(0, 9) == HEADERS
    assert [log.log_after(index + 1) for index in range(4)] == LOGS
    assert [log.state_digest_at(index) for index in (1, 2)] == [None, state(2)]
    if isinstance(log, LogFolder):
        assert listed(opened(log.path)) == listed(log)


def test_a_log_follows_anothers_up_to_a_cycle(log: RunLog) -> None:
    fill(log)
    log.follow(chain_of(FORK, LOG), 4)
    assert log.headers(0, 9) == HEADERS[: 2 * FRAGMENTS] + FORK[: 2 * FRAGMENTS]


def test_its_lineage_has_all_entries_and_what_named_it_after_each_cycle(log: RunLog) -> None:
    fill(log)
    lineage = log.lineage(LOGS[-1])
    assert lineage.entries == tuple(HEADERS)
    assert lineage.heads == tuple(after.position.head for after in LOGS)


def test_half_a_cycle_at_the_end_of_a_file_is_cut_off(tmp_path: Path) -> None:
    log = opened(tmp_path)
    fill(log)
    file = tmp_path / ENTRIES
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + len(HEADERS)
    file.write_bytes(b"".join(lines[:-1]))
    seen = list[Header]()
    chain, problem = read_chain(file, LOG, lambda entry, header, before: seen.append(header))
    assert seen == list(chain.headers(0, 9)) == HEADERS[: 3 * FRAGMENTS]
    assert "cut short" in str(problem)
    again = opened(tmp_path)
    fill(again, HEADERS[3 * FRAGMENTS :])
    assert listed(opened(tmp_path)) == listed(log)


def test_an_entry_in_anothers_place_is_refused() -> None:
    first, second, closing = chain_of(HEADERS[:FRAGMENTS], LOG).entries
    chain = Chain(LOG)
    chain.add(first)
    for wrong in (first, closing):
        with pytest.raises(LogError, match="not of 1"):
            chain.add(wrong)
    chain.add(second)
    chain.add(closing)
    assert chain.end == LOGS[0]


def test_entries_of_two_cycles_make_no_beginning() -> None:
    chain = Chain(LOG)
    chain.add(Entry.whole(HEADERS[FRAGMENTS], None))
    with pytest.raises(LogError, match="not of one cycle with"):
        chain.add(Entry.whole(HEADERS[2 * FRAGMENTS + 1], None))


# Others are told ------------------------------------------------------------------------------------------------
def read(stretch: Stretch) -> list[Header]:
    """What a peer makes of a stretch that knows nothing before it."""
    chain = Chain(LOG)
    for told, _ in unpack(Stretch, pack(stretch), 1 << 24).contents:
        chain.add(Entry.whole(header_of(chain.end, told), None))
    return list(chain.headers(0, 99))


@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_stretch_begins_with_a_whole_cycle(first: int) -> None:
    stretch = chain_of(HEADERS, LOG).stretch(first, 9, is_whole=True)
    assert sum(isinstance(told, Header) for told, _ in stretch.contents) == (FRAGMENTS if first else 0)
    assert read(stretch) == HEADERS[first * FRAGMENTS :]
    brief = chain_of(HEADERS, LOG).stretch(first, first + 1, is_whole=False)
    assert [told.fragment for told, _ in brief.contents] == list(range(FRAGMENTS))
    assert not any(isinstance(told, Header) for told, _ in brief.contents)


def test_a_stretch_is_bounded_by_whole_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_of(HEADERS, LOG)
    monkeypatch.setattr(chain_module, "STRETCH_LIMIT", 7)
    assert len(chain.stretch(0, 9, is_whole=False).contents) == 2 * FRAGMENTS
    monkeypatch.setattr(chain_module, "STRETCH_BYTES", 1)
    assert len(chain.stretch(0, 9, is_whole=False).contents) == FRAGMENTS
    monkeypatch.setattr(chain_module, "STRETCH_LIMIT", 1)
    assert len(chain.stretch(0, 9, is_whole=False).contents) == FRAGMENTS


@pytest.mark.parametrize("first", [0, 1, FRAMES])
def test_any_entry_of_a_long_log_is_found(first: int) -> None:
    headers, logs = lineage(FRAMES + 3)
    chain = chain_of(headers[first * FRAGMENTS :], LOG)
    for index in (first, FRAMES - 1, FRAMES, FRAMES + 1, FRAMES + 2):
        assert list(chain.headers(index, index + 1)) == (
            headers[index * FRAGMENTS : (index + 1) * FRAGMENTS] if index >= first else []
        )
        assert chain.after(index) == (logs[index] if index >= first else None)
    chain.cut(FRAMES + 1)
    assert chain.end == logs[FRAMES]
    assert chain.next_index == FRAMES + 1


def test_lineages_that_split_in_the_midst_of_a_cycle_share_what_came_before(tmp_path: Path) -> None:
    """Regression: an entry that both have was not counted to the other lineage's cycle, which never became whole."""
    shared = entry(LOGS[2], 0, payload=payload(3, 0).digest)

    def went_on(offset: int) -> list[Header]:
        log, headers = LOGS[2].append(shared), [shared]
        for fragment in range(1, FRAGMENTS):
            headers.append(entry(log, fragment, payload=payload(3 + offset, fragment).digest))
            log = log.append(headers[-1])
        return headers + lineage(1, log, offset)[0]

    ours, theirs = went_on(0), went_on(100)
    assert [one == other for one, other in zip(ours, theirs, strict=True)] == [True] + [False] * (2 * FRAGMENTS - 1)
    whole = 3 * FRAGMENTS
    for log in (RunLog(LOG), opened(tmp_path)):
        for header in HEADERS[:whole] + ours:
            log.append(header, None, None)
        chain = Chain(LOG)
        for header in HEADERS[:whole] + theirs:
            chain.add(Entry.whole(header, None))
        log.follow(chain, 5)
        assert log.headers(0, 9) == HEADERS[:whole] + theirs
        for header in ours:  # and back, as it was told at first
            log.append(header, None, None)
        assert log.headers(0, 9) == HEADERS[:whole] + ours
    assert opened(tmp_path).headers(0, 9) == HEADERS[:whole] + ours


def test_an_entry_that_is_told_again_disturbs_no_cycle() -> None:
    log = RunLog(LOG)
    fill(log, HEADERS[: 2 * FRAGMENTS])
    third = HEADERS[2 * FRAGMENTS : 3 * FRAGMENTS]
    log.append(third[0], None, None)
    for header in HEADERS[FRAGMENTS : 2 * FRAGMENTS]:
        log.append(header, None, None)
    for header in third[1:]:
        log.append(header, None, None)
    assert log.headers(0, 9) == HEADERS[: 3 * FRAGMENTS]


def test_what_came_before_is_asked_for_in_stretches_that_a_donor_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with several fragments a stretch has fewer cycles, so that what was told never led up to the log."""
    donor, joiner = RunLog(LOG), RunLog(LOG)
    fill(donor)
    fill(joiner, HEADERS[3 * FRAGMENTS :])
    for module in (chain_module, headers_module):
        monkeypatch.setattr(module, "STRETCH_LIMIT", 2 * FRAGMENTS)

    async def scenario() -> None:
        transport = FakeTransport()
        transport.donors["donor"] = donors = FakeTransport("donor")
        await serve_headers(donors, {LOG.run: donor.stretch}, lambda run, peer: True)
        while joiner.first:
            assert await add_headers_before(transport, "donor", joiner)

    asyncio.run(scenario())
    assert joiner.headers(0, 9) == HEADERS
