"""The runs that a dashboard shows, each with a history that this process collects, as JSON.

A run with an open page is updated every 2 seconds, the others in turn, so that their curves have few gaps. Peers'
claims may be false: the dashboard shows them as text or as numbers of bounded size. Unknown values are shown as
unknown.
"""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from opendiloco.run import Run, join_options
from opendiloco.storage.run_folder import HeldOutCurve
from opendiloco.view.amended import changed_values, changes_in_words
from opendiloco.view.chronicle import KEPT, Change, Chronicle, Record, Signatures
from opendiloco.view.run_view import RunView, bounded_loss, plain_peer, plain_signed
from peers.errors import DilocoPeerError
from peers.log.folder import RunLog
from peers.log.state import LogError
from peers.network.run_failures import RunFailures
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.values.manifest import Invite, SignedManifest
from peers.values.signed_heads import SignedHeads
from peers.values.system import cancel_and_wait, start_task

if TYPE_CHECKING:
    from opendiloco.storage.archive import ArchivedRun
    from opendiloco.volunteer.volunteer import Volunteer
    from peers.network.transport import HivemindTransport

# Sources --------------------------------------------------------------------------------------------------------------
UPDATE_SECONDS = 10.0  # seconds between two updates of the list of runs that a node knows
NO_ARCHIVE = (
    "This node does not keep the run's log. Start it with --archive FOLDER to see entries, signatures and "
    "contributions."
)
NOT_YET = "This node has not received the run's log yet."


@dataclass(frozen=True)
class Source:
    """The functions and values from which the dashboard learns about one run.

    `me` is the id of this process's own peer, if it trains in the run. `no_log` is the reason that the page shows while
    there is no log. `held_out` collects the held-out losses from heartbeats; `found` returns held-out losses that
    another part of this process collects. `addresses` are those of nodes through which a new volunteer finds the run.
    """

    run: Run
    heartbeats: Callable[[], Awaitable[Sequence[Heartbeat]]]
    log: Callable[[], RunLog | None]
    signed: Callable[[], SignedHeads]
    held_out: HeldOutCurve = field(default_factory=HeldOutCurve)
    found: Callable[[], Mapping[int, float]] = dict
    me: str = ""
    no_log: str = NOT_YET
    addresses: tuple[str, ...] = ()


def follower_source(run: Run, network: HivemindTransport, log: Callable[[], RunLog | None]) -> Source:
    """Return the source from which the dashboard learns about a run that this process follows."""
    signed = Run.from_manifest(run.manifest)  # the run without the owner's own settings, such as folders
    return Source(signed, lambda: network.heartbeats(run.run_id), log, lambda: network.signed_heads_of(run.run_id))


def volunteer_source(volunteer: Volunteer, network: HivemindTransport) -> Source:
    """Return the source from which the dashboard learns about the run that this process trains in. Its heartbeats come
    from the volunteer itself, without a request to the network."""
    run = volunteer.run

    async def heartbeats() -> Sequence[Heartbeat]:
        return volunteer.heartbeats()

    return Source(
        Run.from_manifest(run.manifest),
        heartbeats,
        lambda: volunteer.log,
        lambda: network.signed_heads_of(run.run_id),
        found=lambda: volunteer.held_out.losses,
        me=volunteer.heartbeats()[0].peer,
    )


class NodeSources:
    """The dashboard's sources of heartbeats and logs, one for each run that a bootstrap node knows. `kept` returns the
    node's archived log of the run with a given id; None: the node archives no logs."""

    def __init__(self, network: HivemindTransport, kept: Callable[[str], ArchivedRun | None] | None) -> None:
        self._network = network
        self._kept = kept
        self._known: dict[str, SignedManifest] = {}  # by run id
        self._sources: dict[str, Source] = {}
        self._failures = RunFailures("finding its log")
        self._updated_at = float("-inf")

    def current(self, manifests: Iterable[SignedManifest]) -> list[Source]:
        """Return a source for each run in `manifests`, which is read at most every `UPDATE_SECONDS`, because it is slow
        to iterate. A source has the run's log as soon as the archive has opened it."""
        if time.monotonic() - self._updated_at >= UPDATE_SECONDS:
            self._known = {manifest.run_id: manifest for manifest in manifests}
            self._sources = {run_id: source for run_id, source in self._sources.items() if run_id in self._known}
            self._updated_at = time.monotonic()
        for run_id, manifest in self._known.items():
            if self._failures.is_due(run_id):
                with self._failures.caught(run_id):
                    self._begin(run_id, manifest)
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
            addresses=self._network.addresses,
            no_log=NOT_YET if self._kept else NO_ARCHIVE,
        )


