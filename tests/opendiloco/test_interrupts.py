"""Signals to a real process with `run_interruptible`: the first asks, the second insists, more change nothing."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from opendiloco.interrupts import Interrupts, run_interruptible


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


def test_errors_pass_through() -> None:
    async def main(interrupts: Interrupts) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_interruptible(main)
