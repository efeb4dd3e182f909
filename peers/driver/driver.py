"""The driver of one peer on a real network. It passes events from the network, the clock and the workers to the
protocol, and carries out the effects that the protocol returns.

The table `Driver._table` names the handler of each effect. The handlers are in the parts: messages, data of rounds,
training, the run's state, and logs for people.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import thread_time
from typing import TYPE_CHECKING

from peers import metrics
from peers.driver.pulse import Pulse
from peers.driver.replication import Replication
from peers.driver.rounds import Rounds
from peers.driver.traffic import Scout
from peers.driver.training import Sending, Training
from peers.errors import DilocoPeerError, LocalProtocolError, RemoteProtocolError
from peers.log.folder import RunLog
from peers.log.header import Header
from peers.log.lineage import Lineage
from peers.log.settings import RunSettings
from peers.log.state import LogError
from peers.log.votes import VotesFile, VotesFileError
from peers.messages.messages import Leaving
from peers.messages.packing import Packer
from peers.metrics import HEALTH
from peers.network.channel import PeerRefusedError, PeerUnreachableError, RefusalError
from peers.presence.allowances import SENDERS_LIMIT, STRANGER, Allowances
from peers.presence.heartbeat import Heartbeat, HeldOutLoss
from peers.protocol import effects
from peers.protocol.effect_table import EffectTable, row
from peers.protocol.effects import Dropped, KeepVotes, Note, Send, TokensLost, Trouble
from peers.protocol.events import (
    Event,
    LeaveRequested,
    NothingToTrain,
    Received,
    Tick,
    Undelivered,
    VotesKept,
    VotesNotKept,
)
from peers.protocol.peer import Peer
from peers.protocol.voting import RecordError, VotingRecord
from peers.transfer.buffers import PayloadBuffers, inspection
from peers.transfer.snapshots import FrozenSnapshot
from peers.transfer.storage import Storage
from peers.values.chunks import KEPT_BYTES
from peers.values.identity import Identity
from peers.values.system import now
from peers.values.wire import WireError
from peers.values.workload import PayloadKind, Workload

if TYPE_CHECKING:
    from peers.network.transport import HivemindTransport

logger = logging.getLogger(__name__)

CALL = "message"
CALL_TIMEOUT = 10.0  # maximum seconds for a peer to accept a protocol message
TICK = 0.25  # seconds between two Tick events
START_BITS = 61  # random bits in the number that identifies one start of this peer; a message has room for 62
FAREWELL_TIMEOUT = 3.0  # maximum seconds to send the farewell and the last heartbeat
REFUSALS_LIMIT = 128  # maximum number of remembered refusals, by which each refusal is logged only once
READING_BURST, READING_SHARE = 5.0, 0.1
"""Processor seconds for reading one peer's messages: at once, and per second. Peers with neither a lease nor a vote
share one such allowance."""


class _Messenger:
    def __init__(self, transport: HivemindTransport, host: Driver) -> None:
        self._transport = transport
        self._host = host
        self._packer = Packer(host.peer)
        self._reading = Allowances(READING_BURST, READING_SHARE, SENDERS_LIMIT)
        self._refusals = deque[tuple[str, str]](maxlen=REFUSALS_LIMIT)  # latest refusals: peer id and reason

    async def serve(self) -> None:
        await self._transport.on_call(CALL, self._receive)

    def send(self, send: Send) -> None:
        """Start sending a message. A message whose position is no longer in this peer's recent log is dropped."""
        with suppress(LogError):
            self._host.start(self._send(send.to, self._packer.pack(send.message)))

    def farewells(self) -> list[Awaitable[object]]:
        """Return calls, to be awaited, that send this peer's farewell to all live peers; none if it has no farewell."""
        peer = self._host.peer
        if peer.goodbye is None:
            return []
        packed = self._packer.pack(peer.goodbye)
        return [self._transport.call(other, CALL, packed, FAREWELL_TIMEOUT) for other in peer.membership.live(now())]

    async def _send(self, to: str, packed: bytes) -> None:
        try:
            await self._transport.call(to, CALL, packed, CALL_TIMEOUT)
        except PeerRefusedError as error:
            refusal = to, error.reason
            if refusal not in self._refusals:
                self._refusals.append(refusal)
                logger.info("peer %s refused a message: %s", to, error.reason)
        except PeerUnreachableError as error:
            logger.debug("%s", error)
            self._host.handle(Undelivered(to))
        except LocalProtocolError as error:  # the message is too large, perhaps because of data from other peers
            logger.error("cannot send to %s: %s", to, error)

    async def _receive(self, sender: str, data: bytes) -> bytes:
        """Unpack a received message, and pass it to the protocol. The transport drops and counts invalid messages.

        Raises:
            RemoteProtocolError: the message is invalid.
            RefusalError: the peer is not admitted to the run, or its messages take too much time. A farewell of a voter
                is passed on even if its ticket was revoked or has expired, so that the others need not wait for it.
        """
        log, refusal = self._host.peer.log, None
        try:
            self._transport.check_admitted(self._host.peer.settings.run, sender)
        except RefusalError as error:
            if sender not in log.voters:
                raise
            refusal = error
        account = sender if log.last is None or sender in log.accountable else STRANGER
        if not self._reading.has_some(account, now()):
            raise RefusalError("its messages take too much time to read")
        with self._reading.spending(account, thread_time):
            try:
                message = self._packer.unpack(sender, data)
                if refusal is not None and not isinstance(message, Leaving):
                    raise refusal
                if message is not None:
                    self._host.handle(Received(sender, message))
            except WireError as error:
                raise RemoteProtocolError(sender, str(error)) from error
        return b""


