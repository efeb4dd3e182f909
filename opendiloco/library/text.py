"""The run's text for the caller's loop: batches to train on, and the held-out text, on which peers take turns to
evaluate theta."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from opendiloco.data.tokenizer import build_tokenizer
from opendiloco.data.training_data import TokenizeAhead, TrainingData, load_data
from opendiloco.errors import first_line
from opendiloco.evaluation_turns import HeldOut
from opendiloco.library.model import LoopReplica
from opendiloco.library.swarm import LoopWorker
from opendiloco.run import Run
from opendiloco.training.evaluation import EVALUATED_AT_ONCE, held_out_loss

logger = logging.getLogger(__name__)


class RunsText:
    """Opens the text of a run when a batch or an evaluation first needs it, and evaluates theta on the held-out
    part."""

    def __init__(self, folders: Sequence[Path], evaluates: bool) -> None:
        """Create the text without opening it. `folders` replace the run's local sources. If `evaluates`, this
        peer takes turns with others to evaluate theta, until an evaluation fails."""
        self.folders = folders
        self.evaluates = evaluates
        self.opened: TrainingData | None = None

    def open(self, run: Run, worker: LoopWorker, tokenize_ahead: TokenizeAhead | None = None) -> TrainingData:
        """Return the run's training data, tokenized, and store them in `opened`. Raises: DataError, MachineError."""
        tokenizer = build_tokenizer(run.config.tokenizer)
        self.opened = load_data(run.config, tokenizer, None, tokenize_ahead)
        per_token = self.opened.held_out.bytes_per_token(run.config.evaluation.windows, tokenizer)
        worker.telemetry.bytes_per_token = per_token
        return self.opened

    def evaluate(self, run: Run, worker: LoopWorker, replica: LoopReplica) -> HeldOut | None:
        """Return theta's loss on the run's held-out text, or None if this loop does not evaluate or the evaluation
        fails. The first evaluation opens the text."""
        if not self.evaluates or replica.rounds:
            return None
        try:
            if self.opened is None:
                logger.info(
                    "reading the run's text to evaluate theta on its held-out part; evaluates=False prevents this"
                )
            run = run.with_data(self.folders)
            section, held_out = run.config.evaluation, (self.opened or self.open(run, worker)).held_out
            with replica.showing(worker.vectors.theta, not run.config.streaming.is_plain) as model:
                is_bf16, device = run.config.training.precision == "bf16", next(model.parameters()).device.type
                precision = partial(torch.autocast, device, torch.bfloat16, enabled=is_bf16)
                loss, _ = held_out_loss(model, held_out, section.windows, EVALUATED_AT_ONCE, precision)
            is_runs_text = run.has_runs_text and section.digest in (None, held_out.digest(section.windows))
            return HeldOut(loss, is_runs_text)
        except Exception as error:  # the caller's model may need other arguments than transformers' models
            logger.warning("this loop does not evaluate theta any more: %s", first_line(error))
            self.evaluates = False
            return None
