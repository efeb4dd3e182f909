"""The tracking of a live run, which yields each state to which the log leads, in order, and compares it with the states
that peers report.

A follower computes the run's states again, and thereby audits what all peers report about theirs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from opendiloco.errors import DisagreementError
from opendiloco.host_memory import STATE_BYTES, HostMemory
from opendiloco.run import Run
from opendiloco.shared_memory import available_memory, check_available
from opendiloco.training.outer import LocalState
from peers.errors import DilocoPeerError, SwarmUnreachableError
from peers.log.header import Position
from peers.log.state import LogState
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.transfer.following import CannotFollowError, Donors, Following, FollowTransport
from peers.values.system import cancel_and_wait, start_task

logger = logging.getLogger(__name__)

POSITIONS = 1024  # number of log positions whose states are remembered, for computed and for reported states each

T = TypeVar("T")


@dataclass(frozen=True)
class Reached:
    """A state of the run that this machine has computed from an entry, or fetched as a snapshot."""

    log: LogState
    state_digest: bytes
    is_snapshot: bool
    agreeing: int  # number of peers that have reported this state so far

    @property
    def index(self) -> int:
        """The number of outer steps after which the run is in this state."""
        return self.log.position.index


@dataclass(frozen=True)
class Disagreement:
    """A difference between a peer and the log after `index` outer steps: the state digest that the peer has reported
    (`said`), and the digest of the state to which the log leads (`expected`)."""

    index: int
    peer: str
    said: bytes
    expected: bytes


class Audit:
    """A comparison of the states that peers report with those that this machine computes. Either may arrive first."""

    def __init__(self) -> None:
        self.disagreements: list[Disagreement] = []
        self._computed: OrderedDict[Position, bytes] = OrderedDict()
        self._reported: OrderedDict[Position, dict[str, bytes]] = OrderedDict()

    def heard(self, heartbeats: Iterable[Heartbeat]) -> None:
        for beat in heartbeats:
            if beat.state is PeerState.ARCHIVING:
                continue  # an archive has no state of its own
            position = Position(index=beat.index, head=beat.head)
            reports = _remembered(self._reported, position, {})
            if reports.get(beat.peer) != beat.state_digest:
                reports[beat.peer] = beat.state_digest
                self._compare(position, beat.peer)

    def computed(self, position: Position, state_digest: bytes) -> None:
        self._computed.pop(position, None)
        _remembered(self._computed, position, state_digest)
        for peer in self._reported.get(position, {}):
            self._compare(position, peer)

    def agreeing(self, position: Position) -> int:
        """Return the number of peers that have reported the same state at `position` as this machine has computed."""
        digests = self._reported.get(position, {}).values()
        return sum(digest == self._computed.get(position) for digest in digests)

    def check(self) -> None:
        """Raise DisagreementError if any peer has reported another state than the one to which the log leads."""
        if self.disagreements:
            first, peers = self.disagreements[0], {one.peer for one in self.disagreements}
            raise DisagreementError(
                f"{len(peers)} peer{'s' * (len(peers) > 1)} had another state than the log leads to, "
                f"first {first.peer} after outer step {first.index}.",
                "If all peers had, this machine may be at fault: follow the run from another one.",
            )

    def _compare(self, position: Position, peer: str) -> None:
        reported, expected = self._reported[position][peer], self._computed.get(position)
        if expected not in (None, reported):
            found = Disagreement(position.index, peer, reported, expected)
            if found not in self.disagreements:
                self.disagreements.append(found)


def _remembered(known: OrderedDict[Position, T], position: Position, value: T) -> T:
    """Return the value stored for a position. If there is none, store `value`, and drop the oldest position when there
    are more than POSITIONS."""
    if position not in known:
        known[position] = value
        if len(known) > POSITIONS:
            known.popitem(last=False)
    return known[position]


async def states_until(
    last: Callable[[LogState], int], following: Following, audit: Audit, poll: float
) -> AsyncIterator[Reached | Disagreement]:
    """Yield a snapshot of the run, then each later state up to the outer step that `last` returns for the present log,
    and each peer's disagreement with the log as soon as it is found.

    New entries are fetched every `poll` seconds. If an entry cannot be fetched, or the run has continued another
    lineage, the states begin anew with a snapshot. While no peer is online, this waits.
    """

    async def advance() -> bool | None:
        """Fetch and apply one entry, and return False. Return True if a snapshot was fetched instead, or None if there
        is no new entry."""
        try:
            advanced = await following.advance()
        except CannotFollowError as error:
            await following.begin(error.least)
            logger.info("%s Tracking restarts from a new snapshot.", error.message)
            return True
        finally:
            audit.heard(following.donors.heartbeats)
        return None if advanced is None else False

    await retrying(following.begin, poll)
    audit.heard(following.donors.heartbeats)
    is_snapshot: bool | None = True
    yielded = 0  # number of items of `audit.disagreements` that were yielded
    while True:
        position = following.log.position
        if is_snapshot is not None:
            audit.computed(position, following.state_digest)
            yield Reached(following.log, following.state_digest, is_snapshot, audit.agreeing(position))
        new = audit.disagreements[yielded:]
        yielded += len(new)
        for disagreement in new:
            yield disagreement
        if position.index >= last(following.log):
            return
        if is_snapshot is None:
            await asyncio.sleep(poll)
        is_snapshot = await retrying(advance, poll)


async def retrying(attempt: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Call `attempt`, and return its result. While no peer is online, call it again every `seconds` seconds, and log
    the wait once."""
    is_waiting = False
    while True:
        try:
            result = await attempt()
        except SwarmUnreachableError as error:
            if not is_waiting:
                logger.warning("%s Waiting for a peer.", error.message)
            is_waiting = True
            await asyncio.sleep(seconds)
        else:
            if is_waiting:
                logger.info("a peer is online again")
            return result


async def state_for(run: Run, transport: FollowTransport) -> LocalState:
    """Return memory for the run's state, filled with zeros. Its size follows from the run's configuration, or else from
    the size that most peers report.

    Raises: SwarmUnreachableError when no peer reports it; MachineError when memory is too small.
    """
    fragments = run.config.streaming.fragments
    size = await Donors(transport, run.settings.empty_log).state_size(available_memory())
    values = size // STATE_BYTES if fragments is None else fragments[-1].stop
    host = HostMemory.of(values, run.config.codec)
    check_available("Following this run", host.beginning_to_follow)
    return LocalState(np.zeros(values, np.float32), run.config, fragments)


async def unless_failed(work: Coroutine[Any, Any, T], failure: Coroutine[Any, Any, DilocoPeerError]) -> T:
    """Return the result of `work`. If `failure` returns first, raise the error that it returns."""
    working, failing = start_task(work), start_task(failure)
    try:
        await asyncio.wait((working, failing), return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            raise failing.result()
        return working.result()
    finally:
        await cancel_and_wait(working, failing)
