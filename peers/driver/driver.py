"""Runs one peer's protocol on hivemind's network: events from the network, the clock and the training side go in, and
the effects that come out are carried out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Protocol

from peers import metrics
from peers.driver.pulse import Pulse, PulseTransport
from peers.driver.recorder import Recorder
from peers.driver.scouting import Scout, ScoutTransport
from peers.driver.spoiler import find_spoiler
from peers.driver.traffic import StreamTransport, Traffic
from peers.errors import DilocoPeerError, LocalProtocolError, RemoteProtocolError
from peers.log.folder import MemoryLog, RunLog
from peers.log.header import Header
from peers.log.settings import RunSettings
from peers.log.state import LogState
from peers.presence.heartbeat import Heartbeat, HeldOut
from peers.protocol.events import (
    Applied,
    Apply,
    AssemblePayload,
    BadBlocks,
    Digested,
    Dropped,
    Effect,
    Event,
    FetchPayload,
    FetchSnapshot,
    HeartbeatsSeen,
    LeaveRequested,
    Note,
    OpenRound,
    PayloadAssembled,
    PayloadFetched,
    PayloadNotFetched,
    Received,
    ReduceChunk,
    ReducedArrived,
    Send,
    SendChunk,
    SnapshotFailed,
    SnapshotRestored,
    Stop,
    StopTraining,
    Tick,
    TokensLost,
    Train,
    TrainingDone,
    TrainingProgress,
    Trouble,
    Undelivered,
)
from peers.protocol.messages import Message, Packer, Round, unpack_message
from peers.protocol.peer import Peer
from peers.protocol.states import State
from peers.streams.channel import PeerRefusedError, PeerUnreachableError
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.companion import CompanionDonor
from peers.transfer.companion_fetch import CompanionJoiner
from peers.transfer.download import PullTransport
from peers.transfer.freezing import Freezer
from peers.transfer.headers import serve_headers
from peers.transfer.payloads import PayloadError, Payloads, serve_payloads
from peers.transfer.snapshot_fetch import fetch_snapshot
from peers.transfer.snapshots import FrozenSnapshot, serve_snapshots
from peers.transfer.storage import MemoryStorage, Storage
from peers.values.clock import now
from peers.values.identity import Identity
from peers.values.wire import WireError
from peers.values.workload import BadBlocksError, CompanionState, Progress, SnapshotError, Workload

logger = logging.getLogger(__name__)

TICK = 0.25  # seconds
CALL = "message"
CALL_TIMEOUT = 10.0  # seconds
FAREWELL_TIMEOUT = 3.0  # seconds
REDUCERS = 2  # chunks averaged at once
KEPT_BYTES = 1 << 30  # payloads kept for who fell behind


class Transport(PullTransport, StreamTransport, PulseTransport, ScoutTransport, Protocol):
    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes: ...
    async def on_call(self, name: str, handler: Callable[[str, bytes], Coroutine[None, None, bytes]]) -> None: ...


class Driver:
    """One peer of one run. `run` returns when it has left, and raises what made going on impossible.

    `on_entry` is told of every entry applied here, with the state digest after it; `on_snapshot` of every state that is
    frozen here or fetched.
    """

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        workload: Workload,
        settings: RunSettings,
        state_digest: bytes,
        log: RunLog | None = None,
        position: LogState | None = None,
        storage: Storage | None = None,
        kept_bytes: int = KEPT_BYTES,
        companion: CompanionState | None = None,
    ) -> None:
        """`position` is where the workload's state is, with `state_digest`; `log` keeps what is applied from there.

        With a `companion` state, who joins in the middle of the run copies another peer's.
        """
        self._log = MemoryLog(settings.empty_log, 0) if log is None else log
        self._buffers = PayloadBuffers(workload, kept_bytes, self._log.payload)
        self.peer = Peer(identity.peer_id, settings, self._buffers.size, state_digest, now(), position)
        self.on_entry: Callable[[Header, bytes], None] = lambda header, state_digest: None
        self.on_snapshot: Callable[[FrozenSnapshot], None] = lambda snapshot: None
        self._transport = transport
        self._workload = workload
        self._settings = settings
        self._packer = Packer(settings.run)
        self._waiting: list[asyncio.Future[None]] = []
        self._pulse = Pulse(self.peer, identity, transport, self.start)
        self._traffic = Traffic(self.peer, transport, workload, self._buffers, self)
        self._scout = Scout(transport, self._traffic, self)
        self._payloads = Payloads(transport, settings.run, self._buffers)
        self._storage = storage or MemoryStorage()
        self._freezer = Freezer(self.peer, workload, self._storage, self)
        self._freezer.on_snapshot = lambda snapshot: self.on_snapshot(snapshot)
        self._donor = companion and CompanionDonor(self.peer, companion, transport, self._storage, self)
        self._joiner = companion and CompanionJoiner(self.peer, companion, transport, self._storage, self)
        self._reducing = asyncio.Semaphore(REDUCERS)
        self._round: Round | None = None
        self._tasks: asyncio.TaskGroup
        self._training: asyncio.Task[None] | None = None
        self._worker = asyncio.Lock()
        self._recorder = Recorder(self._log, self.peer, transport, self.start)
        self._running: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Take part until asked to leave. Raises: DilocoPeerError, the first that any task met."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await self._transport.on_call(CALL, self._receive)
                await self._traffic.serve()
                await self._scout.serve()
                run = self._settings.run
                await serve_payloads(self._transport, {run: self._buffers})
                await serve_headers(self._transport, {run: self._log.headers})
                await serve_snapshots(self._transport, {run: self._freezer})
                if self._donor:
                    await self._donor.serve()
                clocks = [self.start(self._tick()), self.start(self._keep_pulse())]
                await self._stopped.wait()
                for clock in clocks:  # nothing after the last words
                    clock.cancel()
                await self._farewell()
                await self._recorder.finish()
                for task in self._running:
                    task.cancel()
        except* DilocoPeerError as group:
            self.peer.handle(LeaveRequested(at_once=True), now())
            await self._farewell()
            raise _first(group) from None

    async def _farewell(self) -> None:
        """The deathrattle: a word to everybody we know to be alive, and a last heartbeat; then nothing more."""
        goodbye = self.peer.goodbye
        packed = self._packer.pack(goodbye)
        others = self.peer.membership.live(now())
        last_words: list[Awaitable[object]] = [
            self._transport.call(peer, CALL, packed, FAREWELL_TIMEOUT) for peer in others
        ]
        if not goodbye.holds:  # a heartbeat that says "leaving" ends our say in quorums, too
            last_words.append(self._pulse.publish())
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_TIMEOUT):
                await asyncio.gather(*last_words, return_exceptions=True)

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def leave(self, at_once: bool = False) -> None:
        """Leave politely, and unless `at_once` finish the round under way; `run` then returns."""
        self.handle(LeaveRequested(at_once))

    def handle(self, event: Event) -> None:
        """Let the protocol take in an event, and start on what it wants done."""
        for effect in self.peer.handle(event, now()):
            self._carry_out(effect)
        self._follow_round()
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def _follow_round(self) -> None:
        """Let go of what belongs to another round than the present one, or to who is lost from it."""
        if self.peer.state is State.AVERAGING:
            self._transport.no_round.clear()
        else:  # also while a round may go on some time: perhaps when somebody has joined
            self._transport.no_round.set()
        round = self.peer.exchange.round if self.peer.exchange else None
        if round is self._round:
            return
        self._round = round
        if round is None:
            self._buffers.close()
        self._traffic.tidy(round.name if round else None, round.remaining if round else ())

    async def until(self, condition: Callable[[Peer], bool]) -> None:
        """Wait, looking again after every event, for something to be true of the protocol's state."""
        while not condition(self.peer):
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Note(level, text):
                logger.log(logging.getLevelNamesMapping()[level.upper()], text)
            case Dropped(peer, what, reason):
                metrics.DROPPED.labels(what).inc()
                logger.warning("dropped a %s of %s: %s", what, peer, reason)
            case TokensLost(what, tokens, reason):
                metrics.TOKENS_LOST.labels(what).inc(tokens)
                logger.warning("%d tokens that we trained are lost: %s", tokens, reason)
            case Trouble(reason):
                logger.warning("%s", reason or "what this peer trains counts again")
            case Stop():
                self._stopped.set()
            case StopTraining():
                if self._training:
                    self._training.cancel()
            case Train(index):
                if self._joiner:
                    self._joiner.training_begins(index)
                self._training = self.start(self._train(effect))
            case Send(to, message):
                self.start(self._send(to, message))
            case OpenRound():
                self._open_round(effect)
            case SendChunk():
                self._traffic.send(effect)
            case ReduceChunk():
                self.start(self._reduce(effect))
            case AssemblePayload(round):
                if self._buffers.round(round):
                    self.handle(PayloadAssembled(round, self._buffers.assemble(round)))
            case FetchPayload(header, donors):
                self.start(self._fetch_payload(header, donors))
            case Apply():
                self.start(self._apply(effect))
            case FetchSnapshot():
                self.start(self._fetch(effect))

    # Network --------------------------------------------------------------------------------------------------
    async def _send(self, to: str, message: Message) -> None:
        try:
            await self._transport.call(to, CALL, self._packer.pack(message), CALL_TIMEOUT)
        except PeerRefusedError as error:
            logger.warning("%s", error)
        except PeerUnreachableError as error:
            logger.debug("%s", error)
            self.handle(Undelivered(to))
        except LocalProtocolError as error:  # too large: what others sent us may have made it so
            logger.error("cannot tell %s: %s", to, error)

    async def _receive(self, sender: str, data: bytes) -> bytes:
        try:
            message = unpack_message(self._settings.run, data)
        except WireError as error:
            metrics.DROPPED.labels("message").inc()
            raise RemoteProtocolError(sender, str(error)) from error
        self.handle(Received(sender, message))
        return b""

    async def _fetch_payload(self, header: Header, donors: tuple[str, ...]) -> None:
        try:
            await self._payloads.fetch(header, donors)
        except PayloadError as error:
            self.handle(PayloadNotFetched(header, str(error)))
        else:
            metrics.PAYLOADS_FETCHED.inc()
            self.handle(PayloadFetched(header))

    async def _fetch(self, fetch: FetchSnapshot) -> None:
        donors = (fetch.donor, *fetch.others)
        try:
            async with self._worker:
                snapshot, lineage = await fetch_snapshot(
                    self._transport, donors, self.peer.log, fetch.least, self._storage, self._workload.state_size
                )
                async with self._freezer.state_lock:
                    await self._workload.restore(snapshot.data, snapshot.state_digest)
        except (SnapshotError, OSError) as error:
            self.handle(SnapshotFailed(fetch.donor, str(error)))
        else:
            metrics.STATES_FETCHED.inc()
            self.handle(SnapshotRestored(fetch.donor, snapshot.last, snapshot.state_digest, lineage))
            self._freezer.hold(snapshot)

    # Time -----------------------------------------------------------------------------------------------------
    async def _tick(self) -> None:
        while True:
            self.handle(Tick())
            await asyncio.sleep(TICK)

    async def _keep_pulse(self) -> None:
        """Say that we are here, and hear who else is. What fails is tried again at the next beat."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.timing.heartbeat_expiry):
                    self.handle(HeartbeatsSeen(await self._pulse.beat()))
            self._scout.look()
            await asyncio.sleep(self._settings.timing.heartbeat)

    def evaluated(self, held_out: HeldOut) -> None:
        """Tell others from now on what this peer found about theta."""
        self._pulse.held_out = held_out
        metrics.HELD_OUT_LOSS.set(held_out.loss)

    def heartbeat(self) -> Heartbeat:
        """What there is to say about this peer now."""
        return self._pulse.heartbeat()

    # The training side ----------------------------------------------------------------------------------------
    async def _train(self, train: Train) -> None:
        async with self._worker:  # a training that was stopped needs a moment to end
            await asyncio.to_thread(self._buffers.prepare)
            trained = await self._workload.train(train, self._progress)
            async with self._freezer.state_lock:
                self._buffers.own = await self._workload.contribution()  # now, so that no round waits for it
        self.handle(TrainingDone(trained))

    def _progress(self, progress: Progress) -> None:
        self.handle(TrainingProgress(progress))

    def _open_round(self, opened: OpenRound) -> None:
        metrics.ROUNDS.inc()
        self._buffers.open(opened.round.name)
        self._traffic.begin(opened.round.name, len(opened.round.remaining) - 1)

    async def _reduce(self, reduce: ReduceChunk) -> None:
        buffers, round, chunk = self._buffers, reduce.round, reduce.chunk
        async with self._reducing:
            if not buffers.round(round):
                return  # the round is over: nobody waits for this chunk any more
            contributions = buffers.contributions(round, chunk, self.peer.me, reduce.members)
            first_block = buffers.chunking.blocks(chunk)[0]
            room = buffers.room(len(contributions[0][0]))
            try:
                average = await self._workload.reduce(contributions, first_block, memoryview(room))
            except (BadBlocksError, DilocoPeerError) as error:
                spoiler, _ = reduce.members[await find_spoiler(self._workload, contributions, first_block)]
                if spoiler == self.peer.me:
                    raise
                self.handle(BadBlocks(round, spoiler, chunk, str(error)))
                return
        if buffers.round(round):
            buffers.store(round, chunk, average)
            buffers.give_back([room, *(blocks for blocks, _ in contributions)])
            self.handle(ReducedArrived(round, self.peer.me, chunk, reduce.absent))

    async def _apply(self, apply: Apply) -> None:
        kept = self._buffers.kept.get(apply.header.payload)
        if kept is None:
            raise LocalProtocolError(f"the payload of entry {apply.header.index} is to be applied and not here")
        async with self._freezer.state_lock:
            await self._workload.apply(kept.data, apply.header.index, apply.keeps_work)
            metrics.ENTRIES_APPLIED.inc()
            self.handle(Applied(apply.header))
            state_digest = await self._workload.state_digest()
            self.handle(Digested(apply.header, state_digest))
        self.on_entry(apply.header, state_digest)
        self._recorder.add(apply.header, state_digest, kept)
        self.start(self._freeze())

    async def _freeze(self) -> None:
        try:
            await self._freezer.freeze_if_chosen()
        except (OSError, SnapshotError) as error:
            logger.error("no snapshot of outer step %d: %s", self.peer.log.position.index, error)


def _first(group: BaseExceptionGroup[DilocoPeerError]) -> DilocoPeerError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
