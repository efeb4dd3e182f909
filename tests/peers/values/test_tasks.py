"""Tasks: no exception of one is lost, whether its owner awaits it, cancels it, or never looks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import weakref

import pytest

from peers.values import system
from peers.values.system import cancel_and_wait, start_task


async def fail(error: Exception) -> None:
    raise error


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [str(record.exc_info[1]) for record in caplog.records if record.levelno >= logging.ERROR and record.exc_info]


def test_a_failed_task_that_no_caller_looks_at_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a path that could not be encoded ended the writing of moments, and no one heard of it."""
    monkeypatch.setattr(system, "UNSEEN_SECONDS", 0.0)

    async def begin() -> list[str]:
        kept = start_task(fail(UnicodeEncodeError("ascii", "ö", 0, 1, "no")))
        while not errors(caplog):
            await asyncio.sleep(0)
        assert kept.done()  # it was held meanwhile, so that asyncio itself said nothing
        return errors(caplog)

    [said] = asyncio.run(asyncio.wait_for(begin(), 10))
    assert "'ascii' codec" in said


@pytest.mark.parametrize(
    ("error", "is_awaited", "is_logged"),
    [
        (RuntimeError("a fault"), False, True),
        (RuntimeError("a fault"), True, False),  # its owner tells of it
        (ConnectionResetError("the world's"), False, False),
    ],
)
def test_a_task_that_failed_before_it_was_cancelled_is_logged_unless_its_owner_knows(
    caplog: pytest.LogCaptureFixture, error: Exception, is_awaited: bool, is_logged: bool
) -> None:
    async def begin() -> None:
        task = start_task(fail(error))
        if is_awaited:
            with pytest.raises(type(error)):
                await task
        await asyncio.sleep(0)
        await cancel_and_wait(task)

    asyncio.run(begin())
    assert errors(caplog) == ([str(error)] if is_logged else [])


def test_a_failed_task_that_was_awaited_is_not_kept_alive() -> None:
    """Regression: its traceback kept the memory of a volunteer that had left, as long as the process lived."""

    async def begin() -> weakref.ref[object]:
        task = start_task(fail(RuntimeError("a fault")))
        with contextlib.suppress(RuntimeError):
            await task
        return weakref.ref(task)

    async def scenario() -> bool:
        seen = await begin()
        await asyncio.sleep(0)  # the event loop itself holds it in the turn in which it woke its owner
        gc.collect()
        return seen() is None

    assert asyncio.run(scenario())
