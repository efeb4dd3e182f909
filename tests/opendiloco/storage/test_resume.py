"""From a checkpoint and the log's payloads to the state that the run had, or to the last good one before it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.run import Run
from opendiloco.storage.loading import resume
from opendiloco.volunteer.local_workload import LocalWorkload
from peers.log.folder import PAYLOADS, LogFolder, RunLog, payload_path
from peers.transfer.snapshots import Snapshot
from peers.values.chunks import ChunkedPayload
from peers.values.identity import Identity
from peers.values.wire import digest_of
from peers.values.workload import SnapshotError
from tests.opendiloco.training.recorded_run import BLOCK_BYTES, RecordedRun, amendment, record
from tests.opendiloco.volunteer.test_local_workload import StateOnly
from tests.peers.logs import next_header

VALUES = 2500
ENTRIES = 5


@pytest.fixture(scope="module")
def recorded(small_config: RunConfig) -> RecordedRun:
    return record(Run.sign(small_config, Identity.generate()), np.ones(VALUES, np.float32), ENTRIES)


@pytest.fixture
def workload(small_config: RunConfig) -> LocalWorkload:
    return LocalWorkload(StateOnly(VALUES), small_config)


@pytest.fixture
def log(recorded: RecordedRun, tmp_path: Path) -> LogFolder:
    folder = LogFolder.open(tmp_path, recorded.empty_log, BLOCK_BYTES)
    recorded.fill(folder)
    return folder


def payload_file(log: LogFolder, index: int) -> Path:
    header = log.header_at(index)
    assert header is not None
    return payload_path(log.path / PAYLOADS, index, header.payload)


def assert_reaches(
    index: int, recorded: RecordedRun, workload: LocalWorkload, log: LogFolder | RunLog, start: int | None = None
) -> None:
    async def story() -> None:
        reached = await resume(workload, log, None if start is None else recorded.states[start])
        assert reached == recorded.empty_log.at(recorded.headers[index - 1] if index else None)
        assert await workload.state_digest() == recorded.states[index].state_digest

    asyncio.run(story())


@pytest.mark.parametrize("start", [None, 1, 2, 3, 4])
def test_amendments_are_replayed_with_the_log(
    start: int | None, small_config: RunConfig, workload: LocalWorkload, tmp_path: Path
) -> None:
    """A checkpoint's last header says what is in force there."""
    organiser = Identity.generate()
    run = Run.sign(small_config, organiser)
    signed = {index: amendment(run, index, organiser, outer_learning_rate=0.4 / index) for index in (1, 3)}
    amended = record(run, np.ones(VALUES, np.float32), ENTRIES, amendments=signed)
    log = LogFolder.open(tmp_path, amended.empty_log, BLOCK_BYTES)
    amended.fill(log)
    assert_reaches(ENTRIES, amended, workload, log, start)


@pytest.mark.parametrize("start", [None, 0, 1, 4, 5])
def test_the_whole_log_is_replayed_from_wherever_there_is_a_state(
    start: int | None, recorded: RecordedRun, workload: LocalWorkload, log: LogFolder, caplog: pytest.LogCaptureFixture
) -> None:
    assert_reaches(ENTRIES, recorded, workload, log, start)
    assert not caplog.records


def test_an_empty_log_is_the_beginning(recorded: RecordedRun, workload: LocalWorkload) -> None:
    assert_reaches(0, recorded, workload, RunLog(recorded.empty_log))


def test_a_checkpoint_alone_will_do(recorded: RecordedRun, workload: LocalWorkload) -> None:
    assert_reaches(3, recorded, workload, RunLog(recorded.empty_log), start=3)


def test_a_log_from_the_middle_needs_a_checkpoint(
    recorded: RecordedRun, workload: LocalWorkload, caplog: pytest.LogCaptureFixture
) -> None:
    log = RunLog(recorded.empty_log)
    recorded.fill(log, first=2)
    assert_reaches(0, recorded, workload, log)
    assert "entry 0 is not in this machine's log" in caplog.text
    assert_reaches(ENTRIES, recorded, workload, log, start=2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [Path.unlink, flip])
@pytest.mark.parametrize("start", [None, 1])
def test_a_payload_that_is_missing_or_damaged_ends_it(
    start: int | None,
    damage: Callable[[Path], object],
    recorded: RecordedRun,
    workload: LocalWorkload,
    log: LogFolder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    damage(payload_file(log, 3))
    assert_reaches(3, recorded, workload, log, start)
    assert "the payload of entry 3 is missing" in caplog.text


@pytest.mark.parametrize("start", [None, 2, 3])
def test_a_state_that_is_not_the_recorded_one_is_not_kept(
    start: int | None, recorded: RecordedRun, workload: LocalWorkload, caplog: pytest.LogCaptureFixture
) -> None:
    log = RunLog(recorded.empty_log)
    for index, header in enumerate(recorded.headers):
        state_digest = digest_of(b"other") if index == 3 else recorded.states[index + 1].state_digest
        log.append(header, state_digest, recorded.payloads[index])
    assert_reaches(3, recorded, workload, log, start)
    assert caplog.text.count("entry 3 leads to another state") == 1


def test_a_state_whose_digest_is_not_known_is_taken(recorded: RecordedRun, workload: LocalWorkload) -> None:
    log = RunLog(recorded.empty_log)
    for header, payload in zip(recorded.headers, recorded.payloads, strict=True):
        log.append(header, None, payload)
    assert_reaches(ENTRIES, recorded, workload, log)


def test_a_checkpoint_of_another_lineage_is_where_the_run_goes_on(
    recorded: RecordedRun, workload: LocalWorkload, caplog: pytest.LogCaptureFixture
) -> None:
    other = record(recorded.run, np.ones(VALUES, np.float32), ENTRIES, seed=2)
    log = RunLog(recorded.empty_log)
    other.fill(log)
    assert_reaches(2, recorded, workload, log, start=2)
    assert "entry 2: its previous does not follow" in caplog.text


def test_a_payload_that_no_encoder_makes_ends_it(
    recorded: RecordedRun, workload: LocalWorkload, caplog: pytest.LogCaptureFixture
) -> None:
    log = RunLog(recorded.empty_log)
    first, second = recorded.headers[:2]
    nonsense = ChunkedPayload.cut(memoryview(b"\xff" * len(recorded.payloads[0].data)), BLOCK_BYTES)
    log.append(first, None, recorded.payloads[0])
    log.append(next_header(recorded.empty_log.at(first), second.roster, nonsense.digest), None, nonsense)
    assert_reaches(1, recorded, workload, log)
    assert "entry 1 of this machine's log cannot be replayed" in caplog.text


def test_a_checkpoint_of_another_model_is_refused(recorded: RecordedRun, workload: LocalWorkload) -> None:
    async def story() -> None:
        before = await workload.state_digest()
        for saved in (
            Snapshot(None, recorded.states[0].state_digest, (), recorded.states[0].data[4:]),
            Snapshot(recorded.headers[0], recorded.states[1].state_digest, (), recorded.states[0].data),
        ):
            with pytest.raises(SnapshotError):
                await resume(workload, RunLog(recorded.empty_log), saved)
        assert await workload.state_digest() == before

    asyncio.run(story())
