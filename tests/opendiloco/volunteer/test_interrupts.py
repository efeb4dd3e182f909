"""Signals to a real process with `run_interruptible`: the first asks, the second insists, more change nothing. In
somebody else's program they do what they did, and are not lost."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from itertools import count
from types import FrameType
from typing import Any

import pytest

from opendiloco.volunteer.interrupts import REPEAT_SECONDS, Interrupts, RememberedInterrupt, run_interruptible
from tests.opendiloco.conftest import InterruptedWhenItDies


def send(number: int) -> None:
    os.kill(os.getpid(), number)


async def until_cancelled(tidied: list[str]) -> None:
    """Like a command that takes a while to tidy up, and is hurried meanwhile."""
    try:
        await asyncio.Event().wait()
    finally:
        send(signal.SIGINT)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tidied.append("up")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_asks(number: int) -> None:
    async def main(interrupts: Interrupts) -> str:
        asked = asyncio.Event()
        interrupts.polite = asked.set
        send(number)
        await asked.wait()
        return "polite"

    assert run_interruptible(main) == "polite"


def test_the_first_ends_what_cannot_be_asked() -> None:
    async def main(interrupts: Interrupts) -> str:
        send(signal.SIGINT)
        await asyncio.Event().wait()
        return "never"

    assert run_interruptible(main) is None


@pytest.mark.parametrize("is_polite", [True, False])
def test_whoever_wants_to_hear_of_a_signal_does(is_polite: bool) -> None:
    heard: list[str] = []

    async def main(interrupts: Interrupts) -> None:
        asked = asyncio.Event()
        interrupts.heard = lambda: heard.append("a signal")
        interrupts.polite = asked.set if is_polite else None
        send(signal.SIGTERM)
        await asked.wait()

    run_interruptible(main)
    assert heard == ["a signal"]


def test_the_second_insists_and_what_must_be_tidied_up_is() -> None:
    tidied: list[str] = []

    async def main(interrupts: Interrupts) -> None:
        interrupts.polite = lambda: send(signal.SIGINT)
        send(signal.SIGINT)
        await until_cancelled(tidied)

    with pytest.raises(KeyboardInterrupt):
        run_interruptible(main)
    assert tidied == ["up"]


def test_a_hang_up_does_not_insist() -> None:
    """A closing terminal sends it twice."""

    async def main(interrupts: Interrupts) -> str:
        interrupts.polite = lambda: None
        interrupts(signal.SIGHUP)
        interrupts(signal.SIGHUP)
        await asyncio.sleep(0)  # a task that was cancelled would not get beyond this
        return "polite"

    assert run_interruptible(main) == "polite"


def test_a_signal_that_comes_twice_at_once_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: under GNU timeout, which signals its child and then its group, a volunteer did not leave politely."""
    monkeypatch.setattr("opendiloco.volunteer.interrupts.now", count(100.0, REPEAT_SECONDS / 2).__next__)

    async def main(interrupts: Interrupts) -> str:
        interrupts.polite = lambda: None
        interrupts(signal.SIGTERM)
        interrupts(signal.SIGTERM)
        await asyncio.sleep(0)  # a task that was cancelled would not get beyond this
        interrupts(signal.SIGTERM)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(0)
        return "polite"

    assert run_interruptible(main) == "polite"


def test_errors_pass_through() -> None:
    async def main(interrupts: Interrupts) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_interruptible(main)


@pytest.mark.usefixtures("_handler_of_python", "_lost_in_silence")
def test_a_keyboard_interrupt_that_python_has_lost_is_raised_again_once() -> None:
    with RememberedInterrupt() as interrupt:
        interrupt.raise_again()
        InterruptedWhenItDies()
        with pytest.raises(KeyboardInterrupt):
            interrupt.raise_again()
        interrupt.raise_again()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("_handler_of_python")
def test_a_handler_of_the_users_goes_on_working_and_decides() -> None:
    heard = list[int]()

    def handler(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    signal.signal(signal.SIGINT, handler)
    with RememberedInterrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        interrupt.raise_again()
    assert heard == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.usefixtures("_handler_of_python")
def test_a_handler_that_was_set_meanwhile_stays() -> None:
    with RememberedInterrupt():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.usefixtures("_handler_of_python")
@pytest.mark.parametrize("former", [signal.SIG_DFL, signal.SIG_IGN])
def test_where_there_is_no_handler_there_is_none_of_ours(former: Any) -> None:
    signal.signal(signal.SIGINT, former)
    with RememberedInterrupt():
        assert signal.getsignal(signal.SIGINT) == former


@pytest.mark.usefixtures("_handler_of_python")
def test_sigterm_is_like_ctrl_c_unless_it_is_ignored_and_ends_a_forked_child() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with RememberedInterrupt() as interrupt:
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            interrupt.raise_again()
        child = multiprocessing.get_context("fork").Process(target=send, args=(signal.SIGTERM,))
        child.start()
        child.join(30)
        assert child.exitcode == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with RememberedInterrupt():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.usefixtures("_handler_of_python")
def test_another_thread_changes_nothing() -> None:
    """Python lets only the main one set handlers."""
    ended = list[bool]()

    def enter() -> None:
        with suppress(ValueError), RememberedInterrupt():
            ended.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(30)
    assert ended == [True]
