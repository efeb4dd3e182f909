"""TensorBoard's event files, with text in them beside curves. Imports tensorboard, which is optional."""

from __future__ import annotations

import time

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary import DirectoryOutput
from tensorboard.util.tensor_util import make_tensor_proto


class EventFolder(DirectoryOutput):  # type: ignore[misc]
    """A folder of event files: what `tensorboard.summary.Writer` writes to, and text."""

    def emit_text(self, tag: str, markdown: str) -> None:
        """Write a text that belongs to the whole folder. TensorBoard shows it as Markdown."""
        metadata = create_summary_metadata(display_name=tag, description="")
        metadata.data_class = DATA_CLASS_TENSOR
        event = Event(wall_time=time.time(), step=0)
        text = make_tensor_proto(np.array(markdown.encode(), dtype=object))
        event.summary.value.add(tag=tag, tensor=text, metadata=metadata)
        self._ev_writer.add_event(event)
