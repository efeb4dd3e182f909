"""Where a dashboard has what it shows from: a bootstrap node's archive, a follower, or a volunteer."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opendiloco.run import Run
from opendiloco.storage.run_folder import HeldOutCurve
from peers.log.folder import RunLog
from peers.network.run_failures import RunFailures
from peers.presence.heartbeat import Heartbeat
from peers.values.manifest import SignedManifest
from peers.values.signed_heads import SignedHeads

if TYPE_CHECKING:
    from opendiloco.storage.archive import ArchivedRun
    from opendiloco.volunteer.volunteer import Volunteer
    from peers.network.transport import HivemindTransport

UPDATE_SECONDS = 10.0  # between two looks at which runs a node remembers
NO_ARCHIVE = (
    "This node does not keep the run's log. With --archive FOLDER it does, and shows entries, signatures and "
    "contributions."
)
NOT_YET = "The run's log has not come here yet."


@dataclass(frozen=True)
class Source:
    """One run, as this process knows it. `me` is our own peer, if we train in it; `no_log` says why there is no log.

    `held_out` takes the held-out losses that are heard of. `found` has those that somebody else here keeps.
    """

    run: Run
    heartbeats: Callable[[], Awaitable[Sequence[Heartbeat]]]
    log: Callable[[], RunLog | None]
    signed: Callable[[], SignedHeads]
    held_out: HeldOutCurve = field(default_factory=HeldOutCurve)
    found: Callable[[], Mapping[int, float]] = dict
    me: str = ""
    no_log: str = NOT_YET


def follower_source(run: Run, network: HivemindTransport, log: Callable[[], RunLog | None]) -> Source:
    """Return the run that this machine follows."""
    return Source(
        _as_signed(run), lambda: network.heartbeats(run.run_id), log, lambda: network.signed_heads_of(run.run_id)
    )


def volunteer_source(volunteer: Volunteer, network: HivemindTransport) -> Source:
    """Return the run that this machine trains in. It knows who is there without asking."""
    run = volunteer.run

    async def heartbeats() -> Sequence[Heartbeat]:
        return volunteer.heartbeats()

    return Source(
        _as_signed(run),
        heartbeats,
        lambda: volunteer.log,
        lambda: network.signed_heads_of(run.run_id),
        found=lambda: volunteer.held_out.losses,
        me=volunteer.heartbeats()[0].peer,
    )


def _as_signed(run: Run) -> Run:
    """Return the same without what this machine's owner has chosen, such as folders."""
    return Run.from_manifest(run.manifest)


class NodeSources:
    """The runs that a bootstrap node remembers, and their logs where it keeps them."""

    def __init__(self, network: HivemindTransport, kept: Callable[[str], ArchivedRun | None] | None) -> None:
        self._network = network
        self._kept = kept
        self._sources: dict[str, Source] = {}
        self._failures = RunFailures("finding its log")
        self._updated_at = float("-inf")

    def current(self, manifests: Iterable[SignedManifest]) -> list[Source]:
        """Return a source for each of these runs, which take long to go through: that is not done each time."""
        if time.monotonic() - self._updated_at >= UPDATE_SECONDS:
            known = {manifest.run_id: manifest for manifest in manifests}
            self._sources = {run_id: source for run_id, source in self._sources.items() if run_id in known}
            for run_id, manifest in known.items():
                if self._failures.is_due(run_id):
                    with self._failures.caught(run_id):
                        self._begin(run_id, manifest)
            self._updated_at = time.monotonic()
        return list(self._sources.values())

    def _begin(self, run_id: str, manifest: SignedManifest) -> None:
        archived = self._kept(run_id) if self._kept else None
        source = self._sources.get(run_id)
        if source is not None and (archived is None or source.log() is not None):
            return
        self._sources[run_id] = Source(
            source.run if source else Run.from_manifest(manifest),
            lambda: self._network.heartbeats(run_id),
            lambda: archived.log if archived else None,
            lambda: self._network.signed_heads_of(run_id),
            archived.held_out if archived else HeldOutCurve(),
            no_log=NOT_YET if self._kept else NO_ARCHIVE,
        )
