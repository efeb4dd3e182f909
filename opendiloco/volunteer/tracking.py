"""Tracking a live run: every state that its log leads to, one after the other, and whether its peers have it, too.

Who follows a run computes its states again, and so is an auditor of all that its peers say of theirs.
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

POSITIONS = 1024  # that are remembered: of states computed here, and of what peers say, each

T = TypeVar("T")


@dataclass(frozen=True)
class Reached:
    """A state of the run that this machine has now: after an entry, or as it was taken over from others."""

    log: LogState
    state_digest: bytes
    is_snapshot: bool
    agreeing: int  # peers that have said, by now, that this is their state there

    @property
    def index(self) -> int:
        """Outer steps taken."""
        return self.log.position.index


@dataclass(frozen=True)
class Disagreement:
    """What a peer says of its state after `index` outer steps, and what the log leads to."""

    index: int
    peer: str
    said: bytes
    expected: bytes


class Audit:
    """Holds what peers say of their states against those that were computed here, whichever comes first."""

    def __init__(self) -> None:
        self.disagreements: list[Disagreement] = []
        self._computed: OrderedDict[Position, bytes] = OrderedDict()
        self._said: OrderedDict[Position, dict[str, bytes]] = OrderedDict()

    def heard(self, heartbeats: Iterable[Heartbeat]) -> None:
        for beat in heartbeats:
            if beat.state is PeerState.ARCHIVING:
                continue  # it has no state of its own
            position = Position(index=beat.index, head=beat.head)
            said = _remembered(self._said, position, {})
            if said.get(beat.peer) != beat.state_digest:
                said[beat.peer] = beat.state_digest
                self._compare(position, beat.peer)

    def computed(self, position: Position, state_digest: bytes) -> None:
        self._computed.pop(position, None)
        _remembered(self._computed, position, state_digest)
        for peer in self._said.get(position, {}):
            self._compare(position, peer)

    def agreeing(self, position: Position) -> int:
        """Return how many peers have named the state computed here."""
        return sum(said == self._computed.get(position) for said in self._said.get(position, {}).values())

    def check(self) -> None:
        """Raises: DisagreementError if any was found."""
        if self.disagreements:
            first, peers = self.disagreements[0], {one.peer for one in self.disagreements}
            raise DisagreementError(
                f"{len(peers)} peer{'s' * (len(peers) > 1)} had another state than the log leads to, "
                f"first {first.peer} after outer step {first.index}.",
                "If all of them had, suspect this machine, and follow the run from another.",
            )

    def _compare(self, position: Position, peer: str) -> None:
        said, expected = self._said[position][peer], self._computed.get(position)
        if expected not in (None, said):
            found = Disagreement(position.index, peer, said, expected)
            if found not in self.disagreements:
                self.disagreements.append(found)


def _remembered(known: OrderedDict[Position, T], position: Position, value: T) -> T:
    """Return what is known of a position, which is `value` if nothing was. The oldest is forgotten for it."""
    if position not in known:
        known[position] = value
        if len(known) > POSITIONS:
            known.popitem(last=False)
    return known[position]


async def states_until(
    last: Callable[[LogState], int], following: Following, audit: Audit, poll: float
) -> AsyncIterator[Reached | Disagreement]:
    """Yield a snapshot first, then every state up to the one after the `last` outer step, as that follows from the log
    until there, which is looked for every `poll` seconds; and disagreements when they are found.

    Where what follows cannot be had, or the run went on with another lineage, it begins anew with a snapshot. When no
    peer is there it waits.
    """

    async def advance() -> bool | None:
        """Return whether a snapshot was taken over rather than an entry applied; None: nothing new."""
        try:
            advanced = await following.advance()
        except CannotFollowError as error:
            await following.begin(error.least)
            logger.info("%s Begun anew with a snapshot.", error.message)
            return True
        finally:
            audit.heard(following.donors.heartbeats)
        return None if advanced is None else False

    await retrying(following.begin, poll)
    audit.heard(following.donors.heartbeats)
    is_snapshot: bool | None = True
    named = 0  # of the audit's disagreements
    while True:
        position = following.log.position
        if is_snapshot is not None:
            audit.computed(position, following.state_digest)
            yield Reached(following.log, following.state_digest, is_snapshot, audit.agreeing(position))
        new = audit.disagreements[named:]
        named += len(new)
        for disagreement in new:
            yield disagreement
        if position.index >= last(following.log):
            return
        if is_snapshot is None:
            await asyncio.sleep(poll)
        is_snapshot = await retrying(advance, poll)


async def retrying(attempt: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Repeat an attempt every so many seconds for as long as no peer is there; the log says so once."""
    is_waiting = False
    while True:
        try:
            result = await attempt()
        except SwarmUnreachableError as error:
            if not is_waiting:
                logger.warning("%s Waiting for somebody.", error.message)
            is_waiting = True
            await asyncio.sleep(seconds)
        else:
            if is_waiting:
                logger.info("somebody is there: going on")
            return result


async def state_for(run: Run, transport: FollowTransport) -> LocalState:
    """Return room for the run's state, of the size that the run says, or else most peers.

    Raises: SwarmUnreachableError when no peer says, MachineError when there is not so much memory.
    """
    fragments = run.config.streaming.fragments
    size = await Donors(transport, run.settings.empty_log).state_size(available_memory())
    values = size // STATE_BYTES if fragments is None else fragments[-1].stop
    host = HostMemory.of(values, run.config.codec)
    check_available("Following this run", host.beginning_to_follow)
    return LocalState(np.zeros(values, np.float32), run.config, fragments)


async def unless_failed(work: Coroutine[Any, Any, T], failure: Coroutine[Any, Any, DilocoPeerError]) -> T:
    """Return the result of `work`, unless what it stands on fails before. Raises: that failure."""
    working, failing = start_task(work), start_task(failure)
    try:
        await asyncio.wait((working, failing), return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            raise failing.result()
        return working.result()
    finally:
        await cancel_and_wait(working, failing)
