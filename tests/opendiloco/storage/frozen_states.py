"""States as the swarm freezes them, made up, and jobs for the process that writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from opendiloco.storage.checkpointer import checkpoint_job
from opendiloco.storage.writer import CheckpointJob, KeepingPlan
from peers.log.header import Header, Member
from peers.log.state import LogState
from peers.transfer.snapshots import FrozenSnapshot
from peers.transfer.storage import MemoryFile
from peers.values.chunks import digest_of_state
from peers.values.leases import SampleRange
from peers.values.wire import digest_of
from tests.peers.logs import next_header

RUN = "tiny-" + "a" * 32
VALUES = 300_000  # of each vector: 2.4 MB in all, so that there are three chunks


def header_at(index: int, run: str = RUN) -> Header:
    """A header whose entry takes the log to `index` outer steps."""
    log = LogState(run, digest_of(b"manifest"), samples_per_lease=8, tokens_per_sample=10)
    member = Member(peer="A", tokens=80, samples=(SampleRange(0, 8),))
    first = next_header(log, [member], digest_of(b"payload"))
    return Header(**(dict(first) | {"index": index - 1}))


def frozen(index: int, values: int = VALUES, run: str = RUN) -> FrozenSnapshot:
    """A state after `index` outer steps whose values depend on it."""
    state = np.random.default_rng(index).standard_normal(2 * values, np.float32).tobytes()
    memory = MemoryFile.in_memory(len(state))
    memory.data[:] = state
    return FrozenSnapshot(
        header_at(index, run) if index else None, digest_of_state([state]), (), memory.data, memory=memory
    )


def plan(base: Path, **more: Any) -> KeepingPlan:
    return KeepingPlan(base / RUN / "PeerA", **more)


def job(folder: Path, state: FrozenSnapshot, **more: Any) -> CheckpointJob:
    """To write `state` into `folder`, which is one of checkpoints."""
    return checkpoint_job(KeepingPlan(folder.parent, **more), state)
