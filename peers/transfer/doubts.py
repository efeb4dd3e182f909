"""When whoever only follows a run believes an entry that too few have signed to certify it.

A minority that goes on alone has waited for the partition grace, and so does whoever follows it. If most of the roster
are there, they make an entry of their own, and that is certified.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from peers.log.certificate import Proof
from peers.log.header import Position
from peers.log.state import LogState
from peers.presence.heartbeat import Heartbeat
from peers.values.clock import now

logger = logging.getLogger(__name__)


class Doubts:
    """Remembers since when there is nothing certified to follow where one follower of a run is in its log."""

    def __init__(self, grace: float) -> None:
        """`grace`: seconds for which it waits."""
        self._grace = grace
        self._place: Position | None = None
        self._since = 0.0

    def may_follow(self, log: LogState, proof: Proof, beats: Iterable[Heartbeat]) -> bool:
        """Whether to follow an entry after `log` for which this speaks. While most of those who could certify one are
        there, too, as `beats` say, it is not: else anybody could put one there."""
        if proof.is_certified:
            return True
        index, voters = log.position.index, len(log.voters)
        if self._place != log.position:
            self._place, self._since = log.position, now()
            logger.warning("of %d peers only %d have signed entry %d: waiting for others", voters, proof.signers, index)
        head = log.position.head
        here = {beat.peer for beat in beats if beat.head == head and log.counts(beat.peer, beat.incarnation)}
        if now() - self._since < self._grace or 2 * len(here) > voters:
            return False
        logger.warning("entry %d is followed, though it is not certified", index)
        return True