# History of a run ----------------------------------------------------------------------------------------------------
Plain = dict[str, Any]

SHOWN_PEERS = 200  # most rows of the table of peers, because each change sends the whole table
SHOWN_ABSENT = 16  # most absent peers that are listed for an entry
REMEMBERED_SECONDS = 600.0  # seconds for which a peer that is gone stays in the table of peers
BUCKET = 0.25  # outer steps between two points of a training curve; doubled when it has too many points
MOST_POINTS = 1000  # most points of a curve
SHOWN_SPANS = 240  # number of newest entries whose times are kept
USUAL = 20  # number of newest entries whose median time is the usual time of an outer step


class _Curve:
    """A curve of bounded size: the mean of the values in each bucket. All buckets have the same width, which doubles
    when there are more than `MOST_POINTS` buckets."""

    def __init__(self, width: float) -> None:
        self._width = width
        self._buckets: dict[int, tuple[float, int]] = {}  # sum and number of a bucket's values, by the bucket's index

    def add(self, x: float, y: float) -> None:
        """Add y to the mean of the bucket of x. With more than `MOST_POINTS` buckets, merge neighbours in pairs."""
        self._put(int(x // self._width), y, 1)
        if len(self._buckets) > MOST_POINTS:
            narrow, self._width, self._buckets = self._buckets, 2 * self._width, {}
            for bucket, (total, count) in narrow.items():
                self._put(bucket // 2, total, count)

    def _put(self, bucket: int, added: float, values: int) -> None:
        total, count = self._buckets.get(bucket, (0.0, 0))
        self._buckets[bucket] = total + added, count + values

    @property
    def points(self) -> list[tuple[float, float]]:
        """The means from left to right, each with the left edge of its bucket."""
        return [(bucket * self._width, total / count) for bucket, (total, count) in sorted(self._buckets.items())]


class _EntryTimes(NamedTuple):
    """The times of one entry: `at` is when it was observed, in seconds since the epoch; `seconds` is the time since the
    preceding entry, and `round_seconds` the round's part of it (None: unknown). `working_peers` is counted at `at`."""

    at: float
    seconds: float | None
    round_seconds: float | None
    working_peers: int


class _Timeline:
    """The times of a run's outer steps, as this process observes them. The log has no times, because peers' clocks
    differ. The times are as exact as the updates are frequent."""

    def __init__(self) -> None:
        self.spans: dict[int, _EntryTimes] = {}  # the times of each entry, by the entry's index
        self._step: int | None = None
        self._since: float | None = None  # when this process saw the present outer step begin
        self._round_since: float | None = None

    @property
    def usual_seconds(self) -> float | None:
        """The median seconds of the newest outer steps; None: not known yet."""
        known = [span.seconds for span in list(self.spans.values())[-USUAL:] if span.seconds is not None]
        return statistics.median(known) if known else None

    def observe(self, outer_step: int, is_averaging: bool, working_peers: int, at: float) -> None:
        """Record the outer step that most peers have reached at time `at`, whether its round is under way, and the
        number of peers that work on it."""
        if self._step is not None and outer_step > self._step:
            is_next = outer_step == self._step + 1
            seconds = at - self._since if is_next and self._since is not None else None
            in_round = at - self._round_since if is_next and self._round_since is not None else None
            self.spans[outer_step - 1] = _EntryTimes(at, seconds, in_round, working_peers)
            while len(self.spans) > SHOWN_SPANS:
                del self.spans[next(iter(self.spans))]
        if outer_step != self._step:
            self._since = None if self._step is None else at
            if self._step is not None and outer_step < self._step:  # another branch of the log, or peers that lie
                self.spans = {index: span for index, span in self.spans.items() if index < outer_step}
            self._step, self._round_since = outer_step, None
        if is_averaging and self._round_since is None:
            self._round_since = at


class RunHistory:
    """The history of one run, as this process has seen it. `me` is the id of this process's own peer, if it trains in
    the run."""

    def __init__(
        self,
        run: Run,
        me: str = "",
        held_out: HeldOutCurve | None = None,
        no_log: str = "",
        addresses: tuple[str, ...] = (),
    ) -> None:
        """Create an empty history. `no_log` says why there is no log, and the remedy. `addresses` are put into the
        invite that the page shows."""
        self.me = me
        self._join = f"diloco-peer join {Invite(run.run_id, addresses)}" if addresses else ""
        self.timeline = _Timeline()
        self._no_log = no_log
        self._chronicle = Chronicle()
        self._has_log = False
        self._teams: dict[str, str] = {}  # each peer's team, by peer id; kept for contributors that have gone
        self._held_out = held_out or HeldOutCurve()
        self._losses = _Curve(BUCKET)
        self._heartbeats: tuple[Heartbeat, ...] = ()
        self.view = RunView(run)  # the run at the last update
        # By peer id: the peer's newest heartbeat, and when it arrived, in seconds since the epoch.
        self._seen: dict[str, tuple[Heartbeat, float]] = {}
        self._looked_at: float | None = None
        self._signed: dict[str, object] | None = None

    # Input ----------------------------------------------------------------------------------------------------
    def observe(self, heartbeats: Iterable[Heartbeat], at: float) -> None:
        """Record all known heartbeats, as they are at the time `at` (seconds since the epoch)."""
        self._looked_at, self._heartbeats = at, tuple(heartbeats)
        view = self._look()
        kept = {peer: team for peer, team in self._teams.items() if peer in self._chronicle.contributions}
        current = {beat.peer: beat.team for beat in view.peers}
        self._teams = {peer: team for peer, team in (kept | current).items() if team}
        for beat in view.peers:
            known = self._seen.get(beat.peer)
            if known is None or beat.sequence > known[0].sequence:
                self._seen[beat.peer] = beat, at
        live = {beat.peer for beat in view.peers}
        old = [peer for peer, (_, seen) in self._seen.items() if peer not in live and at - seen > REMEMBERED_SECONDS]
        for peer in old:
            del self._seen[peer]
        if view.working:
            averaging = [beat.index for beat in view.working if beat.state is PeerState.AVERAGING]
            self.timeline.observe(view.outer_step, view.outer_step in averaging, len(view.working), at)
        self._take_losses(view)

    def recall(self, held_out: Mapping[int, float]) -> None:
        """Add held-out losses that another part of this process has collected."""
        for index, loss in held_out.items():
            self._held_out.add(index, loss)

    def read(self, log: RunLog | None, signed: SignedHeads | None = None) -> bool:
        """Read the next entries of the run's log. Return True if there may be more to read at once. Raises:
        LogError."""
        self._signed = None if signed is None else plain_signed(signed)
        self._has_log = log is not None and len(log) > 0
        is_behind = log is not None and self._chronicle.read(log)
        self._look()
        return is_behind

    def _look(self) -> RunView:
        before, run = self.view, self.view.run
        chronicle = self._chronicle if self._has_log else None
        self.view = RunView(run, self._heartbeats, chronicle=chronicle, step_before=before.outer_step)
        return self.view

    def _take_losses(self, view: RunView) -> None:
        """Add to the curves the losses that peers report. The training curve gets the peers' median, which less than
        half of the peers cannot falsify."""
        inner_steps = view.run.config.training.inner_steps
        training = [beat for beat in view.working if beat.loss is not None and beat.index == view.outer_step]
        if training:
            step = view.outer_step + statistics.median(min(beat.inner_step / inner_steps, 1.0) for beat in training)
            self._losses.add(step, statistics.median(beat.loss for beat in training if beat.loss is not None))
        for loss in view.held_out:
            self._held_out.add(loss.index, loss.loss)

    # Output ---------------------------------------------------------------------------------------------------
    def summary(self) -> Plain:
        """Return the run's row in the list of runs. A value that neither the log nor a peer has shown is None."""
        view = self.view
        none_yet = 0 if view.working else None  # without a peer at work, the run may have entries that were not read
        return {
            "run": view.run.run_id,
            "name": view.run.config.name,
            "outer_step": view.outer_step or none_yet,
            "outer_steps": view.outer_steps,
            "peers": len(view.trainers),
            "tokens_per_second": view.tokens_per_second,
            "lineage_tokens": view.lineage_tokens or none_yet,
            "looked_at": self._looked_at,
        }

    def sections(self) -> dict[str, Plain]:
        """Return the sections of the run's page. The server sends a section when it changes."""
        return {
            "run": self._run(),
            "peers": self._peers(),
            "losses": self._curves(),
            "rounds": self._rounds(),
            "contributions": self._contributions(),
        }

    def _run(self) -> Plain:
        view, config = self.view, self.view.run.config
        return self.summary() | {
            "organiser": view.run.manifest.organiser,
            "about": config.about.lines(),
            "join": self._join and self._join + join_options(view.run),
            "model": view.model,
            "data": view.sources,
            "inner_steps": config.training.inner_steps,
            "sequence_length": config.training.sequence_length,
            "codec": config.codec.kind,
            "disagreements": [index for index in view.agreement.disagreements if index <= view.outer_steps],
            "is_finished": view.is_finished,
            "seconds_per_step": self.timeline.usual_seconds,
            "archives": len(view.peers) - len(view.trainers),
            "signed": self._signed,
            "amended": view.amended.lines(),
            "me": self.me,
            "no_log": "" if self._has_log else self._no_log or "The log has no entry yet.",
        }

    def _peers(self) -> Plain:
        """Return the table of peers: this process's own peer, then the others from the largest contribution to the
        smallest, then archives, then peers that have gone."""
        live, minorities = {beat.peer for beat in self.view.peers}, self.view.agreement.minorities
        tokens = {peer: brought.tokens for peer, brought in self._chronicle.contributions.items()}

        def rank(beat: Heartbeat) -> tuple[bool, bool, bool, int, str]:
            peer, is_archive = beat.peer, beat.state is PeerState.ARCHIVING
            return peer not in live, peer != self.me, is_archive, -tokens.get(peer, 0), peer

        ordered = sorted(self._seen.values(), key=lambda seen: rank(seen[0]))
        rows = [
            plain_peer(beat, self.view.run.config)
            | ({} if beat.peer in live else {"state": "gone", "tokens_per_second": 0.0})
            | {
                "relayed": len(beat.relayed),
                "unreached": len(beat.unreached),
                "digest": beat.head.hex()[:8],
                "disagrees": beat.peer in minorities,
                "seen": seen,
                "tokens": tokens.get(beat.peer),
                "share": tokens[beat.peer] / max(1, self._chronicle.tokens) if beat.peer in tokens else None,
            }
            for beat, seen in ordered[:SHOWN_PEERS]
        ]
        return {"rows": rows, "more": len(ordered) - len(rows)}

    def _curves(self) -> Plain:
        held_out = sorted(self._held_out.losses.items())
        thinned = held_out[:: 1 + len(held_out) // MOST_POINTS]
        return {
            "training": [(round(step, 2), round(loss, 4)) for step, loss in self._losses.points],
            "held_out": [(step, round(bounded_loss(loss), 4)) for step, loss in thinned],
        }

    def _rounds(self) -> Plain:
        """Return the newest entries, oldest first, with the log's values and the times that this process has
        observed."""
        entries = {record.index: _plain_record(record, self.view.run) for record in self._chronicle.records}
        spans = {index: span._asdict() for index, span in self.timeline.spans.items()}
        newest = sorted({*entries, *spans})[-KEPT:]
        return {"rows": [{"index": index} | entries.get(index, {}) | spans.get(index, {}) for index in newest]}

    def _contributions(self) -> Plain:
        found = sorted(self._chronicle.contributions.items(), key=lambda one: (-one[1].tokens, one[0]))
        teams = defaultdict[str, list[int]](list)
        for peer, brought in found:
            if peer in self._teams:
                teams[self._teams[peer]].append(brought.tokens)
        board = sorted(teams.items(), key=lambda one: (-sum(one[1]), one[0]))[:SHOWN_PEERS]
        rows = [{"peer": peer, "team": self._teams.get(peer, "")} | asdict(own) for peer, own in found[:SHOWN_PEERS]]
        return {
            "rows": rows,
            "more": len(found) - len(rows),
            "teams": [{"team": team, "tokens": sum(tokens), "peers": len(tokens)} for team, tokens in board],
            "tokens": self._chronicle.tokens,
            "first": self._chronicle.first,
        }


def _plain_record(record: Record, run: Run) -> Plain:
    return {
        "digest": record.digest.hex(),
        "payload": record.payload.hex(),
        "state": None if record.state_digest is None else record.state_digest.hex(),
        "members": record.members,
        "tokens": record.tokens,
        **asdict(record.signatures or Signatures()),
        "absent": [absence._asdict() for absence in record.absent[:SHOWN_ABSENT]],
        "absent_count": len(record.absent),
        "joined": list(record.joined[:SHOWN_ABSENT]),
        "joined_count": len(record.joined),
        "change": None if record.change is None else _plain_change(record.change, run),
    }


def _plain_change(change: Change, run: Run) -> Plain:
    changed = changed_values(run.config, change.before, change.amendment)
    return {"number": change.amendment.number, "values": changes_in_words(changed)}


# Updates --------------------------------------------------------------------------------------------------------------
logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5  # seconds between two checks for runs that are due for an update
WATCHED_SECONDS = 2.0  # least seconds between two updates of a run with an open page
UNWATCHED_SECONDS = 30.0  # least seconds between two updates of a run without an open page
LOOK_LIMIT = 20.0  # most seconds that an update waits for a run's heartbeats; then the page keeps its last values
PAUSE_SECONDS = 0.05  # seconds left to other tasks between reading two slices of a long log
PING_SECONDS = 15.0  # seconds between two comments that keep an idle event stream open


class Board:
    """The content of one page, as JSON by section. Each browser that shows the page gets a section again when this
    section changes."""

    def __init__(self) -> None:
        self.sections: dict[str, str] = {}
        self.watchers = 0
        self._changed = asyncio.Event()

    def show(self, sections: Mapping[str, Any]) -> None:
        for name, content in sections.items():
            text = json.dumps(content, allow_nan=False, separators=(",", ":"))
            if self.sections.get(name) != text:
                self.sections[name] = text
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()

    async def changes(self) -> AsyncIterator[tuple[str, str] | None]:
        """Yield all sections, then each section again when it changes; yield None after `PING_SECONDS` without a
        change."""
        sent: dict[str, str] = {}
        self.watchers += 1
        try:
            while True:
                changed = self._changed
                for name, text in list(self.sections.items()):
                    if sent.get(name) != text:
                        sent[name] = text
                        yield name, text
                while not changed.is_set():
                    try:
                        async with asyncio.timeout(PING_SECONDS):
                            await changed.wait()
                    except TimeoutError:
                        yield None
        finally:
            self.watchers -= 1


class RunWatch:
    """Keeps the history and the page of one run up to date."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.board = Board()
        self.history = RunHistory(source.run, source.me, source.held_out, source.no_log, source.addresses)
        self.summary = self.history.summary()  # the run's row in the list of runs
        self.updated_at = float("-inf")  # time of the last update on this machine's monotonic clock
        self._updating = asyncio.Lock()

    def is_due(self, now: float) -> bool:
        return now - self.updated_at >= (WATCHED_SECONDS if self.board.watchers else UNWATCHED_SECONDS)

    def take(self, source: Source) -> None:
        """Use `source` from now on. A new one has a log and held-out losses that the one before did not have: update
        the run at once."""
        if source is not self.source:
            self.source, self.updated_at = source, float("-inf")
            self.history.recall(source.held_out.losses)

    async def update(self) -> None:
        """Update the history and the page, unless another task has just done so. A part that cannot be read now keeps
        its last values until the next update."""
        async with self._updating:
            if time.monotonic() - self.updated_at < WATCHED_SECONDS:
                return
            source = self.source
            try:
                await self._read_source()
                self._publish()
            except Exception:  # an internal error over one run must not stop the others
                logger.exception("the dashboard cannot update run %s and will try again", self.source.run.run_id)
            if source is self.source:
                self.updated_at = time.monotonic()

    async def _read_source(self) -> None:
        try:
            async with asyncio.timeout(LOOK_LIMIT):
                self.history.observe(await self.source.heartbeats(), time.time())
            self.history.recall(self.source.found())
            published_at = time.monotonic()
            while self.history.read(self.source.log(), self.source.signed()):
                await asyncio.sleep(PAUSE_SECONDS)
                if time.monotonic() - published_at >= WATCHED_SECONDS:
                    self._publish()
                    published_at = time.monotonic()
        except (TimeoutError, DilocoPeerError, LogError) as error:
            logger.debug("the dashboard could not read run %s: %r", self.source.run.run_id, error)

    def _publish(self) -> None:
        summary = self.history.summary()
        # `dumps` raises if the summary cannot be JSON. The dashboard's list of runs then keeps the previous summary.
        json.dumps(summary, allow_nan=False)
        self.summary = summary
        if self.board.watchers or not self.board.sections:
            self.show()

    def show(self) -> None:
        self.board.show(self.history.sections())


class RunWatches:
    """Keeps all runs of the dashboard up to date. `sources` returns a source for each present run, and is called at
    each update."""

    def __init__(self, sources: Callable[[], Iterable[Source]]) -> None:
        self._sources = sources
        self._is_failing = False
        self._failures = RunFailures("making its page")
        self.runs: dict[str, RunWatch] = {}
        self.board = Board()  # the page with the list of runs

    async def keep_updating(self) -> None:
        """Update the list of runs, and each run that is due for an update, until the task is cancelled."""
        updating: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                self._update()
                self.board.show({"runs": [watch.summary for watch in self.runs.values()]})
                updating = {run: task for run, task in updating.items() if not task.done()}
                for run, watch in self._due(updating):
                    updating[run] = start_task(watch.update())
                await asyncio.sleep(LOOK_SECONDS)
        except Exception:
            logger.exception("dashboard updates stopped after an internal error: restart to resume them")
        finally:
            with suppress(asyncio.CancelledError):
                await cancel_and_wait(*updating.values())

    def _update(self) -> None:
        """Update the list of runs that the dashboard shows. If the list cannot be read, keep the old list."""
        try:
            sources = {source.run.run_id: source for source in self._sources()}
        except Exception:
            if not self._is_failing:
                logger.exception("the dashboard cannot update its list of runs and will try again")
            self._is_failing = True
            return
        self._is_failing = False
        for run in self.runs.keys() - sources.keys():
            del self.runs[run]
        for run, source in sources.items():
            if run in self.runs:
                self.runs[run].take(source)
            elif self._failures.is_due(run):
                with self._failures.caught(run):
                    self.runs[run] = RunWatch(source)

    def _due(self, updating: Mapping[str, object]) -> list[tuple[str, RunWatch]]:
        """Return the runs to update now: all due runs with an open page. If no run without an open page is being
        updated, also the due run without an open page that was updated longest ago."""
        now = time.monotonic()
        due = [(run, watch) for run, watch in self.runs.items() if run not in updating and watch.is_due(now)]
        watched = [(run, watch) for run, watch in due if watch.board.watchers]
        if any(not self.runs[run].board.watchers for run in updating if run in self.runs):
            return watched
        others = sorted((one for one in due if not one[1].board.watchers), key=lambda one: one[1].updated_at)
        return watched + others[:1]
