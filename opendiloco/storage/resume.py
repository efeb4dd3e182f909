"""A run from this machine's own disk: a checkpoint, and the entries of the log that lead on from there."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from peers.log.folder import RunLog
from peers.log.header import NO_PAYLOAD, Header
from peers.log.state import LogError, LogState
from peers.transfer.following import step
from peers.transfer.storage import empty
from peers.values.workload import BadBlocksError, Workload

logger = logging.getLogger(__name__)


class Checkpoint(Protocol):
    """A state, and the entry that closes the last cycle that led to it, whose entries have the digests `ends`."""

    @property
    def last(self) -> Header | None: ...
    @property
    def ends(self) -> tuple[bytes, ...]: ...
    @property
    def state(self) -> memoryview: ...
    @property
    def state_digest(self) -> bytes: ...


@dataclass(frozen=True)
class InitialState:
    """The state before the first entry."""

    state: memoryview
    state_digest: bytes
    last: Header | None = None
    ends: tuple[bytes, ...] = ()


async def resume(
    workload: Workload, log: RunLog, checkpoint: Checkpoint | None = None, until: int | None = None
) -> LogState:
    """Bring a workload that has the run's initial state as far as a checkpoint and the payloads after it lead; at most
    to the state after `until` outer steps, if the checkpoint's is not later.

    Each state is held against the digest that was recorded when it was first reached. The first entry that is missing,
    or whose payload is missing or gives another state, is named in a warning, and the workload has the state before it.

    Returns the log as it ends there, which may be before `log` does.

    Raises: SnapshotError, and changes nothing, when the checkpoint is not a state of this model.
    """
    stop = log.next_index if until is None else min(log.next_index, until)
    if checkpoint is None:
        if stop == 0:
            return log.empty_log
        checkpoint = await _initial_state(workload)
    else:
        await workload.restore(checkpoint.state, checkpoint.state_digest)
    while True:
        reached, wrong = await _replay(workload, log, log.empty_log.at(checkpoint.last, checkpoint.ends), stop)
        if wrong is None:
            return reached
        stop = wrong
        await workload.restore(checkpoint.state, checkpoint.state_digest)  # there is no way back from a wrong state


async def _initial_state(workload: Workload) -> InitialState:
    state = empty(workload.state_size)
    await workload.copy_state(state)
    return InitialState(state, await workload.state_digest())


async def _replay(workload: Workload, log: RunLog, at: LogState, stop: int) -> tuple[LogState, int | None]:
    """Apply the cycles before `stop`, as far as they are sound.

    Returns the log as it ends there; and if a cycle has led to a wrong state, which the workload now has, its index.
    """
    while at.position.index < stop:
        index = at.position.index
        headers = log.headers(index, index + 1)
        if not headers:
            logger.warning("entry %d is not in this machine's log: nothing after it is replayed", index)
            break
        try:
            after = at
            for header in headers:
                after = after.append(header)
            found = {header.fragment: header.payload for header in headers if header.payload != NO_PAYLOAD}
            payloads = {part: await asyncio.to_thread(log.payload, digest) for part, digest in found.items()}
            if not all(payloads.values()):
                logger.warning("the payload of entry %d is not here: nothing from there on is replayed", index)
                break
            found_here = {part: payload.data for part, payload in payloads.items() if payload}
            await step(workload, index, found_here, at.amendment)
            state_digest = await workload.state_digest()
        except (LogError, BadBlocksError) as error:
            logger.warning("entry %d of this machine's log cannot be replayed: %s", index, error)
            break
        if log.state_digest_at(index) not in (None, state_digest):
            logger.warning("entry %d gives another state than it did before: the run goes on from before it", index)
            return at, index
        at = after
    return at, None
