"""DiLoCo for transformers' `Trainer`: a callback that makes its training one peer's part in a run.

    Trainer(model, arguments, train_dataset=…, callbacks=[DiLoCoCallback("diloco:tiny-qz3h…4a@/ip4/…")]).train()

The Trainer's effective batch (per-device batch times gradient accumulation) must be the run's.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from opendiloco.diloco import DiLoCo


class DiLoCoCallback(TrainerCallback):
    """Joins the run when training begins, ends training with the run, and leaves when training ends."""

    def __init__(self, run: str, **options: Any) -> None:
        """`options` are those of `DiLoCo`."""
        self._run = run
        self._options = options
        self._diloco: DiLoCo | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        optimizer = kwargs["optimizer"]
        inner_optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        self._diloco = DiLoCo(kwargs["model"], inner_optimizer, self._run, **self._options)
        self._diloco.__enter__()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        control.should_training_stop |= self._diloco is None or self._diloco.finished

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs: dict[str, float] = kwargs.get("logs", {})
        if self._diloco is not None and "loss" in logs:
            self._diloco.report(logs["loss"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._diloco is not None:
            self._diloco.__exit__(None, None, None)
            self._diloco = None
