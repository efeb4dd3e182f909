"""The turns of evaluating theta: another peer each time, so that all lose the same training time."""

from __future__ import annotations

import math
from typing import NamedTuple

from opendiloco.config.run_config import EvaluationSection
from peers.log.state import LogState


class HeldOut(NamedTuple):
    """The loss of theta on held-out text. `is_runs_text` is true if that is the text that the run defines."""

    loss: float
    is_runs_text: bool


def is_our_turn(me: str, log: LogState, section: EvaluationSection) -> bool:
    """Return True if this peer evaluates theta at this place in the log. All peers there compute the same turns."""
    index, roster = log.position.index, log.roster
    if not section.every or not roster or index % section.every:
        return False
    return roster[index // section.every % len(roster)] == me


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Convert a loss in nats per token to bits per byte of text, which can be compared between tokenizers."""
    return loss / math.log(2) / bytes_per_token
