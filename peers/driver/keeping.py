"""What a peer has of its run when it begins, and where it keeps what comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peers.log.folder import MemoryLog, RunLog
from peers.log.lineage import Lineage
from peers.log.payload import KEPT_BYTES
from peers.log.state import LogState
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.storage import MemoryStorage, Storage
from peers.values.workload import Blocked


@dataclass(frozen=True)
class Stores:
    """Where a peer keeps payloads, of each fragment apart, headers and snapshots."""

    buffers: tuple[PayloadBuffers, ...]
    log: RunLog
    storage: Storage


@dataclass(frozen=True)
class Keeping:
    """Where a peer's state is when it begins, and where the peer keeps what comes.

    `lineage` ends where in the log the workload's state is (None: before the first entry), with `state_digest`. `log`
    keeps what is applied from there, `storage` has room for snapshots (None: both in memory). `payload_bytes` of past
    payloads stay in memory in any case.
    """

    state_digest: bytes
    lineage: Lineage | None = None
    log: RunLog | None = None
    storage: Storage | None = None
    payload_bytes: int = KEPT_BYTES

    def stores(self, fragments: Sequence[Blocked], empty_log: LogState) -> Stores:
        """Return the stores of a run with these fragments."""
        log = MemoryLog(empty_log, 0) if self.log is None else self.log
        buffers = PayloadBuffers.of_each(fragments, self.payload_bytes, log.payload)
        return Stores(buffers, log, self.storage or MemoryStorage())
