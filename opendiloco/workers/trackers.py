"""Curves of a volunteer's training in TensorBoard or Weights & Biases.

Both packages are optional, and imported only on request. This module runs in the peer process, so it needs no torch.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from opendiloco.errors import MachineError, first_line

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """A receiver of training values. It does not wait for a disk or a network."""

    def configure(self, configuration: Mapping[str, Any]) -> None:
        """Record the configuration of the values to come: the run's manifest and this machine, as JSON values."""

    def record(self, inner_step: int, values: Mapping[str, float]) -> None:
        """Record finite values by name at an inner step of the run. A step may come twice, because work can be lost."""

    def close(self) -> None:
        """Write all values that are still in memory."""


class TrackerSpec(NamedTuple):
    """A value of `--track`: the kind of tracker, and its folder or project."""

    kind: str
    target: str

    @classmethod
    def parse(cls, text: str) -> TrackerSpec:
        """Return the tracker that `tensorboard:FOLDER` or `wandb:PROJECT` names.

        Raises: ValueError for another text.
        """
        kind, _, target = text.partition(":")
        if kind not in TRACKERS or not target:
            raise ValueError(f"{text!r} is neither tensorboard:FOLDER nor wandb:PROJECT.")
        return cls(kind, target)


class TensorBoard:
    """Event files in a folder, for `tensorboard --logdir FOLDER`. A thread writes them, at least every two minutes."""

    remedy = "Name a folder that can be written."

    def __init__(self, folder: str, run_id: str, peer_id: str) -> None:
        """Create the writer. Raises: ImportError, OSError."""
        from tensorboard.summary import DirectoryOutput, Writer

        self._output: Any = DirectoryOutput(str(Path(folder).expanduser()))
        self._writer: Any = Writer(self._output)

    def configure(self, configuration: Mapping[str, Any]) -> None:
        """Write the configuration as a Markdown text that belongs to the whole folder."""
        import numpy as np
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        metadata = create_summary_metadata(display_name="configuration", description="")
        metadata.data_class = DATA_CLASS_TENSOR
        markdown = f"```json\n{json.dumps(configuration, indent=2)}\n```"
        text = make_tensor_proto(np.array(markdown.encode(), dtype=object))
        event = Event(wall_time=time.time(), step=0)
        event.summary.value.add(tag="configuration", tensor=text, metadata=metadata)
        self._output._ev_writer.add_event(event)

    def record(self, inner_step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, inner_step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run in a project of Weights & Biases. All peers of a training run form a group, in which each has its peer id
    as name."""

    remedy = "Run `wandb login` first, or set WANDB_MODE=offline and upload later with `wandb sync`."

    def __init__(self, project: str, run_id: str, peer_id: str) -> None:
        """Log in and create the run. Raises: ImportError; wandb's errors without a login or network."""
        import wandb

        quiet = {"console": "off"}  # keep this process's output private
        self._run: Any = wandb.init(project=project, group=run_id, name=peer_id, settings=quiet)
        self._run.define_metric("*", step_metric="inner_step")  # wandb's own steps cannot go back; inner steps can

    def configure(self, configuration: Mapping[str, Any]) -> None:
        self._run.config.update(dict(configuration), allow_val_change=True)

    def record(self, inner_step: int, values: Mapping[str, float]) -> None:
        self._run.log({"inner_step": inner_step, **values})

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, type[TensorBoard] | type[WeightsAndBiases]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


def _open_tracker(choice: TrackerSpec, run_id: str, peer_id: str) -> Tracker:
    """Return a new tracker. Raises: MachineError when its package is missing or it cannot be used."""
    try:
        return TRACKERS[choice.kind](choice.target, run_id, peer_id)
    except ImportError as error:
        raise MachineError(
            f"--track {choice.kind}: the package for it cannot be imported: {first_line(error)}",
            f"Install it: pip install {choice.kind}",
        ) from error
    except Exception as error:  # each library raises its own errors
        message = f"--track {choice.kind}:{choice.target} cannot be used: {first_line(error)}"
        raise MachineError(message, TRACKERS[choice.kind].remedy) from error


@contextmanager
def tracking(choices: Sequence[TrackerSpec], run_id: str, peer_id: str) -> Iterator[list[Tracker]]:
    """Yield the trackers, and close them at the end. Raises: MachineError."""
    with ExitStack() as stack:
        trackers = []
        for choice in choices:
            trackers.append(_open_tracker(choice, run_id, peer_id))
            stack.callback(_close, trackers[-1])
        yield trackers


def _close(tracker: Tracker) -> None:
    try:
        tracker.close()
    except Exception as error:
        logger.warning("%s: its last values may be lost: %s", type(tracker).__name__, error)