class _VotesKeeper:
    """The writer of one peer's voting records to a file, one after another. Without a file, each start of the peer is a
    new incarnation."""

    def __init__(self, file: VotesFile | None, host: Driver) -> None:
        self._file = file
        self._host = host
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "votes")

    def keep(self, keep: KeepVotes) -> None:
        """Start writing a voting record. Messages that depend on the record wait for the event VotesKept."""
        if self._file is None:
            self._host.handle(VotesKept())
        else:
            self._host.start(self._keep(keep.record))

    async def _keep(self, record: VotingRecord) -> None:
        async with self._turn:
            trouble = await self.write(record)
            self._host.handle(VotesNotKept(trouble) if trouble else VotesKept())

    async def write(self, record: VotingRecord) -> str:
        """Write a voting record after the log entries that it depends on. Return the reason of a failure, or ""."""
        if self._file is None:
            return ""
        await self._host.replication.recorder.finish()
        write, loop = self._file.write, asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, lambda: write(record.pack()))
        except VotesFileError as error:
            return str(error)
        return ""

    def close(self) -> None:
        self._thread.shutdown(wait=False)


def _remembered(file: VotesFile | None, run: str, peer: str, is_new: bool) -> VotingRecord | None:
    """Read the voting record that this peer wrote before it was started again. If there is no usable record, log the
    reason and return None. A new peer, whose log is empty, has no file yet: that is not logged."""
    if file is None:
        return None
    try:
        packed = file.read()
        if packed is not None:
            return VotingRecord.load(packed, run, peer)
        if is_new:
            return None
        reason = f"{file.path} does not exist"
    except (VotesFileError, RecordError) as error:
        reason = str(error)
    logger.info("%s; this peer does not vote until it is in an outer step; nothing needs to be done", reason)
    return None


def _note(effect: Note) -> None:
    logger.log(logging.getLevelNamesMapping()[effect.level.upper()], effect.text)


def _dropped(effect: Dropped) -> None:
    """Count and log data that was dropped because its sender broke a rule."""
    metrics.DROPPED.labels(effect.what).inc()
    logger.info("dropped a %s from peer %s: %s", effect.what, effect.peer, effect.reason)


