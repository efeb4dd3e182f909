"""The time that workers have to compile. One whose compiler hangs would keep all others waiting, and cannot be told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from opendiloco.errors import WorkerError
from opendiloco.stages import WITH_A_COMPILER
from opendiloco.workers.process import WorkerProcess

COMPILING_SECONDS = 1800.0
"""Of all blocks together. Where it works, it takes seconds, or minutes on a slow machine."""


class CompilerHangError(WorkerError):
    """A worker's compiler has not come to an end."""


class CompilerWatch:
    """While the context is open, calls `on_hang` once if workers do not come to an end after one began to compile."""

    def __init__(self, workers: Sequence[WorkerProcess], on_hang: Callable[[CompilerHangError], None]) -> None:
        self._told = [(worker, worker.on_stage) for worker in workers]
        self._on_hang = on_hang
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        for worker, tell in self._told:
            worker.on_stage = partial(self._heard, tell)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker, tell in self._told:
            worker.on_stage = tell
        if self._timer is not None:
            self._timer.cancel()

    def _heard(self, tell: Callable[[str, float | None], None], stage: str, share: float | None) -> None:
        tell(stage, share)
        if stage in WITH_A_COMPILER and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(COMPILING_SECONDS, self._give_up)

    def _give_up(self) -> None:
        error = CompilerHangError(
            f"a worker's compiler has not come to an end in {COMPILING_SECONDS / 60:.0f} minutes.", "Use --no-compile."
        )
        self._on_hang(error)
