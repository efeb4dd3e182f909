"""The recording of a volunteer's training as curves in TensorBoard or Weights & Biases.

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
    """A receiver of training values, such as TensorBoard. `record` does not wait for a disk or a network."""

    def configure(self, configuration: Mapping[str, Any]) -> None:
        """Record the configuration, as JSON values: the run's manifest and this machine's options."""

    def record(self, inner_step: int, values: Mapping[str, float]) -> None:
        """Record finite values, by name, for an inner step. A step may be recorded twice, because lost work is done
        again."""

    def close(self) -> None:
        """Write all values that are still in memory, and close the tracker."""


class TrackerSpec(NamedTuple):
    """A value of the option `--track`: the kind of tracker, and the folder or project to which it writes."""

    kind: str
    target: str

    @classmethod
    def parse(cls, text: str) -> TrackerSpec:
        """Return the kind and target that the text `tensorboard:FOLDER` or `wandb:PROJECT` names.

        Raises: ValueError for another text.
        """
        kind, _, target = text.partition(":")
        if kind not in TRACKERS or not target:
            raise ValueError(f"{text!r} is neither tensorboard:FOLDER nor wandb:PROJECT.")
        return cls(kind, target)


class TensorBoard:
    """A tracker that writes event files for `tensorboard --logdir FOLDER`, in a thread, at least every two minutes."""

    remedy = "Name a folder that can be written."

    def __init__(self, folder: str, run_id: str, peer_id: str) -> None:
        """Create the writer. Raises: ImportError if TensorBoard is not installed; OSError if the folder is unusable."""
        from tensorboard.summary import DirectoryOutput, Writer

        self._output: Any = DirectoryOutput(str(Path(folder).expanduser()))
        self._writer: Any = Writer(self._output)

    def configure(self, configuration: Mapping[str, Any]) -> None:
        """Write the configuration to the event files, as a Markdown text at step 0."""
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
    """A tracker that records to a project of Weights & Biases. The peers of a training run form a group, in which each
    is named by its peer id."""

    remedy = "Run `wandb login` first, or set WANDB_MODE=offline and upload later with `wandb sync`."

    def __init__(self, project: str, run_id: str, peer_id: str) -> None:
        """Start a wandb run. Raises: ImportError without wandb; wandb's errors without a login or network."""
        import wandb

        quiet = {"console": "off"}  # do not upload this process's printed output
        self._run: Any = wandb.init(project=project, group=run_id, name=peer_id, settings=quiet)
        self._run.define_metric("*", step_metric="inner_step")  # wandb's own steps cannot decrease; inner steps can

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
    """Create the tracker that `choice` names. Raises: MachineError if its package is missing or it cannot be used."""
    try:
        return TRACKERS[choice.kind](choice.target, run_id, peer_id)
    except ImportError as error:
        raise MachineError(
            f"--track {choice.kind}: the package for it cannot be imported: {first_line(error)}",
            f"Install it: pip install {choice.kind}",
        ) from error
    except Exception as error:  # each tracker's library raises its own errors
        message = f"--track {choice.kind}:{choice.target} cannot be used: {first_line(error)}"
        raise MachineError(message, TRACKERS[choice.kind].remedy) from error


@contextmanager
def tracking(choices: Sequence[TrackerSpec], run_id: str, peer_id: str) -> Iterator[list[Tracker]]:
    """Create the trackers, yield them, and close them at the end. Raises: MachineError if a tracker cannot be used."""
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
