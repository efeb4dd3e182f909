"""A volunteer's phase and figures: as values, in words, and as `diloco-peer join` shows them on a live screen or in log
lines."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from statistics import fmean
from typing import TYPE_CHECKING, Any

from opendiloco.owner.watch import how_to_go_on
from opendiloco.quantities import MEGABIT, counted, duration, in_words
from opendiloco.run import Run
from opendiloco.stages import NOT_COMPILING, WITH_A_COMPILER
from opendiloco.view.chronicle import Chronicle, Standing
from opendiloco.view.run_view import (
    RunView,
    held_out_lines,
    holders,
    is_finished,
    peers_table,
    reach_lines,
    reachability,
    row_of,
)
from peers.errors import DilocoPeerError
from peers.log.folder import RunLog
from peers.presence.heartbeat import Heartbeat
from peers.protocol.states import State
from peers.values.system import cancel_and_wait, start_task
from peers.values.wire import Reach

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live

    from opendiloco.config.run_config import CodecSection
    from peers.driver.training import Sending
    from peers.network.throttle import Caps
    from peers.transfer.download import Download


logger = logging.getLogger(__name__)

FINDING, CHECKING, DOWNLOADING = "finding the run", "checking this machine", "downloading the state"
STARTING, PREPARING, COMPILING = "starting the workers", "preparing data", "compiling"
TRAINING, SYNCHRONISING = "training", "synchronising"
FINISHED, LEAVING = "finished: handing out the model", "leaving the run"
OF_STATES: Mapping[State, str] = {
    State.JOINING: "waiting for a place in the run",
    State.FETCHING: DOWNLOADING,
    State.REPLAYING: "catching up with the others",
    State.TRAINING: TRAINING,
    State.READY: "waiting for the others",
    State.AVERAGING: SYNCHRONISING,
    State.APPLYING: SYNCHRONISING,
    State.LEFT: LEAVING,
}
"""The phase that each state of the protocol belongs to."""
ROUTINE = frozenset({TRAINING, SYNCHRONISING, OF_STATES[State.READY]})  # phases that recur in every outer step
ABOUT_DATA = ("tokenizing ", "downloading ", "checking ", "waiting for tokens")
"""Beginnings of the names of stages that prepare data."""
LOSSES = 2000  # number of newest inner steps in the loss curve
RATE_SECONDS = 5.0  # seconds over which a traffic rate is averaged
SHOWN_SENDING = 1.0  # least seconds of a contribution in the run's first format that the screen shows
REASON_LENGTH = 78  # characters of a compiler's error that fit into a line of 80 columns
BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 40  # characters of the loss curve, which fit into a line of 80 columns


@dataclass(frozen=True)
class _Work:
    """The progress of a phase that has taken `seconds`. `share` is the part of the phase that is done (0 to 1), or None
    if unknown."""

    share: float | None = None
    seconds: float = 0.0

    @property
    def left(self) -> float | None:
        """The estimated number of seconds until the phase ends, or None if unknown."""
        return self.seconds * (1 - self.share) / self.share if self.share else None


@dataclass(frozen=True)
class Fragments:
    """The state of a streaming run's fragments: their `count`, the number that is `averaging` now, the number that is
    `done` in this cycle, and the `overlap` in inner steps.

    Of the last training phase: the averages that it waited for, the share of its time spent waiting, and the seconds of
    the slowest average; None: none yet.
    """

    count: int
    averaging: int
    done: int
    overlap: int
    late: int = 0
    wait_share: float = 0.0
    longest: float | None = None


@dataclass(frozen=True)
class OwnFacts:
    """The facts that a volunteer's own process knows about its run. The first of `heartbeats` is the volunteer's own.

    `trains_on`: workers still train the last inner steps before the average that is under way. `reach` is the path to
    each other peer. `purposes` are the bytes sent and received by purpose. `download` is the last download of the
    state. `bytes_per_token` is the mean number of bytes of held-out text in a token. `uncompiled` is the reason why
    training is not compiled although it should be. `sending` is the format of the last contribution.
    """

    heartbeats: Sequence[Heartbeat]
    log: RunLog
    state: State
    trains_on: bool
    reach: Mapping[str, Reach]
    caps: Caps
    sent: int
    received: int
    purposes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    download: Download | None = None
    fragments: Fragments | None = None
    bytes_per_token: float | None = None
    uncompiled: str = ""
    sending: Sending | None = None


@dataclass(frozen=True)
class ProgressReport:
    """One volunteer's progress at one moment.

    `up` and `down` are bytes of bulk data a second. The volunteer is paused while there are `pause_reasons`, and leaves
    at `until`. `month` is the month's traffic with its limits, if there are any, and `machine` the temperature and
    power, both in words.
    """

    view: RunView
    facts: OwnFacts
    phase: str
    work: _Work
    losses: Sequence[float] = ()
    contribution: Standing | None = None
    up: float = 0.0
    down: float = 0.0
    pause_reasons: tuple[str, ...] = ()
    until: datetime | None = None
    month: Sequence[str] = ()
    machine: str = ""

    @property
    def own(self) -> Heartbeat:
        """This machine's heartbeat, without its last speed while it is paused."""
        own = self.facts.heartbeats[0]
        return own.model_copy(update={"tokens_per_second": 0.0}) if self.pause_reasons else own

    @property
    def others(self) -> list[Heartbeat]:
        return [beat for beat in self.view.peers if beat.peer != self.own.peer]

    @property
    def links(self) -> dict[str, int]:
        """The numbers of other peers by kind of path to them, best kind first. Peers with an unknown path are not
        counted."""
        reach = self.facts.reach
        counts = Counter(reach[beat.peer] for beat in self.others if beat.peer in reach)
        return {str(way): counts[way] for way in Reach if counts[way]}

    def plain(self) -> dict[str, Any]:
        """Return the progress as JSON values, for log lines that programs read."""
        return {
            "phase": self.phase,
            "outer_steps": self.view.outer_steps,
            "inner_step": self.own.inner_step,
            "inner_steps": self.view.run.config.training.inner_steps,
            "seconds_left": None if self.work.left is None else round(self.work.left, 1),
            "peers": 1 + len(self.others),
            "reachable": reachability(self.own),
            "links": self.links,
            "loss": self.own.loss,
            "tokens_per_second": round(self.own.tokens_per_second, 1),
            "contribution": None if self.contribution is None else asdict(self.contribution),
            "sent_bytes": self.facts.sent,
            "received_bytes": self.facts.received,
            "bytes_by_purpose": {purpose: list(moved) for purpose, moved in self.facts.purposes.items()},
            "uncompiled": self.facts.uncompiled or None,
            "pause_reasons": list(self.pause_reasons),
            "month": list(self.month),
        }


