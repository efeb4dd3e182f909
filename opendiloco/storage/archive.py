"""Archives: a bootstrap node that keeps runs, so that they outlive the last of their volunteers.

Of each run that is announced to it, it keeps the headers of all entries, what proves their annexes, the newest
snapshots, and the payloads since; and it gives them like a peer. It has no worker and no state of its own, and takes no
part in rounds. Where its key is one of the run's archives, it signs heads of the log that it has checked.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cached_property, partial
from pathlib import Path

from opendiloco.errors import MachineError
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
from peers.errors import RemoteProtocolError, SwarmUnreachableError
from peers.log.folder import LogFolder, RunLog
from peers.log.head_signer import CannotSignError, HeadSigner, SignedFileError
from peers.log.header import NO_PAYLOAD, Position
from peers.log.lineage import RECENT_ENTRIES
from peers.log.state import LogError, LogState
from peers.messages.messages import Certified, Elsewhere, Inquire
from peers.messages.packing import pack_message, unpack_message
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
from peers.values.system import cancel_and_wait, next_sequence, now
from peers.values.wire import DIGEST_BYTES, WireError
from peers.values.workload import SnapshotError

logger = logging.getLogger(__name__)

POLL = 5.0  # seconds between two looks for new runs, and at runs in which nobody has been yet
SIGNING_PAUSE = 60.0  # seconds at least between two heads that are signed
SIGNING_RETRY = 5.0  # seconds until peers are asked again that did not answer
ASKED = 32  # peers that are asked, before the first head, what this archive has signed
SNAPSHOT_SHARE = 4  # of so many snapshots of the peers one is kept: each takes their links 8 bytes a parameter
NO_STATE = bytes(DIGEST_BYTES)
OF_PEERS = (PeerUnreachableError, RemoteProtocolError, SwarmUnreachableError, LogError, PayloadError, SnapshotError)
"""What peers do not give or give wrongly: nothing for an archive's operator to act on."""
FAILURES = (*OF_PEERS, OSError)
ASK_AGAIN = 1.0  # seconds until a peer is asked again that had nothing to give; then twice as many each time


