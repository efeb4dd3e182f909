"""The stages of a process's start, such as compiling, and the progress of each stage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

logger = logging.getLogger(__name__)

Watch = Callable[[str, float | None], None]
"""Called with a stage, such as "tokenizing stdlib", and the finished share of it, 0 to 1, or None if it is unknown."""
Item = TypeVar("Item")

COMPILING, COMPILING_AGAIN = "compiling", "compiling again, with an empty cache"
COMPILING_MORE = "compiling for more windows at once"
TRYING_ATTENTION = "trying attention within documents alone"
WITH_A_COMPILER = frozenset({COMPILING, COMPILING_AGAIN, COMPILING_MORE, TRYING_ATTENTION})
"""Stages in which PyTorch compiles. The compilers that it calls may hang."""
NOT_COMPILING = "not compiling, which would be faster"
NOT_COMPILING_THE_LOSS = "not compiling the loss, which would be faster"
LOOK_SECONDS = 1.0  # least seconds between two reports of the same stage's progress
QUIET_SECONDS = 10.0  # least seconds between two log lines about the same stage


_watch: Watch = lambda stage, share: None  # noqa: E731


@contextmanager
def watched_by(watch: Watch) -> Iterator[None]:
    """Call `watch` for each stage of the process's start, such as compiling, that any thread reports inside the `with`
    block."""
    global _watch
    before, _watch = _watch, watch
    try:
        yield
    finally:
        _watch = before


def at_stage(stage: str, share: float | None = None) -> None:
    """Pass a stage's name, and its finished share from 0 to 1 if known, to the current `Watch`."""
    _watch(stage, share)


class StageProgress:
    """A reporter of one stage's progress, at most once a second."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._reported = time.monotonic()

    def so_far(self, share: float) -> None:
        """Report the finished share of the stage, from 0 to 1."""
        if time.monotonic() - self._reported > LOOK_SECONDS:
            self._reported = time.monotonic()
            at_stage(self._stage, min(share, 1.0))


def passing(items: Iterable[Item], stage: str, total: int | None = None) -> Iterator[Item]:
    """Yield the items, and report the yielded share of `total` items at most once a second as the stage's progress."""
    at_stage(stage, None if total is None else 0.0)
    progress = StageProgress(stage)
    for number, item in enumerate(items, 1):
        yield item
        if total:
            progress.so_far(number / total)


class StageLog:
    """A `Watch` that logs each stage when it begins, and then every `QUIET_SECONDS` its progress and the time left."""

    def __init__(self) -> None:
        self._stage = ""
        self._began = self._logged = 0.0

    def __call__(self, stage: str, share: float | None) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began, self._logged = stage, now, now
            logger.info("%s", stage)
        elif now - self._logged >= QUIET_SECONDS:
            self._logged = now
            logger.info("%s: %s", stage, _how_far(share, now - self._began))


def _how_far(share: float | None, seconds: float) -> str:
    if not share:
        return f"for {seconds:.0f} s"
    left = seconds * (1 - share) / share
    return f"{share:.0%} after {seconds:.0f} s, about {left:.0f} s left"
