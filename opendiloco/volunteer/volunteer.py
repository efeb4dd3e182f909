"""The session of one machine in a run, from finding the run to leaving it, and the volunteer that trains in the run.

The protocol's driver is above a volunteer; the workers and the outer state are below it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shlex
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from opendiloco.owner.monthly import MonthlyTraffic
from opendiloco.owner.watch import OwnersWatch
from opendiloco.run import Run, find_run
from opendiloco.settings.join_settings import JoinSettings
from opendiloco.shared_memory import available_memory, cap_memory
from opendiloco.stages import at_stage, watched_by
from opendiloco.storage.checkpointer import Checkpointer
from opendiloco.storage.files import MANIFEST
from opendiloco.storage.loading import Checkpoints, check_moments_file, newest_moments, resume
from opendiloco.storage.run_folder import HeldOutCurve, Journal, RunFolder
from opendiloco.storage.writer import KeepingPlan
from opendiloco.training.codec import block_bytes
from opendiloco.view.amended import outer_steps_in_force
from opendiloco.view.curves import Curves, configuration_of
from opendiloco.view.progress import CHECKING, FINDING, Fragments, JoinView, OwnFacts, ProgressReader
from opendiloco.view.run_view import RunView, holders, is_finished
from opendiloco.volunteer.admission import ask_for_signed_heads, enter, wait_for_refusal
from opendiloco.volunteer.identity import hold_identity, listening, wait_for_copy
from opendiloco.volunteer.local_workload import InnerTrainer, LocalWorkload, TrainerWorkload, working
from opendiloco.workers.group import WorkerGroup
from opendiloco.workers.supervisor import Supervisor
from opendiloco.workers.trackers import tracking
from peers import metrics
from peers.driver.driver import Driver
from peers.errors import DilocoPeerError, LocalNetworkError
from peers.log.folder import LogFolder, RunLog
from peers.log.state import LogState
from peers.log.votes import VotesFile
from peers.network.bootstrap import keep_announced
from peers.network.first_contact import RememberedPeers
from peers.network.links import LinkSettings
from peers.network.neighbours import announced
from peers.network.own_network import everywhere
from peers.network.throttle import Caps
from peers.network.transport import HivemindTransport
from peers.presence.admission import RunAdmission
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.membership import PARTICIPATING
from peers.protocol.states import State
from peers.transfer.storage import FolderStorage
from peers.values.identity import Identity
from peers.values.manifest import Invite
from peers.values.system import cancel_and_wait, now, start_task
from peers.values.tickets import Ticket
from peers.values.workload import SnapshotError

logger = logging.getLogger(__name__)

RESUMABLE = 2  # number of newest checkpoints from which this machine can resume: two, in case one is damaged
ANY_PORT = ("/ip4/0.0.0.0/tcp/0",)
AT_WORK = frozenset({State.TRAINING, State.READY, State.AVERAGING, State.APPLYING})
LOOK_SECONDS = 2.0  # seconds between two checks of the other peers' losses and of the end of the run
ALONE = (
    "no other peer and no archive of this run was found: this machine begins it at outer step 0. If others have "
    "trained in it before, leave the run, and join again when one of them or an archive is online: if a run begins "
    "twice, only one beginning is kept"
)
HAND_OVER_SECONDS = 10.0  # seconds after which a volunteer leaves even if no other machine has the newest outer step
HAND_OVER_LOOK = 0.2  # seconds between two checks that another machine has the newest outer step
LAST_SECONDS = 2.0
"""Seconds for which the volunteer with the greatest id waits before it leaves, to see if all others leave, too."""


@dataclass(frozen=True)
class Session:
    """The session of one machine in a run: finds the run and trains in it, within the limits that the owner has set."""

    settings: JoinSettings
    invite: Invite
    key: Identity
    watch: OwnersWatch
    traffic: MonthlyTraffic
    ticket: Ticket | None = None
    journal: Journal | None = None

    async def take_part(self, view: JoinView, when_ready: Callable[[Volunteer, HivemindTransport], None]) -> str:
        """Find the run and train in it until the owner asks to leave. `when_ready` is called once the volunteer can
        train. Return the farewell for an owner who ends the volunteer before it joins again; empty if it will not.

        Raises: DilocoPeerError."""
        settings, invite, key = self.settings, self.invite, self.key
        cap_memory(settings.memory_limit)
        caps = Caps.of_megabits(settings.upload_limit, settings.download_limit)
        before = RunFolder.at(invite.run_id, key.peer_id, settings.state)
        remembered = before.remembered_peers()
        links = LinkSettings(settings.data_port, settings.relay_limit)
        listen = settings.listen or everywhere(0)
        with watched_by(view.stage), tracking(settings.trackers, invite.run_id, key.peer_id) as trackers:
            at_stage(FINDING)
            async with connected(
                key, invite.addresses, listen, settings.announce, links=links, remembered=remembered.addresses
            ) as transport:
                transport.cap(caps)
                run = await find_run(transport, invite.run_id, before.remembered_manifest())
                run = replace(run, goes_on_alone=settings.on_partition == "continue")
                folder = RunFolder.open(run, key.peer_id, settings.state)
                await ask_for_signed_heads(transport, run, invite.addresses, folder)
                admission: RunAdmission | None = None
                problems = list[DilocoPeerError]()
                with _noting(problems):
                    admission = await enter(transport, run, key, invite.addresses, folder, self.ticket)
                with _noting(problems):
                    run = run.with_data(settings.data)
                with _noting(problems):
                    run = run.with_own(settings.own_files)
                if problems:
                    first, *others = problems
                    first.remedy = " Also: ".join([first.remedy, *map(str, others)])
                    raise first
                wanted = settings.contribution_format
                format = None if wanted is None else run.config.codec.number_of(wanted)
                view.say(
                    "\n".join([f"found run {run.run_id}; starting a worker (some seconds)", *run.config.about.lines()])
                )
                at_stage(CHECKING)
                neighbours = announced(key.peer_id, run.run_id, transport.addresses)
                async with (
                    neighbours if settings.local_network else nullcontext(),
                    listening(transport, run.run_id) as key_is_unused,
                    self.traffic.counting(lambda: (transport.upload.passed, transport.download.passed)),
                    working(run, settings.workers) as workload,
                    Checkpointer(self._keeping(folder, caps)) as checkpointer,
                ):
                    configuration = configuration_of(run, key.peer_id, workload.trainer.device, settings.workers)
                    workload.trainer.telemetry.track_with(trackers, configuration)
                    volunteer = await volunteer_with(
                        workload,
                        run,
                        key,
                        transport,
                        folder if settings.keeps_anything else None,
                        checkpointer,
                        admission=admission,
                        remembered=remembered,
                        journal=self.journal,
                        team=settings.team or "",
                        format=format,
                        name=settings.name or "",
                        share=self.traffic.share,
                    )
                    await key_is_unused
                    view.say(f"checkpoints and the log are in {folder.path}")
                    view.say(f"joining as {key.peer_id} on {workload.trainer.device}; Ctrl-C to leave")
                    self.watch.begin(volunteer, run.settings.timing.grace)
                    when_ready(volunteer, transport)
                    watch, month = self.watch, self.traffic.lines
                    reader = ProgressReader(run, volunteer.facts, lambda: watch.reasons, watch.until, month)
                    async with view.showing(reader):
                        await volunteer.take_part()
                    watch.say_farewell(volunteer.farewell())
                    return volunteer.farewell(is_away=True) if watch.comes_back else ""

    def _keeping(self, folder: RunFolder, caps: Caps) -> KeepingPlan:
        settings, rate = self.settings, self.settings.checkpoint_rate
        return KeepingPlan(
            folder=folder.path,
            keep_newest=settings.keep,
            keep_every=settings.keep_every,
            rate=rate,
            remote=settings.remote,
            remote_rate=min(rate, caps.upload or rate),
            moments=settings.moments,
            disk_limit=settings.disk_limit,
        )


@contextmanager
def _noting(problems: list[DilocoPeerError]) -> Iterator[None]:
    """Add an error of the `with` block to `problems`, so that the owner learns of later ones at the same time."""
    try:
        yield
    except DilocoPeerError as error:
        problems.append(error)


async def volunteer_with(
    workload: LocalWorkload,
    run: Run,
    identity: Identity,
    transport: HivemindTransport,
    folder: RunFolder | None,
    checkpointer: Checkpointer,
    *,
    admission: RunAdmission | None = None,
    remembered: RememberedPeers | None = None,
    journal: Journal | None = None,
    team: str = "",
    format: int | None = None,
    name: str = "",
    share: Callable[[], float] = lambda: 1.0,
) -> Volunteer:
    """Return a volunteer whose workers are ready to train. With a `folder`, the volunteer continues from the state that
    the folder contains.

    `checkpointer` writes every snapshot, and `journal` every applied entry. Raises: DilocoPeerError.
    """
    log, lineage, storage, votes = None, None, None, None
    if folder is not None:
        log = LogFolder.open(folder.log, run.settings.empty_log, block_bytes(run.config.codec))
        storage, votes = FolderStorage(folder.download, available_memory), VotesFile(folder.log)
        workload.folder = folder.download
        position = await _resume_from(folder, workload, log)
        lineage = await asyncio.to_thread(log.lineage, position)
        if position.last:
            await _recall_moments(folder, workload.trainer.supervisor)
    driver = Driver(
        *(identity, transport, workload, run.settings, await workload.state_digest(), lineage, log, storage, votes),
        on_entry=(lambda header, state_digest: None) if journal is None else journal.append,
        on_snapshot=checkpointer.take,
        team=team,
        format=format,
        name=name,
        share=share,
    )
    checkpointer.workers = workload.trainer.supervisor
    if folder is not None and log is not None:
        checkpointer.on_saved = partial(_prune_log, folder, log)
    workload.take_turns(driver, identity.peer_id)
    return Volunteer(run, driver, transport, workload, folder, admission, remembered)


def _prune_log(folder: RunFolder, log: LogFolder) -> None:
    """Delete the payloads of entries that are older than the checkpoints from which this machine may resume."""
    try:
        newest = Checkpoints(folder.checkpoints, folder.run_id).indices()[:RESUMABLE]
        log.prune(min(newest, default=0))
    except DilocoPeerError as error:
        logger.warning("%s", error)


async def _resume_from(folder: RunFolder, workload: LocalWorkload, log: LogFolder) -> LogState:
    """Load the newest state on this machine's disk into the workload. Return the state's place in the log."""
    checkpoint = Checkpoints(folder.checkpoints, folder.run_id).load_newest()
    try:
        position = await resume(workload, log, checkpoint)
    except SnapshotError as error:
        logger.warning("%s: %s. This machine fetches the state from other peers.", folder.checkpoints, error)
        return log.empty_log
    if position.last:
        logger.info("this machine goes on after outer step %d", position.position.index)
    return position


async def _recall_moments(folder: RunFolder, supervisor: Supervisor) -> None:
    """Load the newest moments on this machine's disk into the inner optimizer. Log whether they were loaded."""
    path = newest_moments(folder.checkpoints, folder.peer_id)
    if path is None:
        logger.info(
            "there are no moments beside the checkpoints: the inner optimizer begins anew, with smaller steps at first"
        )
        return
    try:
        await asyncio.to_thread(check_moments_file, path)
        await supervisor.recall_moments(path, folder.run_id)
    except (SnapshotError, OSError) as error:
        message = "%s cannot be loaded, so the inner optimizer begins anew, with smaller steps at first: %s"
        logger.warning(message, path, error)
    else:
        logger.info("the inner optimizer continues with the moments loaded from %s", path.name)


