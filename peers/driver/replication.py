"""The run's state on this machine: applying entries, recording them on the disk, fetching snapshots, and sending copies
to other peers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from peers import metrics
from peers.errors import LocalProtocolError, RemoteProtocolError
from peers.log.chain import Chain
from peers.log.folder import LogFolderError, RunLog
from peers.log.header import NO_PAYLOAD, Header
from peers.log.lineage import RECENT_ENTRIES
from peers.log.state import LogError
from peers.network.channel import PeerUnreachableError
from peers.presence.branches import reported_state
from peers.protocol.effects import Apply, FetchLineage, FetchPayload, FetchSnapshot
from peers.protocol.events import (
    Applied,
    Digested,
    LineageNotSeen,
    LineageSeen,
    PayloadFetched,
    PayloadNotFetched,
    SnapshotFailed,
    SnapshotRestored,
)
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.download import Download, PullTransport, shuffled
from peers.transfer.lineage_fetch import Compared, LineageError, LineageFetch, add_headers_before, serve_headers
from peers.transfer.payloads import MissingProofs, PayloadError, Payloads, serve_payloads, serve_proofs
from peers.transfer.snapshots import FrozenSnapshot, Snapshotter, Vouched, fetch_snapshot, serve_snapshots
from peers.transfer.storage import Storage
from peers.values.chunks import ChunkedPayload
from peers.values.system import now
from peers.values.workload import SnapshotError, Workload

if TYPE_CHECKING:
    from peers.driver.driver import Driver

logger = logging.getLogger(__name__)
FINISH_TIMEOUT = 10.0  # maximum seconds to wait until all entries are on the disk


class _Recorder:
    """The writer of entries and payloads to the disk, which works in the background and keeps their order."""

    def __init__(self, log: RunLog, transport: PullTransport, buffers: Sequence[PayloadBuffers], host: Driver) -> None:
        self._log = log
        self._transport = transport
        self._buffers = buffers
        self._host = host
        self._proofs = MissingProofs(transport, log)
        self._turn = asyncio.Lock()
        self._last: asyncio.Task[None] | None = None
        self._trouble = ""
        """The reason why the disk did not take the last entry; empty if it did."""

    def add(self, made: Apply, state_digest: bytes | None, payload: ChunkedPayload | None) -> None:
        """Start writing an applied entry with its certificate and proofs. `state_digest` is the digest of the state
        after the entry's cycle, or None if other entries of the cycle are still to be applied."""
        self._last = self._host.start(self._add(made, state_digest, payload))

    async def keep_payload(self, index: int, payload: ChunkedPayload) -> str:
        """Write the payload of entry `index`, before this peer votes for it. Return the reason of a failure, or ""."""
        if self._log.is_on_disk:
            try:
                await asyncio.to_thread(self._log.keep_payload, index, payload)
            except LogFolderError as error:
                return str(error)
        return ""

    async def follow(self, chain: Chain, end: int) -> None:
        """Write the entries of `chain`, the log fetched with a snapshot, to the disk, up to cycle `end` (exclusive)."""
        async with self._turn:
            try:
                await asyncio.to_thread(self._log.follow, chain, end)
            except LogFolderError as error:
                logger.warning("the entries before %d could not be written to the disk: %s", end, error)

    async def finish(self) -> None:
        """Wait until all added entries are on the disk, for at most FINISH_TIMEOUT seconds."""
        if self._last is not None:
            await asyncio.wait([self._last], timeout=FINISH_TIMEOUT)

    async def _add(self, made: Apply, state_digest: bytes | None, payload: ChunkedPayload | None) -> None:
        header = made.header
        async with self._turn:
            try:
                await asyncio.to_thread(self._log.append, header, state_digest, payload, made.certificate)
                if made.proofs:
                    await asyncio.to_thread(self._log.keep_proofs, made.proofs)
            except LogFolderError as error:  # training continues without this entry on the disk
                self._note(str(error), header.index)
            else:
                if state_digest is not None:  # only the end of a cycle writes entries, so only that shows a sound disk
                    self._note("", header.index)
                if self._log.is_on_disk:
                    self._buffers[header.fragment].kept.lies_on_disk(header.payload)
            if self._log.first:
                await self._add_headers_before()
            await asyncio.to_thread(self._proofs.look)
        self._host.start(self._proofs.fetch(self._donors))

    def _note(self, trouble: str, index: int) -> None:
        """Log the reason `trouble` why entries from `index` on are not on the disk, but only once. If `trouble` is
        empty, log that the disk works again."""
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if trouble:
            logger.warning("entries from %d on are not on the disk: %s", index, trouble)
        else:
            logger.warning("the disk works again: entries from %d on, and those missing before, are written", index)

    @property
    def _donors(self) -> list[str]:
        return list(self._host.peer.membership.live(now()))

    async def _add_headers_before(self) -> None:
        for donor in shuffled(self._transport, self._donors):
            with suppress(PeerUnreachableError, RemoteProtocolError, LogError, LogFolderError):
                if await add_headers_before(self._transport, donor, self._log):
                    return