def _tokens_lost(effect: TokensLost) -> None:
    metrics.TOKENS_LOST.labels(effect.what).inc(effect.tokens)
    logger.info("%d trained tokens are lost: %s", effect.tokens, effect.reason)


def _trouble(effect: Trouble) -> None:
    metrics.TROUBLED.set(bool(effect.reason))
    level = effect.level if effect.reason else "info"
    logger.log(logging.getLevelNamesMapping()[level.upper()], effect.reason or "this peer's training counts again")


class Driver:
    """The driver of one peer in a run: it passes events to the peer's protocol, and carries out the effects that the
    protocol returns. `run` returns when the peer has left, or raises the error that stopped the peer.

    `entries` is the log, as far as it is on this machine.
    """

    def __init__(
        self,
        identity: Identity,
        transport: HivemindTransport,
        workload: Workload,
        settings: RunSettings,
        state_digest: bytes,
        lineage: Lineage | None = None,
        log: RunLog | None = None,
        storage: Storage | None = None,
        votes: VotesFile | None = None,
        on_entry: Callable[[Header, bytes], None] = lambda header, state_digest: None,
        on_snapshot: Callable[[FrozenSnapshot], None] = lambda snapshot: None,
        team: str = "",
        format: int | None = None,
        name: str = "",
        share: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """Create a driver; `state_digest` is the digest of the workload's current state.

        Args:
            lineage: the log up to that state; by default before the first entry.
            log: keeps the entries that are applied from there on; by default in memory.
            storage: has room for snapshots; by default in memory.
            votes: file that keeps this peer's votes, so that it is the same voter when it restarts; by default in
                memory.
            on_entry: called after each outer step of the whole state, with the closing entry's header and the state
                digest.
            on_snapshot: called with each snapshot that is made here or fetched.
            team: the team in this peer's heartbeats.
            format: the format of all contributions; by default the one that the uplink has time for.
            name: the nickname in this peer's heartbeats.
            share: returns the largest share of a whole contribution's bytes that this peer sends, if the run has a
                format small enough.
        """
        self.entries = RunLog(settings.empty_log, 0) if log is None else log
        buffers = PayloadBuffers.of_each(workload.fragments, KEPT_BYTES, self.entries.payload)
        self.peer = Peer(
            identity.peer_id,
            settings,
            [PayloadKind(each.size, inspection(workload.squared_norm, each)) for each in buffers],
            state_digest,
            now(),
            secrets.randbits(START_BITS),
            identity,
            lineage,
            _remembered(votes, settings.run, identity.peer_id, is_new=not len(self.entries)),
        )
        self._tasks: asyncio.TaskGroup
        self._running: set[asyncio.Task[None]] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._stopped = asyncio.Event()
        self._messenger = _Messenger(transport, self)
        self._votes = _VotesKeeper(votes, self)
        self._pulse = Pulse(identity, transport, self, team, name)
        self.rounds = Rounds(transport, workload, buffers, self)
        self._scout = Scout(transport, self.rounds.traffic, self)
        self.replication = Replication(
            transport, workload, buffers, self.entries, storage or Storage(), self, on_entry, on_snapshot
        )
        self._training = Training(workload, buffers, self.replication, self, format, share)
        self._effects = self._table()

    @property
    def sending(self) -> Sending | None:
        """The format of the last contribution, and the reason for it; None before the first contribution."""
        return self._training.sending

    def _table(self) -> EffectTable:
        return EffectTable(
            row(effects.Send, self._messenger.send),
            row(effects.KeepVotes, self._votes.keep),
            row(effects.Train, self._training.begin),
            row(effects.StopTraining, self._training.stop),
            row(effects.OpenRound, self.rounds.open),
            row(effects.SendChunk, self.rounds.traffic.send),
            row(effects.ReduceChunk, lambda reduce: self.start(self.rounds.average(reduce))),
            row(effects.AssemblePayload, lambda assemble: self.start(self.rounds.assemble(assemble))),
            row(effects.Apply, self.replication.apply),
            row(effects.FetchPayload, lambda fetch: self.start(self.replication.fetch_payload(fetch))),
            row(effects.FetchLineage, self.replication.fetch_lineage),
            row(effects.FetchSnapshot, lambda fetch: self.start(self.replication.fetch_snapshot(fetch))),
            row(effects.Note, _note),
            row(effects.Dropped, _dropped),
            row(effects.TokensLost, _tokens_lost),
            row(effects.Trouble, _trouble),
            row(effects.Stop, lambda stop: self._stopped.set()),
        )

    # Life cycle -------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Take part in the run until this peer has left. Raises: DilocoPeerError, the first error of any task."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                living = self.start(self._live())
                # The task `_live` is not awaited, because it may hang if libp2p's daemon is dead.
                await self._stopped.wait()
                living.cancel()  # no heartbeat or message may follow the farewell
                await self._say_goodbye()
                await self.replication.recorder.finish()
                for task in self._running:
                    task.cancel()
        except* DilocoPeerError as group:
            self.peer.handle(LeaveRequested(at_once=True), now())
            await self._say_goodbye()
            raise _first(group) from None
        finally:
            self._votes.close()
            HEALTH.forget("heartbeat")

    async def _live(self) -> None:
        """Answer other peers, and pass clock ticks and heartbeats to the protocol, until cancelled."""
        for part in (self._messenger, self.rounds, self._scout, self.replication):
            await part.serve()
        async with asyncio.TaskGroup() as clocks:
            clocks.create_task(self._tick())
            clocks.create_task(self._keep_pulse())

    async def _tick(self) -> None:
        while True:
            self.handle(Tick())
            self._training.look()
            await asyncio.sleep(TICK)

    async def _keep_pulse(self) -> None:
        """Publish this peer's heartbeat, and pass those of other peers to the protocol, in each heartbeat interval."""
        timing = self.peer.settings.timing
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(timing.heartbeat_expiry):
                    seen = await self._pulse.beat()
                    for event in self._pulse.known():
                        self.handle(event)
                    self.handle(seen)
            self._scout.look()
            await asyncio.sleep(timing.heartbeat)

    async def _say_goodbye(self) -> None:
        """Send the farewell to all live peers, and a last heartbeat. If the voting record cannot be written, send
        neither, since this peer might vote after its farewell when it restarts."""
        if trouble := await self._votes.write(self.peer.record):
            logger.warning("this peer leaves without a farewell: %s", trouble)
            return
        last_words = [*self._messenger.farewells(), self._pulse.publish()]
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_TIMEOUT):
                await asyncio.gather(*last_words, return_exceptions=True)

    def leave(self, at_once: bool = False) -> None:
        """Leave the run: after the current round, or now if `at_once`. `run` then returns."""
        self.handle(LeaveRequested(at_once))

    def rest(self) -> None:
        """Stop expecting training: the run has taken its last outer step, and this peer only sends the run's state."""
        self._training.rest()
        self.handle(NothingToTrain())

    # Services for the parts -------------------------------------------------------------------------------------
    def handle(self, event: Event) -> None:
        """Pass an event to the protocol, and carry out the effects that the protocol returns."""
        for effect in self.peer.handle(event, now()):
            self._effects.carry_out(effect)
        self.rounds.follow()
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task, and return the task. The task is cancelled when this peer leaves."""
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def until(self, condition: Callable[[Peer], bool]) -> None:
        """Wait until a condition on the protocol's state holds. The condition is checked after every event."""
        while not condition(self.peer):
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter

    # This peer's heartbeat ---------------------------------------------------------------------------------------
    def evaluated(self, held_out: HeldOutLoss) -> None:
        """Publish `held_out`, this peer's held-out loss, in its heartbeats from now on."""
        self._pulse.held_out = held_out
        metrics.HELD_OUT_LOSS.set(held_out.loss)

    def heartbeat(self) -> Heartbeat:
        return self._pulse.heartbeat()


def _first(group: BaseExceptionGroup[DilocoPeerError]) -> DilocoPeerError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