class Volunteer:
    """A peer that trains. Create it with `volunteer_with`."""

    def __init__(
        self,
        run: Run,
        driver: Driver,
        transport: HivemindTransport,
        workload: TrainerWorkload[InnerTrainer],
        folder: RunFolder | None = None,
        admission: RunAdmission | None = None,
        remembered: RememberedPeers | None = None,
    ) -> None:
        """Create a volunteer. With an `admission`, it leaves the run when this machine's ticket is no longer valid.

        The addresses of other peers are kept in `remembered`, so that this machine finds the run again without its
        bootstrap nodes.
        """
        self.run = run
        self._driver = driver
        self._transport = transport
        self._workload = workload
        self._workers = workload.trainer if isinstance(workload.trainer, WorkerGroup) else None
        self._admission = admission
        self._remembered = remembered
        self._leaving: asyncio.Task[None] | None = None
        self._folder = None if folder is None else str(folder.path)
        self.log: RunLog = driver.entries
        """The run's entries on this machine."""
        self.held_out = HeldOutCurve(folder.held_out if folder else None)
        """The losses of theta that this machine has computed or received."""
        self._curves = Curves(workload.trainer.telemetry, self.held_out)
        workload.measuring.on_outer_step = lambda step: self._curves.add_outer_step(step, driver.rounds.costs)

    async def take_part(self) -> None:
        """Train in the run until `leave` is called. Raises: the DilocoPeerError that ends the volunteer earlier."""
        driving = start_task(self._driver.run())
        keeping = start_task(keep_announced(self._transport, self.run.manifest, self.others, self._remembered))
        beside = [keeping, start_task(self._look_at_run())]
        peer = self._driver.peer
        ends = [
            self._workload.trainer.wait_for_death(),
            self._transport.daemon.failure(),
            wait_for_copy(self._transport, self.run.run_id, peer),
        ]
        if self._admission is not None:
            ends.append(wait_for_refusal(self._admission, peer.me))
        failures = [start_task(end) for end in ends]
        try:
            done, _ = await asyncio.wait([driving, *failures], return_when=asyncio.FIRST_COMPLETED)
            broken: list[DilocoPeerError] = [end.result() for end in failures if end in done]
            if broken:
                self._driver.leave(at_once=True)  # without a hand-over, so that other peers need not wait for this one
            try:
                await driving
            except LocalNetworkError as error:
                broken.append(error)
            for failure in broken:
                if self._leaving is None:
                    raise failure
                # Errors while leaving are only logged, because systemd may have killed this peer's child processes.
                logger.debug("while leaving: %s", failure)
        finally:
            await cancel_and_wait(driving, *beside, *failures, *filter(None, [self._leaving]))

    async def _look_at_run(self) -> None:
        """Repeatedly record the losses that other peers report, and stop training when the run is finished."""
        has_warned = False
        while True:
            if self._founds_alone and not has_warned:
                logger.warning("%s", ALONE)
                has_warned = True
            beats = self.heartbeats()
            self._curves.add_heartbeats(beats[0], RunView(self.run, beats))
            if is_finished(beats[0], self.run.config):
                self._driver.rest()
            await asyncio.sleep(LOOK_SECONDS)

    @property
    def _founds_alone(self) -> bool:
        """True if this machine trains the first outer step of another organiser's run, and no other peer is online."""
        peer, organiser = self._driver.peer, self.run.manifest.organiser
        return peer.log.last is None and peer.trainer.is_training and not self.others() and organiser != peer.me

    @property
    def outer_step(self) -> int:
        """The number of outer steps taken in this machine's log."""
        return self._driver.peer.log.position.index

    def facts(self) -> OwnFacts:
        """Return the facts that this process knows about the run, for displays."""
        under_way = None if self._workers is None else self._workers.under_way
        return OwnFacts(
            heartbeats=self.heartbeats(),
            log=self.log,
            state=self._driver.peer.state,
            trains_on=under_way is not None and under_way.has_rest,
            reach=self._transport.links.reach(),
            caps=self._transport.caps,
            sent=self._transport.upload.passed,
            received=self._transport.download.passed,
            purposes=_bytes_by_purpose(self._transport.upload.passed, self._transport.download.passed),
            download=self._driver.replication.download,
            fragments=self._fragments(),
            bytes_per_token=self._workload.trainer.telemetry.bytes_per_token,
            uncompiled="" if self._workers is None else self._workers.supervisor.uncompiled,
            sending=self._driver.sending,
        )

    def _fragments(self) -> Fragments | None:
        """Return the state of the fragments for displays, or None in a run that does not stream."""
        workers = self._workers
        if self.run.config.streaming.is_plain or workers is None:
            return None
        rounds = self._driver.peer.rounds.values()
        latest, count = workers.telemetry.latest, len(workers.fragments)
        longest = latest.get("longest_average_seconds", math.nan)
        return Fragments(
            count=count,
            averaging=sum(round.is_exchanging for round in rounds),
            done=count - len(rounds),
            overlap=workers.overlap.steps,
            late=int(latest.get("late_averages", 0)),
            wait_share=latest.get("average_wait_share", 0.0),
            longest=None if math.isnan(longest) else longest,
        )

    @property
    def is_at_work(self) -> bool:
        """True if this machine takes part in an outer step that is not finished."""
        outer_steps = outer_steps_in_force(self.run.config, self._driver.peer.log.amendment)
        return self._driver.peer.state in AT_WORK and self.outer_step < outer_steps

    def hold(self, held: bool) -> None:
        """Pause the inner steps if `held`, else resume them. A paused peer stays in the run, where the others see it as
        late."""
        if self._workers is not None:
            self._workers.supervisor.hold(held)

    def leave(self) -> None:
        """Leave politely: wait until another machine has the newest outer step, finish the current round, and inform
        the other peers. Then `take_part` returns."""
        self._leaving = self._leaving or start_task(self._hand_over())

    async def _hand_over(self) -> None:
        """Leave once another machine has the newest outer step, or after HAND_OVER_SECONDS. Training pauses
        meanwhile."""
        began = now()
        self.hold(True)
        try:
            while now() < began + (LAST_SECONDS if self._is_handed_over else HAND_OVER_SECONDS):
                if self._is_handed_over and not self._may_be_last:
                    break
                await asyncio.sleep(HAND_OVER_LOOK)
        finally:  # leave even after an error, because the owner wants to
            self._driver.leave()

    @property
    def _is_handed_over(self) -> bool:
        """True if enough other machines have the newest outer step, or if no other machine is online to fetch it.

        Other volunteers suffice, unless this one's id is the highest. As all volunteers may leave at once, that one
        waits for an archive, if there is one.
        """
        others, me = self.others(), self._driver.peer.me
        at_work = [beat for beat in others if beat.state in PARTICIPATING]
        archives = [beat for beat in others if beat.state is PeerState.ARCHIVING]
        needed = archives if archives and all(beat.peer < me for beat in at_work) else at_work
        step = self._driver.peer.settled.position.index
        return not needed or (not self._driver.peer.is_exchanging and bool(holders(needed, step)))

    @property
    def _may_be_last(self) -> bool:
        """True if this volunteer must leave last when all leave at once, because it has the greatest id of the peers at
        work and the run has no archive."""
        others, me = self.others(), self._driver.peer.me
        at_work = [beat.peer for beat in others if beat.state in PARTICIPATING]
        return bool(at_work) and max(at_work) < me and all(beat.state is not PeerState.ARCHIVING for beat in others)

    def farewell(self, is_away: bool = False) -> str:
        """Return the message for the owner after leaving, naming the machines that have the newest outer step. If
        `is_away`, name only this machine, because the owner reads the message when others may have left, too."""
        step = self.outer_step
        having = "" if is_away else holders(self.others(), step)
        others = "" if is_away else f"no other machine has outer step {step}, and "
        only = "this machine's disk has" if is_away else "only this machine has"
        if not step:
            return "left the run before its first outer step"
        if having:
            return f"left the run; outer step {step} is with {having}"
        if self._folder is None:
            return f"left the run; {others}this machine keeps nothing"
        if not Path(self._folder, MANIFEST).exists():
            return f"left the run; {others}this machine's folder {self._folder} is gone"
        if step >= outer_steps_in_force(self.run.config, self._driver.peer.log.amendment):
            export = f"diloco-peer export --from {shlex.quote(self._folder)} --out model"
            return f"left the finished run; {only} the model: to take it out, {export}"
        return f"left the run; {only} outer step {step}: join again from it to continue the run there"

    def heartbeats(self) -> list[Heartbeat]:
        """Return the newest heartbeat of each live peer, this peer's own first."""
        return [self._driver.heartbeat(), *self.others()]

    def others(self) -> list[Heartbeat]:
        """Return the newest heartbeat of each live peer but this one."""
        return list(self._driver.peer.membership.live(now()).values())