class Replication:
    """The keeper of the run's state and log on this machine. It applies and records entries, sends the state and the
    log to other peers, and fetches both from other peers. `Driver` explains the callbacks."""

    def __init__(
        self,
        transport: PullTransport,
        workload: Workload,
        buffers: Sequence[PayloadBuffers],
        log: RunLog,
        storage: Storage,
        host: Driver,
        on_entry: Callable[[Header, bytes], None],
        on_snapshot: Callable[[FrozenSnapshot], None],
    ) -> None:
        self.worker = asyncio.Lock()
        """Held while the workers train, and while another state is fetched, so that they do not train from the old
        state."""
        self.snapshotter = Snapshotter(host.peer, workload, storage, host, on_snapshot)
        self.recorder = _Recorder(log, transport, buffers, host)
        self._on_entry = on_entry
        self._transport = transport
        self._workload = workload
        self._buffers = buffers
        self._log = log
        self._storage = storage
        self._host = host
        self._payloads = Payloads(transport, host.peer.settings.run, buffers)
        self._lineages = LineageFetch(transport, log, recent=host.peer.lineage.after)
        self._looking: asyncio.Task[None] | None = None
        self.download: Download | None = None
        """The newest download of a snapshot, if any."""
        self._applying: set[int] = set()

    async def serve(self) -> None:
        run = self._host.peer.settings.run
        await serve_payloads(self._transport, {run: self._buffers})
        await serve_headers(
            self._transport, {run: self._log.stretch}, lambda _, peer: peer in self._host.peer.log.leases
        )
        await serve_proofs(self._transport, {run: self._log})
        await serve_snapshots(self._transport, {run: self.snapshotter})

    def is_applying(self, fragment: int) -> bool:
        """Return True while an entry of this fragment is still to be applied."""
        return fragment in self._applying

    def apply(self, apply: Apply) -> None:
        self._applying.add(apply.header.fragment)
        self._host.start(self._apply(apply))

    async def _apply(self, apply: Apply) -> None:
        header = apply.header
        kept = self._buffers[header.fragment].kept.get(header.payload)
        async with self.snapshotter.changing():
            if kept is None and header.payload != NO_PAYLOAD:  # not in memory, but perhaps on the disk
                kept = await asyncio.to_thread(self._buffers[header.fragment].find, header.payload)
                if kept is None:
                    raise LocalProtocolError(f"entry {header.index} is to be applied, but its payload is not here")
            me, log = self._host.peer.me, self._host.peer.log
            if kept is None:
                await self._workload.unchanged(header.index, header.fragment)
            else:
                counts = header.tokens_of(me) > 0
                step = header.index, header.fragment, apply.keeps_work, counts
                await self._workload.apply(kept.data, *step, amendment=apply.amendment)
            self._applying.discard(header.fragment)
            metrics.ENTRIES_APPLIED.inc()
            if header.fragment == len(self._buffers) - 1:  # count tokens once a cycle: each of its entries has them
                metrics.TOKENS_COUNTED.inc(header.tokens_of(me))
            self._host.handle(Applied(header))
            state_digest = None
            if log.last is not None and not log.made:  # all entries of the cycle are applied
                state_digest = await self._workload.state_digest()
                self._host.handle(Digested(log.last, state_digest))
        self.recorder.add(apply, state_digest, kept)
        if log.last is not None and state_digest is not None:
            self._on_entry(log.last, state_digest)
            self._host.start(self._freeze())

    async def _freeze(self) -> None:
        try:
            await self.snapshotter.freeze_if_due()
        except (OSError, SnapshotError) as error:
            logger.error("could not make a snapshot of outer step %d: %s", self._host.peer.log.position.index, error)

    async def fetch_payload(self, fetch: FetchPayload) -> None:
        try:
            payload = await self._payloads.fetch(fetch.header, fetch.donors)
        except PayloadError as error:
            self._host.handle(PayloadNotFetched(fetch.header, str(error)))
        else:
            metrics.PAYLOADS_FETCHED.inc()
            trouble = await self.recorder.keep_payload(fetch.header.index, payload)
            self._host.handle(PayloadFetched(fetch.header, trouble))

    def fetch_lineage(self, fetch: FetchLineage) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self._looking = self._host.start(self._fetch_lineage(fetch))

    async def _fetch_lineage(self, fetch: FetchLineage) -> None:
        peer = self._host.peer
        beat = peer.presence.live().get(fetch.donor)
        head = beat.head if beat is not None and beat.index == fetch.index else None
        try:
            found = await self._lineages.compare(fetch.donor, fetch.index, fetch.others, peer.log, head)
        except LineageError as error:
            self._host.handle(LineageNotSeen(fetch.donor, str(error)))
        else:
            self._host.handle(LineageSeen(fetch.donor, found.theirs, found.ours))

    async def fetch_snapshot(self, fetch: FetchSnapshot) -> None:
        donors = (fetch.donor, *fetch.others)
        size = self._workload.state_size
        vouching: Compared  # comparison with the donor's log, by which the snapshot is checked

        async def vouch() -> Vouched:
            nonlocal vouching
            vouching = await self._vouching(fetch)
            trusted_digest = partial(reported_state, vouching.theirs, self._host.peer.presence.live().values())
            return Vouched(vouching.theirs, trusted_digest, fetch.least)

        try:
            async with self.worker:  # waits until cancelled training has ended
                snapshot = await fetch_snapshot(
                    *(self._transport, donors, self._host.peer.log, fetch.least, vouch, self._storage, size),
                    on_download=self._downloads,
                )
                async with self.snapshotter.changing():
                    await self._workload.restore(snapshot.data, snapshot.state_digest)
        except (SnapshotError, LineageError, OSError) as error:
            self._host.handle(SnapshotFailed(fetch.donor, str(error)))
            return
        metrics.STATES_FETCHED.inc()
        theirs = vouching.theirs
        await self.recorder.follow(vouching.chain, max(snapshot.index, theirs.start.position.index))
        heads = tuple(self._log.heads(snapshot.index - RECENT_ENTRIES, snapshot.index))
        doubt = theirs.doubt_before(snapshot.index, self._host.peer.lineage.doubt)
        state = snapshot.last, snapshot.state_digest, heads, snapshot.ends, doubt
        self._host.handle(SnapshotRestored(fetch.donor, *state))
        self.snapshotter.hold(snapshot)

    def _downloads(self, download: Download) -> None:
        self.download = download

    async def _vouching(self, fetch: FetchSnapshot) -> Compared:
        """Compare the donor's log with this peer's, and return the result without the donor's entries that this peer
        does not believe. Raises: LineageError."""
        peer = self._host.peer
        beat = peer.presence.live().get(fetch.donor)
        index = beat.index if beat is not None else fetch.least
        found = await self._lineages.compare(fetch.donor, index + 1, fetch.others, peer.log)
        believed = peer.believed(found.theirs, found.ours)
        if believed is None:
            raise LineageError(f"the log of {fetch.donor} is not better than this peer's")
        return replace(found, theirs=believed)
