"""The stages of a process that starts, and how far each has come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

logger = logging.getLogger(__name__)

Watch = Callable[[str, float | None], None]
"""Called with a stage, such as "tokenizing stdlib", and the share of it that is done, 0 to 1; None if nobody knows."""
Item = TypeVar("Item")

COMPILING, COMPILING_AGAIN = "compiling", "compiling again, with an empty cache"
COMPILING_MORE = "compiling for more windows at once"
TRYING_ATTENTION = "trying attention within documents alone"
WITH_A_COMPILER = frozenset({COMPILING, COMPILING_AGAIN, COMPILING_MORE, TRYING_ATTENTION})
"""Stages in which PyTorch compiles. Compilers that it calls may hang."""
NOT_COMPILING = "not compiling, which would be faster"
NOT_COMPILING_THE_LOSS = "not compiling the loss, which would be faster"
LOOK_SECONDS = 1.0  # between two words of how far the same stage has come
QUIET_SECONDS = 10.0  # between two lines of the log about the same stage


_watch: Watch = lambda stage, share: None  # noqa: E731


@contextmanager
def watched_by(watch: Watch) -> Iterator[None]:
    """Tell `watch` of every stage of this process, from whichever thread, until the context ends."""
    global _watch
    before, _watch = _watch, watch
    try:
        yield
    finally:
        _watch = before


def at_stage(stage: str, share: float | None = None) -> None:
    """Say what comes now, or how far it has come."""
    _watch(stage, share)


class Coming:
    """Says now and then how far a stage has come that has begun."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._said = time.monotonic()

    def so_far(self, share: float) -> None:
        """Of the stage, this share is done."""
        if time.monotonic() - self._said > LOOK_SECONDS:
            self._said = time.monotonic()
            at_stage(self._stage, min(share, 1.0))


def passing(items: Iterable[Item], stage: str, total: int | None = None) -> Iterator[Item]:
    """Yield the items, of which there are `total`, and say now and then how many have passed."""
    at_stage(stage, None if total is None else 0.0)
    coming = Coming(stage)
    for number, item in enumerate(items, 1):
        yield item
        if total:
            coming.so_far(number / total)


class StageLog:
    """A `Watch` that logs each stage when it begins, and every few seconds how far it has come and how long yet."""

    def __init__(self) -> None:
        self._stage = ""
        self._began = self._said = 0.0

    def __call__(self, stage: str, share: float | None) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began, self._said = stage, now, now
            logger.info("%s", stage)
        elif now - self._said >= QUIET_SECONDS:
            self._said = now
            logger.info("%s: %s", stage, _how_far(share, now - self._began))


def _how_far(share: float | None, seconds: float) -> str:
    if not share:
        return f"for {seconds:.0f} s"
    left = seconds * (1 - share) / share
    return f"{share:.0%} after {seconds:.0f} s, about {left:.0f} s left"
