"""What the protocol wants people to know: a line in the log for each, and a metric for what is counted."""

from __future__ import annotations

import logging

from peers import metrics
from peers.protocol.effects import Dropped, Note, TokensLost, Trouble

logger = logging.getLogger(__name__)


def note(effect: Note) -> None:
    logger.log(logging.getLevelNamesMapping()[effect.level.upper()], effect.text)


def dropped(effect: Dropped) -> None:
    """Name what broke the rules, and who sent it."""
    metrics.DROPPED.labels(effect.what).inc()
    logger.warning("dropped a %s of %s: %s", effect.what, effect.peer, effect.reason)


def tokens_lost(effect: TokensLost) -> None:
    metrics.TOKENS_LOST.labels(effect.what).inc(effect.tokens)
    logger.warning("%d tokens that we trained are lost: %s", effect.tokens, effect.reason)


def trouble(effect: Trouble) -> None:
    metrics.TROUBLED.set(bool(effect.reason))
    logger.warning("%s", effect.reason or "what this peer trains counts again")
