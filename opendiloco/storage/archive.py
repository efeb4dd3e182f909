"""Archives: bootstrap nodes that store runs, so that a run can continue after all of its volunteers have left.

An archive keeps, for each run that is announced to it: the headers of all entries, the proofs of the faults that they
name, the newest snapshots, and the payloads since. It serves them like a peer. It has no worker and no state of its
own, and takes no part in rounds. If its key is one of the run's archives, it signs heads of the log that it has
checked.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from pathlib import Path

from opendiloco.config.overrides import Overrides
from opendiloco.errors import AmendmentError, MachineError
from opendiloco.quantities import VALUE_BYTES, in_words
from opendiloco.run import Run
from opendiloco.shared_memory import available_memory, check_available
from opendiloco.storage.checkpointer import Checkpointer
from opendiloco.storage.loading import Checkpoints
from opendiloco.storage.run_folder import HeldOutCurve, RunFolder
from opendiloco.storage.writer import KeepingPlan, folder_bytes
from opendiloco.training.codec import BlockCodec, block_bytes
from peers import metrics
from peers.driver.driver import CALL, CALL_TIMEOUT
from peers.errors import RemoteProtocolError, SwarmUnreachableError, remedy_for
from peers.log.folder import LogFolder, LogFolderError, RunLog
from peers.log.head_signer import CannotSignError, HeadSigner, SignedFileError
from peers.log.header import NO_PAYLOAD, Position
from peers.log.lineage import RECENT_ENTRIES
from peers.log.state import LogError, LogState
from peers.messages.messages import Certified, Elsewhere, Inquire
from peers.messages.packing import pack_message, unpack_message
from peers.metrics import HEALTH
from peers.network.channel import PeerUnreachableError, RefusalError
from peers.network.run_failures import RunFailures
from peers.network.transport import HivemindTransport
from peers.presence.branches import reported_state
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.membership import PARTICIPATING
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.following import UncertifiedWait, next_in_log
from peers.transfer.lineage_fetch import Compared, LineageFetch, StretchSource, add_headers_before, serve_headers
from peers.transfer.payloads import MissingProofs, PayloadError, Payloads, serve_payloads, serve_proofs
from peers.transfer.snapshots import Snapshot, Vouched, ask_size, fetch_snapshot, serve_snapshots
from peers.transfer.storage import FolderStorage
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest
from peers.values.signed_heads import SignedHeads
from peers.values.system import cancel_and_wait, make_private_folder, next_sequence, now
from peers.values.wire import DIGEST_BYTES, WireError
from peers.values.workload import SnapshotError

logger = logging.getLogger(__name__)

POLL = 5.0  # most seconds between two checks for new runs, and between two checks of a run that has no peers
POLL_FIRST, POLL_PER_RUN = 1.0, 0.1  # least seconds between two such checks; seconds for each run of the archive
SIGNING_PAUSE = 60.0  # least number of seconds between two signatures of a run's heads by this archive
SIGNING_RETRY = 5.0  # seconds until an archive asks again for its earlier signed heads, if no peer has answered
ASKED = 32  # number of peers that an archive asks for the heads that it signed earlier, before it signs a new one
SNAPSHOT_SHARE = 4  # an archive stores every 4th snapshot of a run, since donors must send 8 bytes a parameter for each
NO_STATE = bytes(DIGEST_BYTES)
OF_PEERS = (PeerUnreachableError, RemoteProtocolError, SwarmUnreachableError, LogError, PayloadError, SnapshotError)
"""Errors of peers that do not serve data or serve wrong data. An archive's operator cannot act on them."""
FAILURES = (*OF_PEERS, OSError)
ASK_AGAIN = 1.0  # seconds until the first retry after an error of peers; the wait doubles after each further error


