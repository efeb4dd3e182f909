"""The turns of peers in evaluating theta. Members of the roster take turns, so that all lose equal training time."""

from __future__ import annotations

import math
from typing import NamedTuple

from opendiloco.config.run_config import EvaluationSection
from peers.log.state import LogState


class HeldOut(NamedTuple):
    """The loss of theta on held-out text, in nats a token. `is_runs_text` is True if the manifest defines the text."""

    loss: float
    is_runs_text: bool


def is_our_turn(me: str, log: LogState, section: EvaluationSection) -> bool:
    """Return True if the peer `me` must evaluate theta at the end of `log`. All peers with the same log choose the same
    peer."""
    index, roster = log.position.index, log.roster
    if not section.every or not roster or index % section.every:
        return False
    return roster[index // section.every % len(roster)] == me


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Return a loss in nats per token as bits per byte of text, which can be compared between tokenizers."""
    return loss / math.log(2) / bytes_per_token


LARGEST_EXPONENT = 100.0  # largest exponent of a perplexity that is shown, so that the perplexity stays finite


def loss_in_words(loss: float, bits: float | None) -> str:
    """Return a held-out loss as text with its perplexity and, unless they are unknown, its `bits` per byte."""
    in_bits = "" if bits is None else f", {bits:.3f} bits per byte"
    return f"{loss:.3f} (perplexity {math.exp(min(loss, LARGEST_EXPONENT)):,.1f}{in_bits})"
