"""A callback for transformers' `Trainer`, which joins a run when training begins, and leaves the run when training
ends."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl

from opendiloco.library.loop import DiLoCo


class DiLoCoCallback(TrainerCallback):
    """A callback that joins a run when training begins, stops training when the run ends, and leaves when training
    ends.

    A Trainer whose training raises calls no callback. So a check runs every second: is the training call still running?
    """

    def __init__(self, run: str, **options: Any) -> None:
        """Create a callback that joins the run of the invite `run`. `options` are keyword arguments of `DiLoCo`."""
        self._run = run
        self._options = options
        self._diloco: DiLoCo | None = None

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        self._leave()  # an earlier training may have raised without leaving its run
        call = _Call.outside_callbacks(sys._getframe())
        diloco = DiLoCo(
            kwargs["model"],
            kwargs["optimizer"],
            self._run,
            is_abandoned=lambda: not call.is_under_way(),
            **self._options,
        )
        diloco.__enter__()
        self._diloco = diloco

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        control.should_training_stop |= self._diloco is None or self._diloco.finished

    def on_log(self, *_: Any, **kwargs: Any) -> None:
        logs: dict[str, float] = kwargs.get("logs", {})
        if self._diloco is not None and "loss" in logs:
            self._diloco.report(logs["loss"])

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        self._leave()

    def _leave(self) -> None:
        diloco, self._diloco = self._diloco, None
        if diloco is not None:
            diloco.__exit__()


class _Call:
    """A running call of a Python function. Another thread can check that the call has not ended."""

    def __init__(self, frame: FrameType) -> None:
        self._thread = threading.get_ident()
        self._frame: FrameType | None = frame

    @classmethod
    def outside_callbacks(cls, frame: FrameType) -> _Call:
        """Return the innermost caller of `frame` outside of this module and of transformers' callback code."""
        skipped = {__name__, TrainerCallback.__module__}
        while frame.f_globals.get("__name__") in skipped and frame.f_back is not None:
            frame = frame.f_back
        return cls(frame)

    def is_under_way(self) -> bool:
        """Return True until the call returns or raises. Another thread may call this method."""
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        if frame is None:
            self._frame = None  # frees the variables of the call that has ended
        return frame is not None
