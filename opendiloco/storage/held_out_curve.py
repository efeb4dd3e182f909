"""The losses of theta on held-out text that this machine has heard of, kept from one start of a peer to the next."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 24
"""Of a file that is read. A loss takes some 40 of them."""
MOST_LOSSES = 100_000
"""That are kept: an organiser may say that a run has any number of outer steps, and others claim losses of each."""


class HeldOutCurve:
    """Losses by outer step. With a file, each new one is appended to it; a file that cannot be written is given up."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._losses = {} if path is None else read_curve(path)

    def add(self, outer_step: int, loss: float) -> bool:
        """Keep a finite loss, unless there is one of that outer step, or too many. Return whether it was new."""
        if outer_step in self._losses or not math.isfinite(loss) or len(self._losses) >= MOST_LOSSES:
            return False
        self._losses[outer_step] = loss
        if self._path is not None:
            try:
                with self._path.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps({"outer_step": outer_step, "loss": loss}) + "\n")
            except OSError as error:
                logger.warning("%s is not written any more: %s", self._path, error.strerror or error)
                self._path = None
        return True

    @property
    def losses(self) -> Mapping[int, float]:
        """All losses, by outer step."""
        return self._losses


def read_curve(path: Path) -> dict[int, float]:
    """Return the losses in a file by outer step; nothing where there is none. Lines that say something else, such as
    half a line of a peer that was killed, are passed over."""
    losses = dict[int, float]()
    try:
        with path.open("rb") as file:
            lines = file.read(MOST_BYTES).splitlines()
    except OSError:
        return losses
    for line in lines:
        try:
            said = json.loads(line)
            outer_step, loss = said["outer_step"], float(said["loss"])
        except (ValueError, TypeError, KeyError):
            continue
        if type(outer_step) is int and outer_step >= 0 and math.isfinite(loss) and len(losses) < MOST_LOSSES:
            losses.setdefault(outer_step, loss)
    return losses
