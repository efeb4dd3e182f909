"""A volunteer's side of checkpoints: one process at a time, and nothing that goes wrong reaches the training."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opendiloco.storage.checkpointer import CHECKPOINTS, Checkpointer
from opendiloco.storage.loading import Checkpoints
from opendiloco.storage.writer import KeepingPlan
from tests.child_processes import child_processes
from tests.opendiloco.storage.frozen_states import RUN, frozen, plan

Story = Callable[[Checkpointer], Coroutine[None, None, None]]


def play(plan: KeepingPlan, story: Story) -> None:
    """Also sees to it that no process is left."""
    before = child_processes()

    async def main() -> None:
        async with Checkpointer(plan) as checkpointer:
            await story(checkpointer)

    asyncio.run(main())
    assert child_processes() == before


def written(plan: KeepingPlan) -> list[int]:
    return Checkpoints(plan.checkpoints, RUN).indices()


def count(outcome: str) -> float:
    value: float = CHECKPOINTS.labels(outcome)._value.get()
    return value


def test_one_at_a_time_and_of_those_that_wait_the_newest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chosen, skipped = plan(tmp_path, keep_newest=5), count("skipped")

    async def story(checkpointer: Checkpointer) -> None:
        for index in (1, 2, 3):
            checkpointer.take(frozen(index))
        await checkpointer.idle()
        checkpointer.take(frozen(4))
        await checkpointer.idle()

    with caplog.at_level(logging.INFO, "opendiloco.storage.checkpointer"):
        play(chosen, story)
    assert written(chosen) == [4, 3]
    assert count("skipped") == skipped + 2
    assert "the checkpoint of outer step 4 is saved: " in caplog.text
    assert "skipped the checkpoint of outer step 2" in caplog.text


def test_one_that_comes_while_another_is_written_is_next(tmp_path: Path) -> None:
    chosen = plan(tmp_path)

    async def story(checkpointer: Checkpointer) -> None:
        checkpointer.take(frozen(1))
        await asyncio.sleep(0)  # the first has begun
        checkpointer.take(frozen(2))
        await checkpointer.idle()  # leaving would not wait for long

    play(chosen, story)
    assert written(chosen) == [2, 1]


def test_what_would_not_be_kept_is_not_written(tmp_path: Path) -> None:
    chosen = plan(tmp_path, keep_newest=0, keep_every=2)

    async def story(checkpointer: Checkpointer) -> None:
        for index in (1, 2, 3):
            checkpointer.take(frozen(index))
            await checkpointer.idle()

    play(chosen, story)
    assert written(chosen) == [2]


def test_leaving_ends_a_process_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("opendiloco.storage.checkpointer.CLOSE_SECONDS", 0.0)
    chosen = plan(tmp_path, rate=1.0)  # a byte a second

    async def story(checkpointer: Checkpointer) -> None:
        checkpointer.take(frozen(1))
        while not child_processes():
            await asyncio.sleep(0)

    play(chosen, story)
    assert written(chosen) == []
    assert "not finished" in caplog.text


@pytest.mark.parametrize(
    ("newer", "warning"),
    [
        ([], "the last checkpoint is saved, but the inner optimizer's moments were not finished"),
        ([2], "the last checkpoint was not finished"),
    ],
)
def test_leaving_tells_a_saved_checkpoint_from_moments_that_are_not(
    newer: list[int], warning: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the warning was "the last checkpoint was not finished", a second after the line that it is saved;
    later it was "saved" while a newer one waited."""
    monkeypatch.setattr("opendiloco.storage.checkpointer.CLOSE_SECONDS", 0.0)
    chosen, began = plan(tmp_path), asyncio.Event()

    async def hang(*_: object) -> None:
        began.set()
        await asyncio.Event().wait()

    async def story(checkpointer: Checkpointer) -> None:
        workers: Any = SimpleNamespace(keep_moments=hang)
        checkpointer.workers = workers
        checkpointer.take(frozen(1))
        await began.wait()
        for index in newer:
            checkpointer.take(frozen(index))

    play(chosen, story)
    assert written(chosen) == [1]
    assert warning in caplog.text


def test_leaving_waits_for_what_is_almost_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendiloco.storage.checkpointer.CLOSE_SECONDS", 60.0)
    chosen = plan(tmp_path)

    async def story(checkpointer: Checkpointer) -> None:
        checkpointer.take(frozen(1))

    play(chosen, story)
    assert written(chosen) == [1]


def test_a_folder_that_cannot_be_had_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chosen, failed = plan(tmp_path / "file"), count("not_saved")
    (tmp_path / "file").touch()

    async def story(checkpointer: Checkpointer) -> None:
        checkpointer.take(frozen(1))
        await checkpointer.idle()

    play(chosen, story)
    assert count("not_saved") == failed + 1
    assert "the checkpoint of outer step 1 failed: " in caplog.text
    assert f"{tmp_path}/file" in caplog.text
    assert "Training goes on" in caplog.text


def test_a_limit_that_no_checkpoint_fits_is_one_warning_until_one_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a small --max-disk was a long line after every outer step."""
    tight = plan(tmp_path, disk_limit=1)

    async def story(checkpointer: Checkpointer) -> None:
        for index, limits in enumerate((tight, tight, plan(tmp_path), tight, tight), 1):
            checkpointer._plan = limits
            checkpointer.take(frozen(index))
            await checkpointer.idle()

    play(tight, story)
    assert [line.partition(" failed")[0] for line in caplog.messages if "--max-disk" in line] == [
        "the checkpoint of outer step 1",
        "the checkpoint of outer step 4",
    ]


def test_a_machine_without_a_process_to_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no such program"))

    async def story(checkpointer: Checkpointer) -> None:
        checkpointer.take(frozen(1))
        await checkpointer.idle()

    play(plan(tmp_path), story)
    assert "cannot be started: No such file" in caplog.text


def test_a_remote_that_fails_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chosen = plan(tmp_path, remote="nonsense://me:secret@there/")

    async def story(checkpointer: Checkpointer) -> None:
        checkpointer.take(frozen(1))
        await checkpointer.idle()

    play(chosen, story)
    assert written(chosen) == [1]
    assert "is not at the remote: nonsense://me@there" in caplog.text
    assert "secret" not in caplog.text
