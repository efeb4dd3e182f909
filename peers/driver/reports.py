"""What the protocol wants people to know: a line in the log for each, and a metric for what is counted."""

from __future__ import annotations

import logging

from peers import metrics
from peers.protocol.events import Dropped, Note, TokensLost, Trouble

logger = logging.getLogger(__name__)


def note(note: Note) -> None:
    logger.log(logging.getLevelNamesMapping()[note.level.upper()], note.text)


def dropped(dropped: Dropped) -> None:
    """Name what broke the rules, and who sent it."""
    metrics.DROPPED.labels(dropped.what).inc()
    logger.warning("dropped a %s of %s: %s", dropped.what, dropped.peer, dropped.reason)


def tokens_lost(lost: TokensLost) -> None:
    metrics.TOKENS_LOST.labels(lost.what).inc(lost.tokens)
    logger.warning("%d tokens that we trained are lost: %s", lost.tokens, lost.reason)


def trouble(trouble: Trouble) -> None:
    logger.warning("%s", trouble.reason or "what this peer trains counts again")