class ArchivedRun:
    """The archive of one run, which stores the run's log, proofs, payloads and snapshots, and serves them to peers.
    Implements `peers.transfer.snapshots.SnapshotSource`."""

    def __init__(self, run: Run, identity: Identity, transport: HivemindTransport, base: Path, room: _DiskRoom) -> None:
        """Open or create the run's folder below `base`, and check the digests of all stored data. The check may take
        long. Raises: DilocoPeerError if the folder cannot be used."""
        self.run = run
        self._transport = transport
        self._room = room
        self.folder = RunFolder.open(run, identity.peer_id, base)
        self.log = LogFolder.open(self.folder.log, run.settings.empty_log, block_bytes(run.config.codec))
        self._proofs = MissingProofs(transport, self.log)
        self.checkpointer = Checkpointer(KeepingPlan(self.folder.path))
        self._state_bytes = 0  # bytes of theta and momentum; 0 until the model's size is known
        self.buffers: tuple[PayloadBuffers, ...] = ()  # one for each fragment; empty until the model's size is known
        self._snapshot: Snapshot | None = None
        self._sequence = 0
        self._peers: frozenset[str] = frozenset()
        self._signing = _Signing(run, identity, transport, self.folder.path)
        self._uncertified_wait = UncertifiedWait(run.settings.timing.partition_grace)
        self._load()
        end = self.log.log_after(self.log.next_index)
        frozen = self._frozen
        self.end = frozen if end is None or end.position.index < frozen.position.index else end
        """The state of the log after the last stored entry, or after the snapshot if that is later."""

    @cached_property
    def held_out(self) -> HeldOutCurve:
        """The held-out losses that peers have reported, by outer step, which this archive stores for displays."""
        return HeldOutCurve(self.folder.held_out)

    # Stored data ----------------------------------------------------------------------------------------------
    def _load(self) -> None:
        """Load the newest stored checkpoint as the snapshot to serve. Delete the payloads of entries before the oldest
        checkpoint."""
        checkpoints = Checkpoints(self.folder.checkpoints, self.run.run_id)
        if (checkpoint := checkpoints.load_newest()) is not None:
            self._snapshot = checkpoint
            self._set_size(len(checkpoint.data))
            self.log.prune(min(checkpoints.indices()))

    def _set_size(self, state_bytes: int) -> None:
        if not self.buffers:
            whole = slice(0, state_bytes // (2 * VALUE_BYTES))
            fragments = self.run.config.streaming.fragments or (whole,)
            self._state_bytes = 2 * VALUE_BYTES * fragments[-1].stop
            codecs = [BlockCodec.of(self.run.config.codec, part.stop - part.start) for part in fragments]
            self.buffers = PayloadBuffers.of_each(codecs, 0, self.log.payload)

    # Serving --------------------------------------------------------------------------------------------------
    def is_member(self, peer: str) -> bool:
        return peer in self._peers

    async def newest(self, least: int) -> Snapshot:
        if self._snapshot is None or self._snapshot.index < least:
            raise RefusalError(f"this archive has no snapshot of outer step {least} or later")
        return self._snapshot

    def held(self, head: bytes) -> Snapshot | None:
        return self._snapshot if self._frozen.position.head == head else None

    @property
    def _frozen(self) -> LogState:
        """The log's state at the outer step of the served snapshot; the empty log's state if there is no snapshot."""
        empty, snapshot = self.log.empty_log, self._snapshot
        return empty if snapshot is None else empty.at(snapshot.last, snapshot.ends)

    def answer(self, inquiry: Inquire) -> bytes | None:
        """Return the reply to a peer's inquiry: the entry after the inquired position, or this log's end if that
        position is not in this log. Return None if this log has no entry after the position yet."""
        index, fragment = inquiry.position.index, inquiry.position.fragment
        if fragment >= self.end.fragments:
            return None
        before, followed = self._log_at(inquiry.position), self.log.header_at(index, fragment)
        if before is not None and followed is not None and followed.previous == inquiry.position.head:
            certified = Certified(header=followed, certificate=self.log.certificate_at(index, fragment))
            return pack_message(self.run.run_id, certified, before)
        if inquiry.position.is_in_cycle_of(self.end.position):
            return None
        return pack_message(self.run.run_id, Elsewhere(position=self.end.position), None)

    def _log_at(self, position: Position) -> LogState | None:
        """Return the log's state at a position; None if neither the stored log nor the snapshot has that position."""
        frozen = self._frozen
        log = frozen if position.is_in_cycle_of(frozen.position) else self.log.log_after(position.index)
        return log.of(position.fragment) if log is not None and position.is_in_cycle_of(log.position) else None

    async def publish(self, identity: Identity) -> None:
        """Publish a heartbeat with this archive's peer id, its addresses, and the position of its log's end."""
        end = self.end
        before = self._transport.discovery_of(self.run.run_id).copies.highest
        self._sequence = next_sequence(self._sequence, before)
        ticket, revocations = self._transport.credentials(self.run.run_id)
        heartbeat = Heartbeat(
            run=self.run.run_id,
            peer=identity.peer_id,
            incarnation=0,
            sequence=self._sequence,
            lifetime=2 * max(self.run.settings.timing.heartbeat_expiry, 2 * POLL),
            state=PeerState.ARCHIVING,
            index=end.position.index,
            head=end.position.head,
            state_digest=NO_STATE,
            lineage_tokens=end.lineage_tokens,
            inner_step=0,
            tokens_per_second=0.0,
            speed=0.0,
            loss=None,
            addresses=self._transport.addresses,
            roster_size=len(end.roster),
            ticket=ticket,
            revocations=revocations,
            signed=self._signing.newest,
            amendment=end.amendment,
        )
        await self._transport.publish(heartbeat.sign(identity), self.run.run_id)

    # Signed heads ---------------------------------------------------------------------------------------------
    @property
    def _is_contradicted(self) -> bool:
        """True if the run's archives have signed heads that differ from those of the stored log."""
        return self._signing.believed.contradiction(self._heads) is not None

    @property
    def _heads(self) -> dict[int, bytes]:
        """The stored log's heads, by index, at the indices at which archives have signed heads."""
        return self.log.heads_at(self._signing.believed.indices)

    async def sign(self) -> None:
        """Sign the newest head of the stored log, at most once a minute, if the manifest names this archive's key."""
        await self._signing.sign(self.log, self._peers)

    # Following ------------------------------------------------------------------------------------------------
    async def follow(self) -> bool:
        """Fetch the run's newer entries, fault proofs and snapshots from peers. Return True if any peer is ahead of
        this archive."""
        beats = [beat for beat in await self._transport.heartbeats(self.run.run_id) if beat.state in PARTICIPATING]
        beats.sort(key=lambda beat: (beat.lineage_tokens, beat.sequence), reverse=True)
        self._peers = frozenset(beat.peer for beat in beats)
        every = self.run.config.evaluation.every
        for beat in beats:
            loss = beat.held_out
            if loss is not None and every and loss.index % every == 0 and loss.index <= beat.index:
                self.held_out.add(loss.index, loss.loss)
        index, tokens = self.end.position.index, self.end.lineage_tokens
        is_astray, heads = self._is_contradicted, self.log.heads(index - RECENT_ENTRIES, index)
        ahead = [
            beat
            for beat in beats
            if beat.index > index or beat.lineage_tokens > tokens or (is_astray and beat.head not in heads)
        ]
        donors = [beat.peer for beat in ahead]
        if not donors:
            return False
        for beat in beats:
            await self._transport.connect(beat.peer, beat.addresses)
        if self.end.last is None:  # no entry confirms the model's size yet, so the peers are asked again
            self.buffers = ()
        if not self.buffers:
            self._set_size(await ask_size(self._transport, donors, self.log.empty_log, available_memory()))
        failures = list[Exception]()
        for beat in ahead:
            others = [peer for peer in donors if peer != beat.peer]
            try:
                if await self._keep_up_with(beat, others, beats):
                    donors = [beat.peer, *others]
                    break
            except FAILURES as error:  # the next peer may send the entries
                failures.append(error)
        else:
            if failures:
                raise failures[0]
        await self._complete_log(donors)
        await asyncio.to_thread(self._proofs.look)
        await self._proofs.fetch(self._peers)
        every = SNAPSHOT_SHARE * self.run.settings.snapshot_every
        # Joiners cannot start from an archive without a snapshot, so the first snapshot is fetched at once.
        due = self._snapshot.index + every if self._snapshot else 0
        if self.end.position.index > due:
            await self._keep_snapshot(beats, donors, due)
        return True

    async def _keep_up_with(self, beat: Heartbeat, others: Sequence[str], beats: Sequence[Heartbeat]) -> bool:
        """Store the entries of a peer that is ahead or, if its log differs from the stored log, a snapshot. Return True
        if the end of the stored log has changed. Raises: FAILURES."""
        donors, before = [beat.peer, *others], self.end
        try:
            if self._is_contradicted:
                raise LogError("the run's archives have signed another log")
            if self.end.position.index >= beat.index:
                raise LogError(f"{beat.peer} is on another lineage, which is heavier")
            while self.end.position.index < beat.index and await self._keep_next(donors, beats):
                pass
        except (LogError, PayloadError) as error:
            logger.info("run %s: cannot store the next entries (%s): fetching a snapshot", self.run.run_id, error)
            await self._keep_snapshot(beats, donors, 0)
        return self.end != before

    async def _keep_next(self, donors: Sequence[str], beats: Sequence[Heartbeat]) -> bool:
        """Fetch and store the next cycle, and return True. If its entries have no certificate, store them only once
        they can no longer get one, and until then return False.

        There must be room for a snapshot, too: only the next snapshot frees the payloads before the last one. Raises:
        FAILURES, LogFolderError, _NoRoomError.
        """
        found = await next_in_log(self._transport, donors[0], self.end, self._signing.believed, self._heads)
        if not self._uncertified_wait.may_follow(self.end, found.support, beats):
            return False
        payloads = Payloads(self._transport, self.run.run_id, self.buffers)
        with_payload = [header for header, _ in found.entries if header.payload != NO_PAYLOAD]
        needed = sum(self.buffers[header.fragment].size.bytes for header in with_payload)
        check_available(f"Fetching payloads of run {self.run.run_id}", needed)
        async with self._room.held(self.run.run_id, needed + self._snapshot_room):
            for header in with_payload:
                await payloads.fetch(header, donors)
            for header, certificate in found.entries:
                kept = self.buffers[header.fragment].kept
                await asyncio.to_thread(self.log.append, header, None, kept.get(header.payload), certificate)
                kept.lies_on_disk(header.payload)
        self.end = found.log
        return True

    async def _keep_snapshot(self, beats: Sequence[Heartbeat], donors: Sequence[str], least: int) -> None:
        """Fetch and store a snapshot of outer step `least` or later, if the stored log or a peer's better log confirms
        the snapshot's digest. Raises: FAILURES, _NoRoomError."""
        fetch = LineageFetch(self._transport, self.log)
        index = next(beat.index for beat in beats if beat.peer == donors[0])

        async def compare(index: int) -> Compared:
            found = await fetch.compare(donors[0], index, donors[1:], self.end)
            is_contradicted = self._is_contradicted and found.theirs.has(self.end.position)
            if is_contradicted or found.theirs.contradiction(self._signing.believed) is not None:
                raise LogError(f"the log of {donors[0]} is not the one that the run's archives have signed")
            return found

        found = await compare(index)
        is_ours = found.theirs.has(self.end.position)
        if not (is_ours or found.theirs.is_better_than(found.ours, self._signing.believed)):
            raise LogError(f"the log of {donors[0]} is not better than the stored one")

        async def vouch() -> Vouched:
            nonlocal found, index
            index += 1  # the next entry, which may not exist yet, records the state's digest
            found = await compare(index)
            return Vouched(found.theirs, partial(reported_state, found.theirs, beats), least, is_wary=True)

        storage = FolderStorage(self.folder.download, available_memory)
        async with self._room.held(self.run.run_id, self._snapshot_room):
            snapshot = await fetch_snapshot(
                self._transport, donors, self.log.empty_log, least, vouch, storage, self._state_bytes
            )
            self.checkpointer.take(snapshot)
            await self.checkpointer.idle()
        await asyncio.to_thread(self.log.follow, found.chain, max(snapshot.index, found.theirs.start.position.index))
        await asyncio.to_thread(self._load)
        if snapshot.index > self.end.position.index or not is_ours:
            self.end = self.log.empty_log.at(snapshot.last, snapshot.ends)

    async def _complete_log(self, donors: Sequence[str]) -> None:
        """Fetch the log's headers that are missing before the first stored header. Raises: _NoRoomError."""
        is_more = True
        while self.log.first and is_more:
            async with self._room.held(self.run.run_id, 0):
                is_more = await add_headers_before(self._transport, donors[0], self.log)

    @property
    def _snapshot_room(self) -> int:
        """The number of bytes on disk that a new snapshot still needs, for its download and for its checkpoint."""
        return 2 * self._state_bytes - folder_bytes(self.folder.download)


class _Signing:
    """A run's signed heads that this node knows, and a signer of new ones if the manifest names this node's key."""

    def __init__(self, run: Run, identity: Identity, transport: HivemindTransport, folder: Path) -> None:
        self._run = run.run_id
        self._me = identity.peer_id
        self._transport = transport
        self._signer: HeadSigner | None = None
        if self._me in run.manifest.archives:
            try:
                self._signer = HeadSigner(self._run, self._me, identity, folder)
            except SignedFileError as error:
                logger.error("run %s: this archive signs no outer step: %s", self._run, error)
        self.newest = self._signer.last if self._signer else None
        """The newest head that this node's key has signed."""
        self._due_at = 0.0
        self._has_asked = False

    @property
    def believed(self) -> SignedHeads:
        """The signed heads that the log must match: this node's own, or those of all archives if this node has none."""
        known = self._transport.signed_heads_of(self._run)
        own = known.only(self._me)
        return own if own.heads else known

    async def sign(self, log: LogFolder, peers: frozenset[str]) -> None:
        """Sign the newest head of `log` that the rules of `HeadSigner` allow, at most once a minute. Before the first
        signature, ask `peers` for the heads that this node signed earlier."""
        if self._signer is None or log.first or now() < self._due_at or not (peers or self._has_asked):
            return
        run, runs = self._run, self._transport.runs
        self._due_at = now() + SIGNING_RETRY
        if not self._has_asked:  # after a restore from a backup, only peers have this node's latest signed heads
            self._has_asked = await runs.ask_for_heads(self._transport.call, run, sorted(peers)[:ASKED]) > 0
        if not self._has_asked:
            logger.info(
                "run %s: no peer has reported this archive's earlier signatures, which it must not contradict: it "
                "signs nothing yet",
                run,
            )
            return
        self._due_at = now() + SIGNING_PAUSE
        try:
            signed = await asyncio.to_thread(self._signer.sign, log, runs.signed_heads_of(run))
        except (CannotSignError, SignedFileError) as error:
            logger.warning("run %s: this archive does not sign its log: %s", run, error)
            return
        if signed is None:
            self._due_at = 0.0  # lets the next call try again, because the log had no new head to sign
            return
        self.newest = signed
        runs.take_heads(run, [signed])
        logger.info("run %s: this archive has signed outer step %d", run, signed.index)


class Archive:
    """The archive of a bootstrap node, which stores and serves several runs, each in its own subfolder."""

    def __init__(self, identity: Identity, folder: Path, limit: int | None = None) -> None:
        """Create the archive's folder. All runs together may take `limit` bytes of disk (None: most of the free disk),
        and one run a quarter of the limit. Raises: MachineError if the folder cannot be written."""
        try:
            make_private_folder(folder)
            self.lock_file = (folder / ".lock").open("ab")
        except OSError as error:
            raise MachineError(
                f"the archive's folder {folder} cannot be used: {error.strerror}.",
                remedy_for(error, "Name a folder that you may write to with --archive."),
            ) from error
        self._identity = identity
        self._folder = folder
        self._room = _DiskRoom(folder, limit)
        self._room.measure()
        if self.usable < LEAST_ROOM:
            remedy = "free some space" + ("" if limit is None else ", or raise --max-disk")
            logger.warning("the archive may use only %s: %s", in_words(self.usable), remedy)
        self._runs: dict[str, ArchivedRun] = {}
        self._without_room = set[str]()  # ids of runs whose last fetch failed for want of disk space
        self._following = RunFailures("following it", OF_PEERS, ASK_AGAIN)
        self._signing = RunFailures("signing its log", OF_PEERS, ASK_AGAIN)

    @property
    def usable(self) -> int:
        """The number of bytes on disk that all runs together can take: their limit, or less if the disk lacks room."""
        return min(self._room.limit, self._room.present)

    def kept(self, run: str) -> ArchivedRun | None:
        """Return the archived data of the run with this id; None if this node has not opened an archive of the run."""
        return self._runs.get(run)

    async def keep(self, transport: HivemindTransport, manifests: Iterable[SignedManifest]) -> None:
        """Archive every run of `manifests` until cancelled. Look for new and dropped runs repeatedly."""
        sources: dict[str, StretchSource] = {}
        buffers: dict[str, Sequence[PayloadBuffers]] = {}
        logs: dict[str, RunLog] = {}
        await serve_snapshots(transport, self._runs)
        await serve_headers(
            transport, sources, lambda run, peer: run in self._runs and peer in self._runs[run].end.leases
        )
        await serve_payloads(transport, buffers)
        await serve_proofs(transport, logs)
        await transport.on_call(CALL, partial(self._answer, transport))
        opening = RunFailures("opening its archive")
        async with asyncio.TaskGroup() as tasks:
            keeping: dict[str, asyncio.Task[None]] = {}
            while True:
                self._check_disk()
                known = {manifest.run_id: manifest for manifest in manifests}
                for run_id in keeping.keys() - known.keys():  # runs whose manifests the node has dropped
                    archived, task = self._runs[run_id], keeping.pop(run_id)
                    await cancel_and_wait(task)
                    for served in (self._runs, sources, buffers, logs):
                        served.pop(run_id, None)
                    transport.forget(run_id)
                    HEALTH.forget(_health_part(run_id))
                    if archived.end.last is None:  # only the folder of a run without entries is removed
                        await asyncio.to_thread(archived.folder.remove)
                        self._room.forget(run_id)
                    self._without_room.discard(run_id)
                for run_id in [one for one in known if one not in keeping and opening.is_due(one)]:
                    with opening.caught(run_id), _in_health(run_id):
                        run, place = Run.from_manifest(known[run_id]), (self._folder, self._room)
                        archived = await asyncio.to_thread(ArchivedRun, run, self._identity, transport, *place)
                        self._runs[run_id], sources[run_id], logs[run_id] = archived, archived.log.stretch, archived.log
                        keeping[run_id] = tasks.create_task(self._keep_one(archived, buffers))
                await asyncio.sleep(self._poll)

    @property
    def _poll(self) -> float:
        """Seconds between two checks for new runs, and of a run that has no peers: few if there are few runs, so that
        the first outer steps are archived, too."""
        return min(POLL, max(POLL_FIRST, POLL_PER_RUN * len(self._runs)))

    def _check_disk(self) -> None:
        """Mark the archive as unhealthy in the node's health status if its disk is full, and as healthy otherwise."""
        with suppress(OSError):
            if shutil.disk_usage(self._folder).free < LEAST_FREE:
                HEALTH.failing("archive", f"the disk of the archive {self._folder} is full: free some space")
            else:
                HEALTH.recovered("archive")

    async def _keep_one(self, archived: ArchivedRun, buffers: dict[str, Sequence[PayloadBuffers]]) -> None:
        keeping, run_id = RunFailures("keeping its archive"), archived.run.run_id
        async with archived.checkpointer:
            while True:
                if keeping.is_due(run_id):
                    with keeping.caught(run_id):
                        await self._keep_up(archived, buffers)
                is_in_use = archived.end.last is not None or archived._peers
                pause = archived.run.settings.timing.heartbeat
                await asyncio.sleep(pause if is_in_use else max(pause, self._poll))

    async def _keep_up(self, archived: ArchivedRun, buffers: dict[str, Sequence[PayloadBuffers]]) -> None:
        run_id = archived.run.run_id
        if self._following.is_due(run_id):
            with self._following.caught(run_id):
                try:
                    # Before the first entry, the model's size is only a stranger's claim, and an error about it must
                    # not mark this node as unhealthy.
                    with _in_health(run_id) if archived.end.last is not None else nullcontext():
                        is_followed = await archived.follow()
                    if is_followed:
                        self._without_room.discard(run_id)
                except _NoRoomError as error:
                    if run_id not in self._without_room:
                        logger.error("run %s: archiving pauses: %s", run_id, error)
                    self._without_room.add(run_id)
        if self._signing.is_due(run_id):  # signs stored heads even if no newer entries could be fetched
            with self._signing.caught(run_id):
                await archived.sign()
        if archived.buffers:
            buffers[run_id] = archived.buffers
        # Members of a run by invitation serve only peers whose heartbeats they have received, so an archive sends
        # heartbeats even before the first entry.
        if archived.end.last is not None or archived.run.manifest.is_by_invitation:
            await archived.publish(self._identity)
        if archived.end.last is not None:
            end = archived.end
            metrics.ARCHIVED_OUTER_STEP.labels(run_id).set(end.position.index)
            with suppress(AmendmentError):  # skip an amendment that only a newer diloco-peer can read
                steps = Overrides.read(end.amendment).total_outer_steps(archived.run.config)
                metrics.ARCHIVED_STEPS_LEFT.labels(run_id).set(max(0, steps - end.position.index))

    async def _answer(self, transport: HivemindTransport, sender: str, data: bytes) -> bytes:
        for run_id, archived in self._runs.items():
            try:
                message = unpack_message(run_id, data, None)
            except WireError:
                continue  # the message is for another run
            transport.check_admitted(run_id, sender)
            reply = archived.answer(message) if isinstance(message, Inquire) else None
            if reply is not None:
                with suppress(PeerUnreachableError):
                    await transport.call(sender, CALL, reply, CALL_TIMEOUT)
            return b""
        raise RemoteProtocolError(sender, "a message of a run that is not archived here")


def _health_part(run_id: str) -> str:
    return f"archive of {run_id}"


@contextmanager
def _in_health(run_id: str) -> Iterator[None]:
    """Mark the run's archive as unhealthy in the node's health status if the `with` block raises MachineError or
    LogFolderError, and as healthy if the block succeeds."""
    try:
        yield
    except (MachineError, LogFolderError) as error:
        HEALTH.failing(_health_part(run_id), f"entries of run {run_id} cannot be archived: {error.message}")
        raise
    HEALTH.recovered(_health_part(run_id))


# Disk space -----------------------------------------------------------------------------------------------------------
# A run may be of any size, so its space is limited.
DISK_SHARE = 0.9  # without --max-disk: share of the bytes, free or taken by archived runs, that these runs may take
RUN_SHARE = 4  # divisor: one run may take a quarter of the disk space that all runs may take
# A node warns if all archived runs together may use fewer bytes of disk than this. One run may use a quarter, which is
# enough for a model of a million parameters.
LEAST_ROOM = 64_000_000
LEAST_FREE = 1_000_000
"""Free bytes below which a disk counts as full."""


class _NoRoomError(MachineError):
    """Error: the limit on the archive's disk space leaves no room for more data of a run."""


class _DiskRoom:
    """A counter of the disk space of archived runs, with a limit. Each run has a subfolder, named by the run's id."""

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        """Limit the disk space of all runs to `limit` bytes. None: to the share `DISK_SHARE` of the bytes that are free
        or taken by archived runs."""
        self._folder = folder
        self._limit = limit
        self._taken: dict[str, int] = {}
        self._held: defaultdict[str, int] = defaultdict(int)  # by run id: bytes reserved for data being fetched

    @property
    def present(self) -> int:
        """The bytes of disk that are free or taken by runs."""
        return sum(self._taken.values()) + shutil.disk_usage(self._folder).free

    @property
    def limit(self) -> int:
        """The bytes of disk that all runs may take."""
        return int(DISK_SHARE * self.present) if self._limit is None else self._limit

    def measure(self) -> None:
        """Measure the disk space of all runs in the folder, including runs that are no longer archived."""
        if self._folder.is_dir():
            self._taken = {path.name: folder_bytes(path) for path in self._folder.iterdir()}

    @asynccontextmanager
    async def held(self, run: str, needed: int) -> AsyncIterator[None]:
        """Reserve `needed` bytes of disk for a run while the `with` block fetches data. Raises: _NoRoomError if the
        bytes exceed the limit for the run or for all runs."""
        own = await asyncio.to_thread(folder_bytes, self._folder / run)
        self._taken[run] = own
        taken, held, limit = sum(self._taken.values()), sum(self._held.values()), self.limit
        if own + needed > limit // RUN_SHARE or taken + held + needed > limit:
            raise _NoRoomError(
                f"the next data need {in_words(needed)} of disk. This run has {in_words(own)} and may have "
                f"{in_words(limit // RUN_SHARE)}; all runs have {in_words(taken + held)} of {in_words(limit)}.",
                "Fetching pauses until there is room: raise --max-disk, or free some space.",
            )
        self._held[run] += needed
        try:
            yield
        finally:
            try:
                self._taken[run] = await asyncio.to_thread(folder_bytes, self._folder / run)
            finally:
                self._held[run] -= needed

    def forget(self, run: str) -> None:
        self._taken.pop(run, None)
        self._held.pop(run, None)
