"""Keeping the log: what was before we came is asked for."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from peers.driver import replication as recorder_module
from peers.driver.driver import Driver
from peers.driver.replication import _Recorder
from peers.log.folder import LogFolder, LogFolderError, RunLog, proof_path
from peers.protocol.effects import Apply
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.lineage_fetch import StretchSource, serve_headers
from peers.transfer.payloads import serve_proofs
from peers.values.chunks import ChunkedPayload
from peers.values.wire import digest_of, pack
from tests.peers.audit.statements import two_commitments as proof
from tests.peers.fakes import FakeTransport
from tests.peers.founder import Founder
from tests.peers.logs import LOG, RUN, STATE, chain_of, first_log, next_header


def recorder_of(
    rig: Founder,
    log: RunLog,
    transport: FakeTransport | None = None,
    start: Callable[[Coroutine[None, None, None]], asyncio.Task[None]] = asyncio.create_task,
    told: list[bytes] | None = None,
) -> _Recorder:
    """Return a peer's recorder; `told` gets the digests of payloads that lie on the disk."""
    kept = SimpleNamespace(lies_on_disk=[].append if told is None else told.append)
    buffers, host = cast(PayloadBuffers, SimpleNamespace(kept=kept)), SimpleNamespace(peer=rig.peer, start=start)
    return _Recorder(log, transport or FakeTransport(), [buffers], cast(Driver, host))


@pytest.mark.parametrize("has_disk", [True, False])
def test_it_says_which_payloads_lie_on_a_disk(has_disk: bool, tmp_path: Path) -> None:
    async def scenario() -> None:
        rig, payload, told = Founder(), ChunkedPayload.cut(memoryview(b"first"), 8), list[bytes]()
        log = LogFolder.open(tmp_path, LOG, 8) if has_disk else RunLog(LOG, 0)
        recorder = recorder_of(rig, log, told=told)
        recorder.add(Apply(rig.header(payload.digest)), STATE, payload)
        await recorder.finish()
        assert told == ([payload.digest] if has_disk else [])
        assert log.payload(payload.digest) == payload

    asyncio.run(scenario())


def test_a_payload_that_the_disk_does_not_take_is_not_said_to_lie_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig, payload, told = Founder(), ChunkedPayload.cut(memoryview(b"first"), 8), list[bytes]()
        log = LogFolder.open(tmp_path / "log", LOG, 8)
        shutil.rmtree(tmp_path / "log")
        recorder = recorder_of(rig, log, told=told)
        recorder.add(Apply(rig.header(payload.digest)), STATE, payload)
        await recorder.finish()
        assert told == []

    asyncio.run(scenario())


def test_a_disk_that_takes_nothing_is_told_of_once_and_when_that_changes_or_is_over(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regressions: there was a warning for each entry; and, in a run with fragments, where only a cycle's end writes
    entries, the next fragment's entry was taken for a disk that works again."""
    reasons = ["No space left on device", "No space left on device", "Read-only file system", "", "", ""]
    ends_cycle = [True, True, True, False, True, True]

    def append(*arguments: object) -> None:
        if reason := reasons.pop(0):
            raise LogFolderError(f"cannot keep the run's log: {reason}.", "Make room there.")

    async def scenario() -> None:
        rig, payload, log = Founder(), ChunkedPayload.cut(memoryview(b"first"), 8), RunLog(LOG, 0)
        monkeypatch.setattr(log, "append", append)
        recorder = recorder_of(rig, log)
        first = rig.header(payload.digest)
        for index, ends in enumerate(ends_cycle):
            recorder.add(Apply(first.model_copy(update={"index": index})), STATE if ends else None, payload)
            await recorder.finish()

    asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records if record.name == recorder_module.__name__] == [
        "entries from 0 on are not on the disk: cannot keep the run's log: No space left on device. Make room there.",
        "entries from 2 on are not on the disk: cannot keep the run's log: Read-only file system. Make room there.",
        "the disk works again: entries from 4 on, and those missing before, are written",
    ]


def test_what_proves_an_annex_is_kept_beside_its_entry(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig, payload = Founder(), ChunkedPayload.cut(memoryview(b"first"), 8)
        log = LogFolder.open(tmp_path, LOG, 8)
        recorder = recorder_of(rig, log)
        recorder.add(Apply(rig.header(payload.digest), proofs=(b"one", b"two")), STATE, payload)
        await recorder.finish()
        for kept in (b"one", b"two"):
            assert proof_path(tmp_path, digest_of(kept)).read_bytes() == kept

    asyncio.run(scenario())


def test_what_proves_an_annex_is_fetched_where_it_was_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a peer that took an entry over from others had no proof beside it, for ever."""

    async def scenario() -> None:
        rig, payload = Founder(log=first_log()), ChunkedPayload(memoryview(b"second"), (digest_of(b"second"),))
        monkeypatch.setattr(recorder_module, "now", lambda: rig.now)
        me, (mine, theirs) = FakeTransport(), [LogFolder.open(tmp_path / name, LOG, 8) for name in ("me", "a")]
        shown = proof("c", rig.peer.log.position)
        theirs.keep_proofs([pack(shown)])
        me.donors["a"] = FakeTransport("a")
        await serve_proofs(me.donors["a"], {RUN: theirs})
        before = rig.peer.log
        header = next_header(before, [before.expected(peer) for peer in "ab"], payload.digest, [shown.fault])
        tasks = list[asyncio.Task[None]]()

        def start(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
            tasks.append(asyncio.create_task(work))
            return tasks[-1]

        recorder_of(rig, mine, me, start).add(Apply(header), STATE, payload)
        for task in tasks:  # those that these begin, too
            await task
        assert mine.proof(shown.fault.proof) == pack(shown)

    asyncio.run(scenario())


def test_who_does_not_have_the_beginning_of_the_log_is_not_the_only_one_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a donor that had joined no earlier than we was asked after every entry, and nobody else."""

    async def scenario() -> None:
        rig, payload = Founder(log=first_log()), ChunkedPayload(memoryview(b"second"), (digest_of(b"second"),))
        monkeypatch.setattr(recorder_module, "now", lambda: rig.now)
        first, log_here = rig.peer.log.last, rig.peer.log
        second = next_header(log_here, [log_here.expected(peer) for peer in "abc"], payload.digest)
        assert first is not None
        sources: dict[str, StretchSource] = {"a": chain_of([]).stretch, "c": chain_of([first]).stretch}
        me, log = FakeTransport(), RunLog(LOG, 0)
        for name, past in sources.items():
            me.donors[name] = FakeTransport(name)
            await serve_headers(me.donors[name], {RUN: past})
        recorder = recorder_of(rig, log, me)
        recorder.add(Apply(second), STATE, payload)
        await recorder.finish()
        assert log.headers(0, 2) == [first, second]

    asyncio.run(scenario())
