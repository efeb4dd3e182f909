"""One machine's part in a run: the protocol's driver above, the workers and the outer state below.

async with connected(identity, addresses) as transport:
    run = await find_run(transport, run_id)
    async with volunteering(run, identity, transport) as volunteer:
        await volunteer.take_part()
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from opendiloco.kernels import FORMATS
from opendiloco.run import Run
from opendiloco.shared_memory import available_memory
from opendiloco.storage.checkpointer import Checkpointer
from opendiloco.storage.loading import Checkpoints, check_moments_file, newest_moments, resume
from opendiloco.storage.run_folder import HeldOutCurve, Journal, RunFolder
from opendiloco.view.curves import Curves, configuration_of
from opendiloco.view.progress import Fragments, OwnFacts
from opendiloco.view.run_view import RunView
from opendiloco.volunteer.admission import shown_out
from opendiloco.volunteer.local_workload import LocalWorkload, Trainer, Workload, start_workload
from opendiloco.volunteer.sole import doubled
from opendiloco.workers.group import WorkerGroup
from opendiloco.workers.options import WorkerOptions
from opendiloco.workers.trackers import Tracker
from peers.driver.driver import Driver
from peers.driver.replication import Keeping
from peers.errors import DilocoPeerError
from peers.health import HEALTH
from peers.log.folder import LogFolder, RunLog
from peers.log.state import LogState
from peers.network.bootstrap import keep_announced
from peers.network.first_contact import RememberedPeers
from peers.network.links import LinkSettings
from peers.network.transport import HivemindTransport
from peers.presence.admission import RunAdmission
from peers.presence.heartbeat import Heartbeat
from peers.protocol.slot import SlotState
from peers.protocol.states import State
from peers.transfer.storage import FolderStorage
from peers.values.identity import Identity
from peers.values.system import now
from peers.values.workload import SnapshotError

logger = logging.getLogger(__name__)

RESUMABLE = 2  # of the newest checkpoints have the payloads after them: should one be damaged, there is another
NO_TRAINING = WorkerOptions(trains=False, threads=None)
ANY_PORT = ("/ip4/0.0.0.0/tcp/0",)
AT_WORK = frozenset({State.TRAINING, State.READY, State.AVERAGING, State.APPLYING})
LISTEN_SECONDS = 2.0
"""Between two looks at what other peers say of theta."""


class Volunteer:
    """A peer that trains. Made by `volunteering`."""

    def __init__(
        self,
        run: Run,
        driver: Driver,
        transport: HivemindTransport,
        workload: Workload[Trainer],
        folder: RunFolder | None = None,
        log: LogFolder | None = None,
    ) -> None:
        self.run = run
        self._driver = driver
        self._transport = transport
        self._workload = workload
        self._workers = workload.trainer if isinstance(workload.trainer, WorkerGroup) else None
        self._folder = folder
        self._log = log
        self._leaving = False
        self._remembered: RememberedPeers | None = None
        self._admission: RunAdmission | None = None
        self._curves = Curves(workload.trainer.telemetry, HeldOutCurve(folder.held_out if folder else None))
        workload.measuring.on_outer_step = lambda step: self._curves.taken(step, driver.round_costs)

    @property
    def device(self) -> str:
        return self._workload.trainer.device

    @property
    def log(self) -> RunLog:
        """The entries of the run that are here."""
        return self._driver.entries

    @property
    def held_out(self) -> HeldOutCurve:
        """The losses of theta that this machine has found or heard of."""
        return self._curves.held_out

    def record(self, journal: Journal) -> None:
        """Write every entry that is applied from now on into the journal."""
        self._driver.on_entry = journal.append

    def checkpoint_with(self, checkpointer: Checkpointer) -> None:
        """Have every state that is frozen from now on written to the disk; what came before them is dropped there."""
        self._driver.on_snapshot = checkpointer.take
        checkpointer.workers = self._workers
        checkpointer.on_saved = self._prune_log

    def remember_with(self, remembered: RememberedPeers) -> None:
        """Keep the addresses of other peers, so that this machine finds the run again without its bootstrap nodes."""
        self._remembered = remembered

    def be_in_team(self, team: str) -> None:
        """Have the others hear that our work is a team's; an empty name: nobody's."""
        self._driver.be_in_team(team)

    def admitted_by(self, admission: RunAdmission | None) -> None:
        """Stay for as long as our ticket is good, in a run by invitation."""
        self._admission = admission

    def _prune_log(self) -> None:
        if self._folder is None or self._log is None:
            return
        try:
            newest = Checkpoints(self._folder.checkpoints, self._folder.run_id).indices()[:RESUMABLE]
            self._log.prune(min(newest, default=0))
        except DilocoPeerError as error:
            logger.warning("%s", error)

    async def take_part(self) -> None:
        """Take part until `leave` is called. Raises: DilocoPeerError: what made going on impossible."""
        driving = asyncio.create_task(self._driver.run())
        keeping = asyncio.create_task(keep_announced(self._transport, self.run.manifest, self.others, self._remembered))
        beside: list[asyncio.Task[None]] = [keeping, asyncio.create_task(self._listen_for_losses())]
        for aside in beside:
            aside.add_done_callback(_report_failure)
        failures: list[asyncio.Task[DilocoPeerError]] = [
            asyncio.create_task(self._workload.trainer.wait_for_death()),
            asyncio.create_task(self._transport.failure()),
        ]
        peer = self._driver.peer
        listening = doubled(self._transport, self.run.run_id, lambda: peer.incarnation, lambda: peer.log)
        failures.append(asyncio.create_task(listening))
        if self._admission is not None:
            failures.append(asyncio.create_task(shown_out(self._admission, peer.me)))
        try:
            done, _ = await asyncio.wait([driving, *failures], return_when=asyncio.FIRST_COMPLETED)
            broken = [failure.result() for failure in failures if failure in done]
            if broken:
                self._driver.leave(at_once=True)  # the others need not find out by waiting
            await driving
            for error in broken:
                if not self._leaving:
                    raise error
                logger.debug("while leaving: %s", error)  # systemd, for one, ends a service's processes all at once
        finally:
            for task in (driving, *beside, *failures):
                task.cancel()
            await asyncio.gather(driving, *beside, *failures, return_exceptions=True)

    async def _listen_for_losses(self) -> None:
        while True:
            beats = self.heartbeats()
            self._curves.heard(beats[0], RunView.of(self.run, beats))
            await asyncio.sleep(LISTEN_SECONDS)

    @property
    def outer_step(self) -> int:
        """How many outer steps the log has here."""
        return self._driver.peer.log.position.index

    @property
    def state(self) -> State:
        """What the peer is doing."""
        return self._driver.peer.state

    def facts(self) -> OwnFacts:
        """Return what this process knows of the run, for people who look."""
        under_way = None if self._workers is None else self._workers.under_way
        return OwnFacts(
            heartbeats=self.heartbeats(),
            log=self.log,
            state=self.state,
            trains_on=under_way is not None and under_way.has_rest,
            reach=self._transport.reach(),
            caps=self._transport.caps,
            sent=self._transport.upload.passed,
            received=self._transport.download.passed,
            download=self._driver.download,
            fragments=self._fragments(),
            bytes_per_token=self._workload.trainer.telemetry.bytes_per_token,
        )

    def _fragments(self) -> Fragments | None:
        """Return what becomes of fragments; None in a run that does not stream."""
        workers = self._workers
        if self.run.config.streaming.is_plain or workers is None:
            return None
        slots = self._driver.peer.slots.values()
        latest, count = workers.telemetry.latest, len(workers.fragments)
        longest = latest.get("longest_average_seconds", math.nan)
        return Fragments(
            count=count,
            averaging=sum(slot.state is SlotState.AVERAGING for slot in slots),
            done=count - len(slots),
            overlap=workers.overlap.steps,
            late=int(latest.get("late_averages", 0)),
            wait_share=latest.get("average_wait_share", 0.0),
            longest=None if math.isnan(longest) else longest,
        )

    @property
    def is_at_work(self) -> bool:
        """Whether an outer step is under way in which this machine takes part."""
        return self.state in AT_WORK and self.outer_step < self.run.config.total_outer_steps

    def hold(self, held: bool) -> None:
        """Make no inner step while `held`; the peer goes on, and others see a member that is late."""
        if self._workers is not None:
            self._workers.hold(held)

    def leave(self) -> None:
        """Leave politely: a round under way is finished, then the others are told, and `train` returns."""
        self._leaving = True
        self._driver.leave()

    def heartbeats(self) -> list[Heartbeat]:
        """What is known of the live peers now, ourselves first."""
        return [self._driver.heartbeat(), *self.others()]

    def others(self) -> list[Heartbeat]:
        """Return the newest heartbeat of each other peer that is live."""
        return list(self._driver.peer.membership.live(now()).values())


def _report_failure(task: asyncio.Task[None]) -> None:
    """Log what ended a task that nobody waits for."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a task beside training has ended: the run may not be findable any more", exc_info=error)