def _bytes_by_purpose(all_sent: int, all_received: int) -> dict[str, tuple[int, int]]:
    """Return the bytes sent and the bytes received for "rounds", for "measuring" links, and for "serving", which has
    the rest of `all_sent` and `all_received`."""
    counts = {
        "rounds": metrics.bytes_moved(metrics.ROUND_BYTES),
        "measuring": metrics.bytes_moved(metrics.MEASURING_BYTES),
    }
    known = [sum(directions) for directions in zip(*counts.values(), strict=True)]
    return counts | {"serving": (max(0, all_sent - known[0]), max(0, all_received - known[1]))}


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
    """Yield a transport connected to the swarm, and disconnect at the end of the `with` block. Raises:
    SwarmUnreachableError, LocalNetworkError, ManifestError."""
    transport = await HivemindTransport.create(
        identity, initial_peers, listen, announce, client_mode, links=links, remembered=remembered
    )
    try:
        yield transport
    finally:
        await transport.close()


@asynccontextmanager
async def reading(invite: Invite, identity: Path | None) -> AsyncIterator[tuple[Run, HivemindTransport]]:
    """Connect to a run to read its log and state, with the key in the file `identity`. Yield the run and the transport.

    Without a file the key is a new one, but this machine's key in a run by invitation. Raises: AdmissionError when the
    run does not admit the key; see `connected` and `find_run`.
    """
    if identity is None:
        async with connected(Identity.generate(), invite.addresses) as transport:
            run = await find_run(transport, invite.run_id)
            if not run.manifest.is_by_invitation:
                yield run, transport
                return
    with hold_identity(identity) as key:
        async with connected(key, invite.addresses) as transport:
            run = await find_run(transport, invite.run_id)
            await enter(transport, run, key, invite.addresses, RunFolder.at(run.run_id, key.peer_id))
            yield run, transport
