"""Whose turn it is to evaluate theta: each time another peer's, so that all give up as little training."""

from __future__ import annotations

import math
from typing import NamedTuple

from opendiloco.config.run_config import EvaluationSection
from peers.log.state import LogState


class HeldOut(NamedTuple):
    """theta's loss on held-out text, and whether that is the text that the run means."""

    loss: float
    is_runs_text: bool


def is_our_turn(me: str, log: LogState, section: EvaluationSection) -> bool:
    """Return whether theta at this place in the log is to be evaluated by us. All peers there know by whom."""
    index, roster = log.position.index, log.roster
    if not section.every or not roster or index % section.every:
        return False
    return roster[index // section.every % len(roster)] == me


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Return a loss in nats per token in bits per byte of the text, which can be compared between tokenizers."""
    return loss / math.log(2) / bytes_per_token
