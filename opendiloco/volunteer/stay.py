"""One stay of a volunteer in a run, from finding the run to leaving it, as its settings and its owner say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace

from opendiloco.owner.watch import OwnersWatch
from opendiloco.run import Run, find_run
from opendiloco.settings.join_settings import JoinSettings
from opendiloco.shared_memory import MemoryCap, cap_memory
from opendiloco.stages import at_stage, watched_by
from opendiloco.storage.checkpointer import Checkpointer, KeepingPlan
from opendiloco.storage.run_folder import Journal, RunFolder
from opendiloco.view.progress import CHECKING, FINDING, JoinView, ProgressReader
from opendiloco.volunteer.admission import enter
from opendiloco.volunteer.signed_heads import ask_for_signed_heads
from opendiloco.volunteer.sole import listening
from opendiloco.volunteer.volunteer import Volunteer, connected, volunteering
from opendiloco.workers.trackers import tracking
from peers.network.links import LinkSettings
from peers.network.neighbours import announced
from peers.network.own_network import everywhere
from peers.network.throttle import Caps
from peers.network.transport import HivemindTransport
from peers.values.identity import Identity
from peers.values.manifest import Invite
from peers.values.tickets import Ticket


class Stay:
    """What one stay needs to know."""

    def __init__(
        self,
        settings: JoinSettings,
        invite: Invite,
        key: Identity,
        watch: OwnersWatch,
        ticket: Ticket | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._settings = settings
        self._invite = invite
        self._key = key
        self._watch = watch
        self._ticket = ticket
        self._journal = journal
        self._caps = Caps.of_megabits(settings.upload_limit, settings.download_limit)

    async def take_part(self, view: JoinView, when_ready: Callable[[Volunteer, HivemindTransport], None]) -> None:
        """Find the run, and take part in it until asked to leave. Raises: DilocoPeerError."""
        settings, invite, key = self._settings, self._invite, self._key
        if settings.memory_limit is not None:
            cap_memory(MemoryCap(settings.memory_limit))
        before = RunFolder.at(invite.run_id, key.peer_id, settings.state)
        remembered = before.remembered_peers()
        links = LinkSettings.of_megabits(settings.data_port, settings.relay_limit)
        listen = settings.listen or everywhere(0)
        with watched_by(view.stage), tracking(settings.trackers, invite.run_id, key.peer_id) as trackers:
            at_stage(FINDING)
            async with connected(
                key, invite.addresses, listen, settings.announce, links=links, remembered=remembered.addresses
            ) as transport:
                transport.cap(self._caps)
                run = self._as_wanted(await find_run(transport, invite.run_id, before.remembered_manifest()))
                folder = RunFolder.open(run, key.peer_id, settings.state)
                await ask_for_signed_heads(transport, run, invite.addresses, folder)
                admission = await enter(transport, run, key, invite.addresses, folder, self._ticket)
                view.say(f"found run {run.run_id}; starting a worker (some seconds)")
                at_stage(CHECKING)
                kept = folder if settings.keeps_anything else None
                async with (
                    self._announced(transport, run.run_id),
                    listening(transport, run.run_id) as sole,
                    volunteering(run, key, transport, settings.workers, kept, trackers) as volunteer,
                    Checkpointer(self._keeping(folder)) as checkpointer,
                ):
                    await sole
                    view.say(f"what outlives this process is in {folder.path}")
                    view.say(f"joining as {key.peer_id} on {volunteer.device}; Ctrl-C to leave")
                    volunteer.admitted_by(admission)
                    volunteer.be_in_team(settings.team or "")
                    volunteer.checkpoint_with(checkpointer)
                    volunteer.remember_with(remembered)
                    if self._journal is not None:
                        volunteer.record(self._journal)
                    self._watch.begin(volunteer, run.settings.timing.grace)
                    when_ready(volunteer, transport)
                    reader = ProgressReader(run, volunteer.facts, lambda: self._watch.reasons)
                    async with view.showing(reader):
                        await volunteer.take_part()

    def _announced(self, transport: HivemindTransport, run_id: str) -> AbstractAsyncContextManager[None]:
        if not self._settings.local_network:
            return nullcontext()
        return announced(self._key.peer_id, run_id, transport.addresses)

    def _as_wanted(self, run: Run) -> Run:
        """Return the run with what its owner chooses here. Raises: DataError."""
        settings = self._settings
        run = run.with_data(settings.data).with_own(settings.own_files)
        return replace(run, goes_on_alone=settings.on_partition == "continue")

    def _keeping(self, folder: RunFolder) -> KeepingPlan:
        settings, rate = self._settings, self._settings.checkpoint_rate
        return KeepingPlan(
            folder=folder,
            keep_newest=settings.keep,
            keep_every=settings.keep_every,
            rate=rate,
            remote=settings.remote,
            remote_rate=min(rate, self._caps.upload or rate),
            moments=settings.moments,
            disk_limit=settings.disk_limit,
        )