@asynccontextmanager
async def connected(
    identity: Identity,
    initial_peers: Sequence[str],
    listen: Sequence[str] = ANY_PORT,
    announce: Sequence[str] = (),
    client_mode: bool = False,
    links: LinkSettings | None = None,
    remembered: Callable[[], Sequence[str]] = tuple,
) -> AsyncIterator[HivemindTransport]:
    """Connect to the swarm, as `DhtNode.create` does.

    Raises: SwarmUnreachableError, LocalNetworkError, ManifestError.
    """
    transport = await HivemindTransport.create(
        identity, initial_peers, listen, announce, client_mode, links=links, remembered=remembered
    )
    try:
        yield transport
    finally:
        await transport.close()


@asynccontextmanager
async def volunteering(
    run: Run,
    identity: Identity,
    transport: HivemindTransport,
    options: WorkerOptions | None = None,
    folder: RunFolder | None = None,
    trackers: Sequence[Tracker] = (),
) -> AsyncIterator[Volunteer]:
    """A volunteer with workers that are ready to train; with a folder, from where this machine left off.

    Raises: DilocoPeerError when this machine does not fit.
    """
    async with working(run, options or WorkerOptions()) as workload:
        configuration = configuration_of(run, identity.peer_id, workload.trainer.device, options)
        workload.trainer.telemetry.track_with(trackers, configuration)
        yield await volunteer_with(workload, run, identity, transport, folder)