class ProgressReader:
    """A reader of a volunteer's progress, called repeatedly. `pause_reasons` returns the reasons why the volunteer is
    paused; the volunteer leaves at the time `until`."""

    def __init__(
        self,
        run: Run,
        facts: Callable[[], OwnFacts],
        pause_reasons: Callable[[], tuple[str, ...]],
        until: datetime | None = None,
        month: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._until, self._month = until, month
        self.machine = ""  # this machine's temperature and power, in words
        self._run = run
        self._facts = facts
        self._pause_reasons = pause_reasons
        self._chronicle = Chronicle()
        self._losses = deque[float](maxlen=LOSSES)
        self._last_step = (0, 0)  # outer and inner step of the newest loss in the curve
        self._phase, self._since = "", time.monotonic()
        self._up, self._down = _GrowthMeter(), _GrowthMeter()

    def read(self) -> ProgressReport:
        """Return a report of the volunteer's progress at this moment."""
        now, facts, config = time.monotonic(), self._facts(), self._run.config
        own, download, training, share = facts.heartbeats[0], facts.download, config.training, None
        phase = FINISHED if is_finished(own, config) else OF_STATES[facts.state]
        if phase in ROUTINE and facts.trains_on:
            phase = TRAINING
        if phase != self._phase:
            self._phase, self._since = phase, now
        seconds = now - self._since
        if own.loss is not None and (own.index, own.inner_step) > self._last_step:
            self._last_step = own.index, own.inner_step
            self._losses.append(own.loss)
        waits = 0.0 if facts.fragments is None else facts.fragments.wait_share
        if phase == TRAINING and (speed := own.tokens_per_second * (1 - waits)) > 0:
            # By the speed, which leaves out waits for averages: a phase may span many outer steps, or include a pause.
            share = own.inner_step / training.inner_steps
            seconds = own.inner_step * training.batch_size * training.sequence_length / speed
        elif phase == DOWNLOADING and download is not None:
            share = min(sum(download.fetched.values()) / download.size, 1.0)
        return ProgressReport(
            view=RunView(self._run, facts.heartbeats),
            facts=facts,
            phase=phase,
            work=_Work(share, seconds),
            losses=tuple(self._losses),
            contribution=self._standing(own.peer, facts.log),
            up=self._up.rate(facts.sent, now),
            down=self._down.rate(facts.received, now),
            pause_reasons=self._pause_reasons(),
            until=self._until,
            month=self._month(),
            machine=self.machine,
        )

    def _standing(self, peer: str, log: RunLog) -> Standing | None:
        """Return the share of a peer in the run's tokens, and its rank; None until the whole log has been read, or if
        the log cannot be read."""
        try:
            is_behind = self._chronicle.read(log)
        except DilocoPeerError as error:
            logger.debug("contributions cannot be read from the log: %s", error)
            return None
        return None if is_behind else self._chronicle.standing(peer)


class _GrowthMeter:
    """Measures the speed, in units a second, at which a count grows."""

    def __init__(self) -> None:
        self._seen = deque[tuple[float, int]]()

    def rate(self, count: int, now: float) -> float:
        """Record a count at the time `now` (seconds). Return the count's growth a second over the last
        `RATE_SECONDS`."""
        self._seen.append((now, count))
        while len(self._seen) > 2 and self._seen[1][0] <= now - RATE_SECONDS:
            self._seen.popleft()
        then, before = self._seen[0]
        return (count - before) / (now - then) if now > then else 0.0


def _phase_of_stage(stage: str) -> str:
    """Return the name of the phase that contains a stage of the program's start."""
    if stage in (FINDING, CHECKING):
        return stage
    if stage in WITH_A_COMPILER:
        return COMPILING
    return PREPARING if stage.startswith(ABOUT_DATA) else STARTING


# In words --------------------------------------------------------------------------------------------------------
def _stage_line(stage: str, work: _Work) -> str:
    """Return a line of text for a stage of the program's start: its phase, its name and its progress."""
    phase = _phase_of_stage(stage)
    return f"{phase if stage == phase else f'{phase}: {stage}'} {_how_far(work)}".rstrip()


def _how_far(work: _Work) -> str:
    """Return, in words, the share of a phase that is done, and the time left if known. If the share is unknown, return
    the time since the phase began, or an empty text in the first second."""
    if work.share is None:
        return f"({duration(work.seconds)})" if work.seconds >= 1 else ""
    left = f", about {duration(work.left)} left" if work.left is not None and work.share < 1 else ""
    return f"{work.share:.0%}{left}"


def _healthy_line(progress: ProgressReport) -> str:
    """Return a volunteer's progress as the text of one log line."""
    own, facts, fragments = progress.own, progress.facts, progress.facts.fragments
    parts = [f"outer step {own.index}/{progress.view.outer_steps}", _activity(progress)]
    if own.loss is not None:
        parts.append(f"loss {own.loss:.3f}")
    if own.tokens_per_second:
        parts.append(f"{own.tokens_per_second:,.0f} tokens/s")
    if fragments is not None:
        parts.append(_averages(fragments))
    if facts.uncompiled:
        parts.append("not compiled")
    parts += [counted(1 + len(progress.others), "peer"), _reach(progress)]
    if progress.contribution is not None:
        parts.append(_contributed(progress.contribution))
    parts.append(f"{_rate(progress.up, facts.caps.upload)} up, {_rate(progress.down, facts.caps.download)} down")
    parts += progress.month
    if progress.machine:
        parts.append(progress.machine)
    if progress.phase == FINISHED:
        parts.append(_whether_to_stay(progress))
    return ", ".join(parts)


def _progress_lines(progress: ProgressReport) -> list[str]:
    """Return a volunteer's progress as a few lines for a terminal, with the loss curve."""
    own, facts, fragments = progress.own, progress.facts, progress.facts.fragments
    lines = [f"outer step {own.index}/{progress.view.outer_steps} · {_activity(progress)}"]
    if progress.losses:
        lines.append(f"loss {progress.losses[-1]:.3f} {_curve(progress.losses)}")
    lines += held_out_lines(progress.view, facts.bytes_per_token)
    if facts.uncompiled:
        lines += [f"{NOT_COMPILING}:", f"  {facts.uncompiled[:REASON_LENGTH]}"]
    speed = f"{own.tokens_per_second:,.0f} tokens/s · " if own.tokens_per_second else ""
    lines.append(f"{speed}{counted(1 + len(progress.others), 'peer')} · {_reach(progress)}")
    if fragments is not None:
        under_way = f"{fragments.averaging} of {counted(fragments.count, 'fragment')} averaging"
        lines += [f"{under_way}, {fragments.done} done", _averages(fragments)]
    if progress.phase == FINISHED:
        lines.append(_whether_to_stay(progress))
    if progress.contribution is not None:
        lines.append(f"contributed {_contributed(progress.contribution)}")
    up, down = _rate(progress.up, facts.caps.upload), _rate(progress.down, facts.caps.download)
    lines.append(f"up {up} ({in_words(facts.sent)}) · down {down} ({in_words(facts.received)})")
    sending = facts.sending
    if sending is not None and sending.uplink and (sending.format or sending.seconds >= SHOWN_SENDING):
        lines.append(_sending(sending, progress.view.run.config.codec))
    lines += progress.month
    if progress.machine:
        lines.append(f"this machine: {progress.machine}")
    return lines


def _explanations(progress: ProgressReport) -> list[str]:
    """Return lines for the owner: traffic by purpose, the time of leaving, and the commands that control the
    volunteer."""
    moved = [f"{name} ↑{in_words(out)} ↓{in_words(back)}" for name, (out, back) in progress.facts.purposes.items()]
    lines = [" · ".join(moved)] if moved else []
    if progress.until is not None:
        lines.append(f"leaves at {progress.until:%H:%M}")
    if progress.pause_reasons:
        lines.append(how_to_go_on(progress.pause_reasons))
    return [*lines, STEERING]


def _sending(sending: Sending, codec: CodecSection) -> str:
    """Return, in words, the uplink's speed, and the last contribution's format, sending time and time limit."""
    kind, time = codec.contributions[sending.format], f"{duration(sending.seconds)} of {duration(sending.allowed)}"
    return f"uplink {8e-6 * sending.uplink:,.0f} Mbit/s: sending {kind}, {time}"


def _activity(progress: ProgressReport) -> str:
    """Return the volunteer's activity in words, with its progress and the time to the next round."""
    if progress.pause_reasons:
        return f"paused: {', '.join(progress.pause_reasons)}"
    if progress.phase == TRAINING:
        left, inner_steps = progress.work.left, progress.view.run.config.training.inner_steps
        soon = "" if left is None else f", next round in {duration(left)}"
        return f"training, inner step {progress.own.inner_step}/{inner_steps}{soon}"
    donors, facts = "", progress.facts
    if progress.phase == DOWNLOADING and facts.download is not None and facts.download.fetched:
        count = counted(len(facts.download.fetched), "donor")
        donors = f" from {count} at {_rate(progress.down, facts.caps.download)}"
    return f"{progress.phase}{donors} {_how_far(progress.work)}".rstrip()


def _whether_to_stay(progress: ProgressReport) -> str:
    """Return advice for the owner after the run's last outer step: to leave, if other machines have the model, or else
    to stay."""
    present = holders(progress.others, progress.own.index)
    if present:
        return f"you may leave: the model is with {present}"
    return "please stay: no other machine has the model yet"


def _averages(fragments: Fragments) -> str:
    """Return, in words, the seconds of the slowest average, the steps after which averages are merged, and the share of
    the training time spent waiting for averages."""
    merged = f"merged after {counted(fragments.overlap, 'step')}"
    if fragments.longest is None:
        return f"averages {merged}"
    late = f", {fragments.late} late ({fragments.wait_share:.0%})" if fragments.late else ""
    return f"averages in {fragments.longest:.1f} s, {merged}{late}"


def _reach(progress: ProgressReport) -> str:
    """Return in words how other peers reach this machine, and the numbers of its links by kind of path."""
    links = ", ".join(f"{count} {way}" for way, count in progress.links.items())
    return f"reachable: {reachability(progress.own)}" + (f" (links: {links})" if links else "")


def _contributed(own: Standing) -> str:
    tokens = in_words(own.tokens).removesuffix("B").rstrip() if own.tokens >= 1000 else own.tokens
    return f"{tokens} tokens in {counted(own.rounds, 'round')}: {own.share:.0%}, rank {own.rank} of {own.peers}"


def _rate(rate: float, cap: float | None) -> str:
    """Return a rate and its cap, both given in bytes a second, as a text in megabits a second."""
    return f"{rate / MEGABIT:.1f}{'' if cap is None else f' of {cap / MEGABIT:g}'} Mbit/s"


def _curve(values: Sequence[float], width: int = CURVE_WIDTH) -> str:
    """Return values as a line of bars. If there are more values than `width` characters, each bar is the mean of
    several values."""
    count = min(width, len(values))
    means = [fmean(values[len(values) * at // count : len(values) * (at + 1) // count]) for at in range(count)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[0] * count
    return "".join(BARS[min(int((mean - low) / (high - low) * len(BARS)), len(BARS) - 1)] for mean in means)


# Screens of join ------------------------------------------------------------------------------------------------------
SCREEN_SECONDS = 0.5  # seconds between two updates of the screen
PROGRESS_SECONDS = 60.0  # seconds between two log lines with the volunteer's progress
MACHINE_SECONDS = 10.0  # seconds between two reads of temperature and power, which change slowly
THIS_MACHINE = "this machine"
STEERING = "Ctrl-C leaves; in another terminal: diloco-peer pause, resume, finish"
LEGEND = "equal digests: equal models · reach open: others can dial this peer"
LEAST_ROWS, LINES_BESIDE, ROOMY = 3, 5, 24
"""Least number of peers on the screen, its number of lines beside those for progress and peers, and the least height
of a terminal, in lines, for which explanations are shown."""


class JoinView(ABC):
    """The display of `diloco-peer join`. `phase` is the volunteer's current activity in words."""

    def __init__(self) -> None:
        self.phase = "starting"
        self._stage, self._since = "", time.monotonic()
        self._share: float | None = None
        self._is_training = False

    @abstractmethod
    def say(self, text: str) -> None:
        """Show a message to the owner."""

    @abstractmethod
    def show_stage(self, is_new_phase: bool) -> None:
        """Show the present stage of the program's start. `is_new_phase` is True if `self.phase`, which may cover
        several stages, has just changed."""

    @abstractmethod
    async def show(self, reader: ProgressReader) -> None:
        """Show the training's progress repeatedly, until cancelled."""

    def close(self) -> None:
        """End the display, and restore the terminal."""
        self.phase = "ended"

    def stage(self, stage: str, share: float | None) -> None:
        """Record a stage of the program's start and the finished share of this stage, and show both. During training,
        do nothing: stages are then those of restarting workers, which have log lines of their own."""
        if self._is_training:
            return
        if stage != self._stage:
            self._stage, self._since = stage, time.monotonic()
        self._share, before, self.phase = share, self.phase, _phase_of_stage(stage)
        self.show_stage(is_new_phase=self.phase != before)

    @asynccontextmanager
    async def showing(self, reader: ProgressReader) -> AsyncIterator[None]:
        """Show the training's progress inside the `with` block."""
        self._is_training = True
        tasks = [start_task(self.show(reader)), start_task(_read_machine(reader))]
        try:
            yield
        finally:
            await cancel_and_wait(*tasks)
            self.phase, self._is_training = "starting", False


class Lines(JoinView):
    """The display as log lines: one line a minute with the progress, and one for each new phase that does not recur in
    every outer step. Messages are printed, or logged if `is_json`."""

    def __init__(self, is_json: bool = False) -> None:
        super().__init__()
        self._is_json = is_json

    def say(self, text: str) -> None:
        if self._is_json:
            logger.info("%s", text)
            return
        with suppress(OSError):  # the program that reads the output may have closed the pipe
            print(text, flush=True)

    def show_stage(self, is_new_phase: bool) -> None:
        if is_new_phase:
            logger.info("phase: %s", self.phase)

    async def show(self, reader: ProgressReader) -> None:
        due, has_trained = time.monotonic() + PROGRESS_SECONDS, False
        while True:
            progress = reader.read()
            if progress.phase != self.phase:
                self.phase = progress.phase
                is_routine = has_trained and progress.phase in ROUTINE
                logger.log(logging.DEBUG if is_routine else logging.INFO, "phase: %s", progress.phase)
                has_trained |= progress.phase in ROUTINE
            if time.monotonic() >= due:
                due += PROGRESS_SECONDS
                logger.info("%s", _healthy_line(progress), extra={"details": {"progress": progress.plain()}})
            await asyncio.sleep(SCREEN_SECONDS)


class Screen(JoinView):
    """The display as a live picture at the bottom of a terminal, above which log lines scroll."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._starting: Live | None = None

    def say(self, text: str) -> None:
        with suppress(OSError):  # the terminal may have been closed
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show_stage(self, is_new_phase: bool) -> None:
        from rich.live import Live
        from rich.text import Text

        def picture() -> Text:
            return Text(_stage_line(self._stage, _Work(self._share, time.monotonic() - self._since)))

        if self._starting is None:
            self._starting = Live(console=self._console, get_renderable=picture, refresh_per_second=2, transient=True)
            with suppress(OSError):
                self._starting.start()
        with suppress(OSError):
            self._starting.refresh()  # so that even a short stage is visible

    def close(self) -> None:
        self._stop_starting()
        super().close()

    def _stop_starting(self) -> None:
        live, self._starting = self._starting, None
        if live is not None:
            with suppress(OSError):
                live.stop()

    async def show(self, reader: ProgressReader) -> None:
        from rich.live import Live

        self._stop_starting()
        with Live(console=self._console, auto_refresh=False) as live:
            while True:
                progress = reader.read()
                self.phase = progress.phase
                live.update(_volunteer_picture(progress, self._console.height), refresh=True)
                await asyncio.sleep(SCREEN_SECONDS)


async def _read_machine(reader: ProgressReader) -> None:
    """Read the machine's temperature and power into `reader.machine` every `MACHINE_SECONDS`, until cancelled."""
    from opendiloco.owner.facts import machine_line

    while True:
        reader.machine = await asyncio.to_thread(machine_line)
        await asyncio.sleep(MACHINE_SECONDS)


def _volunteer_picture(progress: ProgressReport, height: int) -> Group:
    """Return the screen of `diloco-peer join` for a terminal of `height` lines: this machine's progress, and as many
    peers as fit."""
    from rich.console import Group
    from rich.text import Text

    own, run = progress.own, progress.view.run
    lines = [*_progress_lines(progress), *reach_lines([own])]
    legend: list[Text] = []
    if height >= ROOMY:
        lines += _explanations(progress)
        legend.append(Text(LEGEND, style="dim"))
    room = max(LEAST_ROWS, height - len(lines) - LINES_BESIDE)
    first = row_of(own, run.config, THIS_MACHINE, bool(progress.pause_reasons))
    rows = [first, *(row_of(beat, run.config) for beat in progress.others)]
    more = [f"… and {len(rows) - room} more"] if len(rows) > room else []
    return Group(peers_table(rows[:room], run.run_id), *legend, *map(Text, [*more, *lines]))