class ArchivedRun:
    """What is kept of one run. Implements `peers.transfer.snapshots.SnapshotSource`."""

    def __init__(self, run: Run, identity: Identity, transport: HivemindTransport, base: Path, room: _DiskRoom) -> None:
        """May take long, since all that is here is digested. Raises: DilocoPeerError when the folder cannot be used."""
        self.run = run
        self._transport = transport
        self._room = room
        self.folder = RunFolder.open(run, identity.peer_id, base)
        self.log = LogFolder.open(self.folder.log, run.settings.empty_log, block_bytes(run.config.codec))
        self._proofs = MissingProofs(transport, self.log)
        self.checkpointer = Checkpointer(KeepingPlan(self.folder.path))
        self._state_bytes = 0  # until the model's size is known
        self.buffers: tuple[PayloadBuffers, ...] = ()  # of each fragment, from then on
        self._snapshot: Snapshot | None = None
        self._sequence = 0
        self._peers: frozenset[str] = frozenset()
        self._signing = _Signing(run, identity, transport, self.folder.path)
        self._uncertified_wait = UncertifiedWait(run.settings.timing.partition_grace)
        self._load()
        end = self.log.log_after(self.log.next_index)
        frozen = self._frozen
        self.end = frozen if end is None or end.position.index < frozen.position.index else end
        """The log as it ends here: after the last entry, or after the snapshot if nothing has come since."""

    @cached_property
    def held_out(self) -> HeldOutCurve:
        """The losses on held-out text that are kept beside the log, for whoever shows them."""
        return HeldOutCurve(self.folder.held_out)

    # What is here ---------------------------------------------------------------------------------------------
    def _load(self) -> None:
        """Give the newest checkpoint from now on, and drop the payloads before the oldest."""
        checkpoints = Checkpoints(self.folder.checkpoints, self.run.run_id)
        if (checkpoint := checkpoints.load_newest()) is not None:
            self._snapshot = checkpoint
            self._size_is(len(checkpoint.data))
            self.log.prune(min(checkpoints.indices()))

    def _size_is(self, state_bytes: int) -> None:
        if not self.buffers:
            whole = slice(0, state_bytes // (2 * VALUE_BYTES))
            fragments = self.run.config.streaming.fragments or (whole,)
            self._state_bytes = 2 * VALUE_BYTES * fragments[-1].stop
            codecs = [BlockCodec.of(self.run.config.codec, part.stop - part.start) for part in fragments]
            self.buffers = PayloadBuffers.of_each(codecs, 0, self.log.payload)

    # Giving ---------------------------------------------------------------------------------------------------
    def is_member(self, peer: str) -> bool:
        return peer in self._peers

    async def newest(self, least: int) -> Snapshot:
        if self._snapshot is None or self._snapshot.index < least:
            raise RefusalError(f"no snapshot of outer step {least} or later is kept here")
        return self._snapshot

    def held(self, head: bytes) -> Snapshot | None:
        return self._snapshot if self._frozen.position.head == head else None

    @property
    def _frozen(self) -> LogState:
        """The log where our snapshot is; the empty one without any."""
        empty, snapshot = self.log.empty_log, self._snapshot
        return empty if snapshot is None else empty.at(snapshot.last, snapshot.ends)

    def answer(self, inquiry: Inquire) -> bytes | None:
        """Return a message that says what followed a place in the log; nothing if that is where it ends."""
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
        """The log as it was at a position: also where our snapshot is, from which the entries here may go on."""
        frozen = self._frozen
        log = frozen if position.is_in_cycle_of(frozen.position) else self.log.log_after(position.index)
        return log.of(position.fragment) if log is not None and position.is_in_cycle_of(log.position) else None

    async def publish(self, identity: Identity) -> None:
        """Say that the run is kept here, up to where."""
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
    def _is_astray(self) -> bool:
        """Whether the run's archives have signed another log than the one that is kept here."""
        return self._signing.believed.contradiction(self._heads) is not None

    @property
    def _heads(self) -> dict[int, bytes]:
        """What the log that is kept here has where archives have signed."""
        return self.log.heads_at(self._signing.believed.indices)

    async def sign(self) -> None:
        """Sign the newest head that we have checked, if we are one of the run's archives, at most once a minute."""
        await self._signing.sign(self.log, self._peers)

    # Keeping --------------------------------------------------------------------------------------------------
    async def follow(self) -> bool:
        """Learn what has happened since, from the peers that are furthest on. Returns whether any is ahead.

        What fails is tried again at the next call.
        """
        beats = [beat for beat in await self._transport.heartbeats(self.run.run_id) if beat.state in PARTICIPATING]
        beats.sort(key=lambda beat: (beat.lineage_tokens, beat.sequence), reverse=True)
        self._peers = frozenset(beat.peer for beat in beats)
        every = self.run.config.evaluation.every
        for beat in beats:
            told = beat.held_out
            if told is not None and every and told.index % every == 0 and told.index <= beat.index:
                self.held_out.add(told.index, told.loss)
        index, tokens = self.end.position.index, self.end.lineage_tokens
        is_astray, heads = self._is_astray, self.log.heads(index - RECENT_ENTRIES, index)
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
        if self.end.last is None:  # nothing has come that fits the size that was told: it may have been a lie
            self.buffers = ()
        if not self.buffers:
            self._size_is(await ask_size(self._transport, donors, self.log.empty_log, available_memory()))
        failures = list[Exception]()
        for beat in ahead:
            others = [peer for peer in donors if peer != beat.peer]
            try:
                if await self._keep_up_with(beat, others, beats):
                    donors = [beat.peer, *others]
                    break
            except FAILURES as error:  # another one may have what this one does not
                failures.append(error)
        else:
            if failures:
                raise failures[0]
        await self._complete_log(donors)
        await asyncio.to_thread(self._proofs.look)
        await self._proofs.fetch(self._peers)
        every = SNAPSHOT_SHARE * self.run.settings.snapshot_every
        due = self._snapshot.index + every if self._snapshot else 0  # without any, nobody could begin from here
        if self.end.position.index > due:
            await self._keep_snapshot(beats, donors, due)
        return True

    async def _keep_up_with(self, beat: Heartbeat, others: Sequence[str], beats: Sequence[Heartbeat]) -> bool:
        """Keep what a peer has that is ahead of us. Returns whether it had anything that we keep. Raises: FAILURES."""
        donors, before = [beat.peer, *others], self.end
        try:
            if self._is_astray:
                raise LogError("the run's archives have signed another log")
            if self.end.position.index >= beat.index:
                raise LogError(f"{beat.peer} is on another lineage, which is heavier")
            while self.end.position.index < beat.index and await self._keep_next(donors, beats):
                pass
        except (LogError, PayloadError) as error:
            logger.info("run %s: %s; a snapshot is fetched", self.run.run_id, error)
            await self._keep_snapshot(beats, donors, 0)
        return self.end != before

    async def _keep_next(self, donors: Sequence[str], beats: Sequence[Heartbeat]) -> bool:
        """Keep the next cycle, unless too few have signed it, and others may still come. Returns whether it is kept.

        There has to be room for a snapshot, too: with the next one, the payloads before the last go. Raises: FAILURES,
        LogFolderError, _NoRoomError.
        """
        found = await next_in_log(self._transport, donors[0], self.end, self._signing.believed, self._heads)
        if not self._uncertified_wait.may_follow(self.end, found.support, beats):
            return False
        payloads = Payloads(self._transport, self.run.run_id, self.buffers)
        having = [header for header, _ in found.entries if header.payload != NO_PAYLOAD]
        needed = sum(self.buffers[header.fragment].size.bytes for header in having)
        check_available(f"Fetching payloads of run {self.run.run_id}", needed)
        async with self._room.held(self.run.run_id, needed + self._snapshot_room):
            for header in having:
                await payloads.fetch(header, donors)
            for header, certificate in found.entries:
                kept = self.buffers[header.fragment].kept
                await asyncio.to_thread(self.log.append, header, None, kept.get(header.payload), certificate)
                kept.lies_on_disk(header.payload)
        self.end = found.log
        return True

    async def _keep_snapshot(self, beats: Sequence[Heartbeat], donors: Sequence[str], least: int) -> None:
        """Keep a state that our log vouches for, or a better one. Raises: FAILURES, _NoRoomError."""
        fetch = LineageFetch(self._transport, self.log)
        index = next(beat.index for beat in beats if beat.peer == donors[0])

        async def compare(index: int) -> Compared:
            found = await fetch.compare(donors[0], index, donors[1:], self.end)
            is_astray = self._is_astray and found.theirs.has(self.end.position)
            if is_astray or found.theirs.contradiction(self._signing.believed) is not None:
                raise LogError(f"the log of {donors[0]} is not the one that the run's archives have signed")
            return found

        found = await compare(index)
        is_ours = found.theirs.has(self.end.position)
        if not (is_ours or found.theirs.is_better_than(found.ours, self._signing.believed)):
            raise LogError(f"the log of {donors[0]} is not better than the one that is kept here")

        async def vouch() -> Vouched:
            nonlocal found, index
            index += 1  # as far as its entry that says what state the one before led to, which may come later
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
        """The headers before those that are here, back to the manifest. Raises: _NoRoomError."""
        is_more = True
        while self.log.first and is_more:
            async with self._room.held(self.run.run_id, 0):
                is_more = await add_headers_before(self._transport, donors[0], self.log)

    @property
    def _snapshot_room(self) -> int:
        """The bytes that a snapshot takes until an older one goes: the download, and the checkpoint."""
        return 2 * self._state_bytes - folder_bytes(self.folder.download)


class _Signing:
    """The heads of one run that archives have signed; where our key is one of the archives', it signs them, too."""

    def __init__(self, run: Run, identity: Identity, transport: HivemindTransport, folder: Path) -> None:
        self._run = run.run_id
        self._me = identity.peer_id
        self._transport = transport
        self._signer: HeadSigner | None = None
        if self._me in run.manifest.archives:
            try:
                self._signer = HeadSigner(self._run, self._me, identity, folder)
            except SignedFileError as error:
                logger.error("run %s: no outer step is signed: %s", self._run, error)
        self.newest = self._signer.last if self._signer else None
        """What our key has signed last."""
        self._due_at = 0.0
        self._has_asked = False

    @property
    def believed(self) -> SignedHeads:
        """The signed heads that logs are held against: our own, once we have signed any, or else all."""
        known = self._transport.signed_heads_of(self._run)
        own = known.only(self._me)
        return own if own.heads else known

    async def sign(self, log: LogFolder, peers: frozenset[str]) -> None:
        """Sign the newest head of `log` that may be signed, at most once a minute."""
        if self._signer is None or log.first or now() < self._due_at or not (peers or self._has_asked):
            return
        run, runs = self._run, self._transport.runs
        self._due_at = now() + SIGNING_RETRY
        if not self._has_asked:  # a disk that was set back knows less than others do of what this key has signed
            self._has_asked = await runs.ask_for_heads(self._transport.call, run, sorted(peers)[:ASKED]) > 0
        if not self._has_asked:
            logger.info("run %s: nobody says what this archive has signed before: it signs nothing yet", run)
            return
        self._due_at = now() + SIGNING_PAUSE
        try:
            signed = await asyncio.to_thread(self._signer.sign, log, runs.signed_heads_of(run))
        except (CannotSignError, SignedFileError) as error:
            logger.warning("run %s: this archive does not sign the log that is kept here: %s", run, error)
            return
        if signed is None:
            self._due_at = 0.0  # at once when there is something
            return
        self.newest = signed
        runs.take_heads(run, [signed])
        logger.info("run %s: outer step %d is signed", run, signed.index)


class Archive:
    """All runs that a node keeps, in a folder."""

    def __init__(self, identity: Identity, folder: Path, limit: int | None = None) -> None:
        """`limit` is what the folder may take, in bytes; None: most of the disk. One run may take a quarter."""
        self._identity = identity
        self._folder = folder
        self._room = _DiskRoom(folder, limit)
        self._runs: dict[str, ArchivedRun] = {}
        self._crowded = set[str]()  # runs for which the disk had no room at the last look
        self._following = RunFailures("following it", OF_PEERS, ASK_AGAIN)
        self._signing = RunFailures("signing its log", OF_PEERS, ASK_AGAIN)

    def kept(self, run: str) -> ArchivedRun | None:
        """Return what is kept of a run; None: nothing, or nothing yet."""
        return self._runs.get(run)

    async def keep(self, transport: HivemindTransport, manifests: Iterable[SignedManifest]) -> None:
        """Keep every run of `manifests`, which is looked through again and again, until cancelled."""
        sources: dict[str, StretchSource] = {}
        kept: dict[str, Sequence[PayloadBuffers]] = {}
        logs: dict[str, RunLog] = {}
        await serve_snapshots(transport, self._runs)
        await serve_headers(
            transport, sources, lambda run, peer: run in self._runs and peer in self._runs[run].end.leases
        )
        await serve_payloads(transport, kept)
        await serve_proofs(transport, logs)
        await transport.on_call(CALL, partial(self._answer, transport))
        opening = RunFailures("opening its archive")
        await asyncio.to_thread(self._room.measure)
        async with asyncio.TaskGroup() as tasks:
            keeping: dict[str, asyncio.Task[None]] = {}
            while True:
                known = {manifest.run_id: manifest for manifest in manifests}
                for run_id in keeping.keys() - known.keys():  # forgotten by the node
                    archived, task = self._runs[run_id], keeping.pop(run_id)
                    await cancel_and_wait(task)
                    for served in (self._runs, sources, kept, logs):
                        served.pop(run_id, None)
                    transport.forget(run_id)
                    if archived.end.last is None:  # else a flood of made-up runs would have the work of others removed
                        await asyncio.to_thread(archived.folder.remove)
                        self._room.forget(run_id)
                    self._crowded.discard(run_id)
                for run_id in [one for one in known if one not in keeping and opening.is_due(one)]:
                    with opening.caught(run_id):
                        run, place = Run.from_manifest(known[run_id]), (self._folder, self._room)
                        archived = await asyncio.to_thread(ArchivedRun, run, self._identity, transport, *place)
                        self._runs[run_id], sources[run_id], logs[run_id] = archived, archived.log.stretch, archived.log
                        keeping[run_id] = tasks.create_task(self._keep_one(archived, kept))
                await asyncio.sleep(POLL)

    async def _keep_one(self, archived: ArchivedRun, kept: dict[str, Sequence[PayloadBuffers]]) -> None:
        keeping, run_id = RunFailures("keeping its archive"), archived.run.run_id
        async with archived.checkpointer:
            while True:
                if keeping.is_due(run_id):
                    with keeping.caught(run_id):
                        await self._keep_up(archived, kept)
                is_in_use = archived.end.last is not None or archived._peers
                pause = archived.run.settings.timing.heartbeat
                await asyncio.sleep(pause if is_in_use else max(pause, POLL))

    async def _keep_up(self, archived: ArchivedRun, kept: dict[str, Sequence[PayloadBuffers]]) -> None:
        run_id = archived.run.run_id
        if self._following.is_due(run_id):
            with self._following.caught(run_id):
                try:
                    if await archived.follow():
                        self._crowded.discard(run_id)
                except _NoRoomError as error:
                    if run_id not in self._crowded:
                        logger.error("run %s: %s", run_id, error)
                    self._crowded.add(run_id)
        if self._signing.is_due(run_id):  # also where a peer does not give what was asked for
            with self._signing.caught(run_id):
                await archived.sign()
        if archived.buffers:
            kept[run_id] = archived.buffers
        if archived.end.last is not None or archived.run.manifest.is_by_invitation:  # else nobody gives it any
            await archived.publish(self._identity)
        if archived.end.last is not None:
            metrics.ARCHIVED_OUTER_STEP.labels(run_id).set(archived.end.position.index)

    async def _answer(self, transport: HivemindTransport, sender: str, data: bytes) -> bytes:
        for run_id, archived in self._runs.items():
            try:
                message = unpack_message(run_id, data, None)
            except WireError:
                continue  # of another run
            transport.check_admitted(run_id, sender)
            reply = archived.answer(message) if isinstance(message, Inquire) else None
            if reply is not None:
                with suppress(PeerUnreachableError):
                    await transport.call(sender, CALL, reply, CALL_TIMEOUT)
            return b""
        raise RemoteProtocolError(sender, "a message of no run that is kept here")


# The disk's room ------------------------------------------------------------------------------------------------------
# A stranger decides how large a run is.
DISK_SHARE = 0.9  # of what is free or taken by the runs already, that they may take unless their owner says how much
RUN_SHARE = 4  # one run may take one such part of all


class _NoRoomError(MachineError):
    """The disk's owner gives no room for what is to be fetched of a run."""


class _DiskRoom:
    """What the runs in a folder may take, each in a folder of its own that has its id as a name, and what they take."""

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        """`limit` is in bytes; None: a share of the disk that leaves the rest free, whoever fills it."""
        self._folder = folder
        self._limit = limit
        self._taken: dict[str, int] = {}
        self._held: defaultdict[str, int] = defaultdict(int)  # for what is being fetched

    def measure(self) -> None:
        """Look at all that is in the folder, also of runs that are kept no more."""
        if self._folder.is_dir():
            self._taken = {path.name: folder_bytes(path) for path in self._folder.iterdir()}

    @asynccontextmanager
    async def held(self, run: str, needed: int) -> AsyncIterator[None]:
        """Hold so many bytes for a run while they are fetched. Raises: _NoRoomError; nothing is held then."""
        here = await asyncio.to_thread(folder_bytes, self._folder / run)
        self._taken[run] = here
        taken, held, limit = sum(self._taken.values()), sum(self._held.values()), self._limit
        if limit is None:
            limit = int(DISK_SHARE * (taken + shutil.disk_usage(self._folder).free))
        if here + needed > limit // RUN_SHARE or taken + held + needed > limit:
            raise _NoRoomError(
                f"to keep more of it takes {in_words(needed)} of disk. It has {in_words(here)}, and may have "
                f"{in_words(limit // RUN_SHARE)}; all runs have {in_words(taken + held)} of {in_words(limit)}.",
                "Nothing more of it is fetched until there is room; --max-disk gives more.",
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
        """Count a run no more, whose folder is gone."""
        self._taken.pop(run, None)
        self._held.pop(run, None)