async def volunteer_with(
    workload: LocalWorkload, run: Run, identity: Identity, transport: HivemindTransport, folder: RunFolder | None = None
) -> Volunteer:
    """One that trains with these workers; see `volunteering`."""
    log, lineage, storage = None, None, None
    if folder is not None:
        log = LogFolder.open(folder.log, run.settings.empty_log, FORMATS[run.config.codec.kind].block_bytes)
        storage = FolderStorage(folder.download, available_memory)
        position = await resume_from(folder, workload, log)
        lineage = await asyncio.to_thread(log.lineage, position)
        if position.last:
            await recall_moments(folder, workload.trainer)
    keeping = Keeping(await workload.state_digest(), lineage, log, storage)
    driver = Driver(identity, transport, workload, run.settings, keeping)
    workload.take_turns(driver, identity.peer_id)
    return Volunteer(run, driver, transport, workload, folder, log)


async def resume_from(folder: RunFolder, workload: LocalWorkload, log: LogFolder) -> LogState:
    """The newest state that this machine can make of what it has, and where in the log that is."""
    checkpoint = Checkpoints(folder.checkpoints, folder.run_id).load_newest()
    try:
        position = await resume(workload, log, checkpoint)
    except SnapshotError as error:
        logger.warning("%s: %s. The run begins anew here, and is fetched.", folder.checkpoints, error)
        return log.empty_log
    if position.last:
        logger.info("this machine goes on after outer step %d", position.position.index)
    return position


async def recall_moments(folder: RunFolder, workers: WorkerGroup) -> None:
    """Have the inner optimizer go on with what this machine kept of it, and say so; or that it begins anew."""
    path = newest_moments(folder.checkpoints, folder.peer_id)
    if path is None:
        logger.info("there are no moments beside the checkpoints: the inner optimizer begins anew, with smaller steps")
        return
    try:
        await asyncio.to_thread(check_moments_file, path)
        await workers.recall_moments(path, folder.run_id)
    except (SnapshotError, OSError) as error:
        logger.warning("the inner optimizer begins anew, with smaller steps: %s: %s", path, error)
    else:
        logger.info("the inner optimizer goes on with %s", path.name)


@asynccontextmanager
async def working(run: Run, options: WorkerOptions = NO_TRAINING) -> AsyncIterator[LocalWorkload]:
    """The run's workload with workers of its own, which end with the context. Raises: DilocoPeerError."""
    workload = await start_workload(run.config, options)
    workload.trainer.reads_runs_text = run.has_runs_text
    try:
        yield workload
    finally:
        HEALTH.over("workers")
        await workload.trainer.close()
