"""Following a run's log without a part in it: a snapshot, and then entry after entry, from whoever is furthest on.

Whoever evaluates or exports a run, mirrors it or looks over its shoulder follows it so.
"""

from __future__ import annotations

from typing import Protocol

from peers.buffers import PayloadBuffers
from peers.download import PullTransport
from peers.errors import RemoteProtocolError, SwarmUnreachableError
from peers.headers import fetch_headers
from peers.heartbeat import Heartbeat
from peers.log import Header, LogError, LogState
from peers.membership import DONATING
from peers.payloads import PayloadError, Payloads
from peers.settings import RunSettings
from peers.snapshot_fetch import fetch_snapshot
from peers.storage import Storage
from peers.streams import PeerUnreachableError
from peers.workload import BadBlocksError, SnapshotError, Workload


def nobody_trains(run: str) -> SwarmUnreachableError:
    return SwarmUnreachableError(
        f"nobody trains in the run {run} now, so nobody has its state.", "Ask a volunteer to join it again."
    )


class FollowTransport(PullTransport, Protocol):
    async def connect(self, peer_id: str, addresses: tuple[str, ...]) -> bool: ...
    async def heartbeats(self, run_id: str) -> list[Heartbeat]: ...


class Following:
    """The state of a run on this machine. `log` is where in it the workload's state is."""

    def __init__(self, transport: FollowTransport, workload: Workload, settings: RunSettings, storage: Storage) -> None:
        self.log = settings.empty_log
        self._transport = transport
        self._workload = workload
        self._storage = storage
        self._buffers = PayloadBuffers(workload)
        self._payloads = Payloads(transport, settings.run, self._buffers)
        self._connected: set[str] = set()

    async def live(self) -> list[Heartbeat]:
        """Of the peers that have the state, the furthest on first. Raises: SwarmUnreachableError if nobody has."""
        beats = [beat for beat in await self._transport.heartbeats(self.log.run) if beat.state in DONATING]
        beats.sort(key=lambda beat: (beat.lineage_tokens, beat.sequence), reverse=True)
        for beat in beats:
            if beat.peer not in self._connected and await self._transport.connect(beat.peer, beat.addresses):
                self._connected.add(beat.peer)
        if not beats:
            raise nobody_trains(self.log.run)
        return beats

    async def begin(self, least: int = 0) -> None:
        """Take over a snapshot, at index `least` or later.

        Raises: SwarmUnreachableError when no peer gives one that holds up.
        """
        donors = [beat.peer for beat in await self.live()]
        reasons = []
        while donors:
            try:
                snapshot, _ = await fetch_snapshot(
                    self._transport, donors, self.log, least, self._storage, self._workload.state_size
                )
                await self._workload.restore(snapshot.data, snapshot.state_digest)
            except (SnapshotError, OSError) as error:
                reasons.append(f"{donors.pop(0)}: {error}")
            else:
                self.log = self.log.at(snapshot.last)
                return
        raise SwarmUnreachableError(f"no peer gave its state: {'; '.join(reasons)}.", "Try again in a minute.")

    async def advance(self) -> tuple[Header, bytes] | None:
        """Apply the next entry: its header, and the state digest after it; None when nobody is further on.

        Raises: SwarmUnreachableError when there is nobody, or nobody has what follows, or what they have does not.
        """
        beats = [beat for beat in await self.live() if beat.lineage_tokens > self.log.lineage_tokens]
        if not beats:
            return None
        donors, reasons = [beat.peer for beat in beats if beat.index > self.log.position.index], list[str]()
        for donor in donors:
            try:
                log = await self._next(donor)
                assert log.last is not None
                await self._payloads.fetch(log.last, donors)
                payload = self._buffers.kept.get(log.last.payload)
                assert payload is not None
                state_digest = await self._workload.apply(payload.data)
            except (PeerUnreachableError, RemoteProtocolError, LogError, PayloadError, BadBlocksError) as error:
                reasons.append(f"{donor}: {error}")
            else:
                self.log = log
                return log.last, state_digest
        raise SwarmUnreachableError(
            f"nobody could tell what follows outer step {self.log.position.index}: {'; '.join(reasons)}.",
            "Begin again, with a new snapshot.",
        )

    async def _next(self, donor: str) -> LogState:
        """Raises: PeerUnreachableError, RemoteProtocolError, LogError."""
        index = self.log.position.index
        headers = await fetch_headers(self._transport, donor, self.log.run, index, index + 1)
        if not headers:
            raise LogError(f"it has no entry {index}")
        return self.log.append(headers[0])
