"""This peer's training: one lease after another, and the entries in which the work counts (R14, R15)."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import ClassVar

from peers.log.header import NO_PAYLOAD, Header
from peers.log.state import LogState
from peers.protocol.context import Context
from peers.protocol.effects import StopTraining, TokensLost, Train
from peers.protocol.events import Captured, TrainingDone, TrainingProgress
from peers.protocol.internal import Leased, WorkEnds
from peers.protocol.state_machine import Row, StateMachine, Table
from peers.values.leases import Lease, sample_count
from peers.values.workload import Progress, Trained

NOTHING = Trained((), 0, 0.0)
"""The work of a peer that missed a fragment's turn: no tokens."""
STUCK = 3.0
"""A worker counts as hanging after this multiple of its longest silence between two progress reports."""


class TrainerState(StrEnum):
    IDLE = "idle"
    TRAINING = "training"
    TRAINED = "trained"


IDLE, TRAINING, TRAINED = TrainerState


class Trainer(StateMachine):
    """The lease that this peer trains, its progress and its finished work. Reports that arrive after the end of a
    training change only the measured speed."""

    TABLE: ClassVar[Table] = {
        IDLE: {
            Leased: Row("_begin", {TRAINING: "has a lease"}),
            TrainingProgress: Row("_measure"),
            WorkEnds: Row("_end"),
        },
        TRAINING: {
            TrainingProgress: Row("_progressed"),
            Captured: Row("_capture"),
            TrainingDone: Row("_done", {TRAINED: "inner steps are done"}),
            WorkEnds: Row("_end", {IDLE: "an entry was made, or the work could not count"}),
        },
        TRAINED: {
            TrainingProgress: Row("_late_progress"),
            WorkEnds: Row("_end", {IDLE: "the work is in an entry, or discarded"}),
        },
    }
    EXACT = frozenset({Leased, WorkEnds})
    state: TrainerState

    def __init__(self, context: Context) -> None:
        super().__init__(IDLE)
        self.lease: Lease | None = None
        self.trained: Trained | None = None
        self.progress: Progress | None = None
        self.captures = Captures()
        self.watch = WorkerWatch(context.settings.timing.partition_grace)
        self.speed = 0.0  # tokens a second, by the last progress report
        self.seconds: float | None = None  # duration of the last finished training, in seconds
        self.in_vain = 0  # number of consecutive leases, up to the last one, without any work in an entry
        self._context = context
        self._index = 0  # index of the cycle in which the present training began
        self._began_at = context.now

    def _begin(self, leased: Leased) -> None:
        log, now = leased.log, self._context.now
        self.lease, self._index, self._began_at = leased.lease, log.position.index, now
        self.captures = Captures(entry.fragment for entry in log.made)
        self.watch.begin(now)
        self._enter(TRAINING)
        lineage = log.lineage_tokens, log.amendments
        self._context.emit(Train(log.position.index, leased.lease, leased.steps, *lineage))

    def _progressed(self, event: TrainingProgress) -> None:
        """Record a progress report. It shows that the worker is alive, except at a lease's first inner step, since a
        worker may begin each lease and then hang. Inner step 0 means the last steps of the previous lease."""
        is_of_lease = event.progress.inner_step > 0
        if self.progress is not None or not is_of_lease:
            self.watch.progress(self._context.now)
        if is_of_lease:
            self.progress = event.progress
        self._measure(event)

    def _late_progress(self, event: TrainingProgress) -> None:
        if event.progress.inner_step > 0:
            self.progress = None
        self._measure(event)

    def _measure(self, event: TrainingProgress) -> None:
        self.speed = event.progress.tokens_per_second

    def _capture(self, event: Captured) -> None:
        self.captures.add(event.fragment, event.trained)

    def _done(self, event: TrainingDone) -> None:
        self.trained = event.trained
        self.watch.finish(self._context.now)
        self.seconds = self._context.now - self._began_at
        self._enter(TRAINED)

    def _end(self, ends: WorkEnds) -> None:
        self.stop()
        self.watch.end(self._context.now)
        if ends.entry is not None and ends.entry.tokens_of(self._context.me):
            self.in_vain = 0
        elif self.work:
            self.in_vain += 1
            reason = f"no entry after {ends.position} has this peer's training"
            self._context.emit(TokensLost("work", self.work, reason))
        self.lease = self.trained = self.progress = None
        self.captures = Captures()
        if self.state is not IDLE:
            self._enter(IDLE)

    def stop(self) -> None:
        if self.state is TRAINING:
            self._context.emit(StopTraining())

    # Values for other parts -------------------------------------------------------------------------------------
    @property
    def work(self) -> int:
        """The number of tokens that this peer has trained and that are in no entry yet."""
        if self.trained is not None:
            return self.trained.tokens
        if self.progress is None or self.lease is None:
            return 0
        settings = self._context.settings
        samples = self.progress.inner_step * settings.samples_per_lease // settings.inner_steps
        return min(samples, sample_count(self.lease)) * settings.tokens_per_sample

    @property
    def is_training(self) -> bool:
        """True if the workers are training, even while this peer applies an entry that it missed."""
        return self.state is TRAINING

    @property
    def is_stuck(self) -> bool:
        """True if the worker seems to hang: it trains, and has made no progress for much longer than in any finished
        training."""
        return self.watch.is_stuck(self._context.now)

    def inner_step(self) -> int:
        """Return the last inner step that the worker has reported for this lease; 0 if there is none."""
        return self.progress.inner_step if self.progress else 0

    def is_late(self, log: LogState) -> bool:
        """Return True if the cycle in which the training began is over. The worker then waits for no more averages."""
        return log.position.index > self._index

    def can_count_after(self, entry: Header) -> bool:
        """Return True if the work can count in a later cycle than the one that `entry` closes: the entry leaves this
        peer its lease, and the worker has already loaded the theta that precedes the entry."""
        is_loaded = self.progress is not None or self.trained is not None
        lease = next((one.samples for one in entry.leases if one.peer == self._context.me), None)
        return self.lease is not None and is_loaded and self.lease == lease


class Captures:
    """Results of single fragments, captured while one training goes on. Each is kept until it is in an entry (R15).

    If no average has changed a fragment since the training began, the worker goes on training it, and it is captured
    again. That is so if the cycle already had the fragment's entry (`made`), or skips it.
    """

    def __init__(self, made: Iterable[int] = ()) -> None:
        self._trained: dict[int, Trained] = {}
        self._made = set(made)
        self._changed = set[int]()

    def add(self, fragment: int, trained: Trained) -> None:
        """Store a fragment's capture. If the worker will train the fragment further and capture it again, store NOTHING
        (no tokens) instead."""
        self._trained[fragment] = NOTHING if self._goes_on(fragment) else trained

    def of(self, fragment: int) -> Trained | None:
        """Return the capture of a fragment; NOTHING if it may not count any more, None if there is none yet."""
        return self._trained.get(fragment)

    def keeps(self, fragment: int) -> bool:
        """Return True if a fragment's capture is final, because it is in a round or entry, or waits for a round.
        Otherwise the worker will train the fragment further and capture it again."""
        return fragment in self._trained and not self._goes_on(fragment)

    def entry_made(self, entry: Header, me: str) -> None:
        """Drop the capture of the entry's fragment if the entry counts tokens of this peer, even if only a part of
        them, because nothing may count twice. Also drop it if the worker will capture the fragment again."""
        fragment = entry.fragment
        (self._made if entry.payload == NO_PAYLOAD else self._changed).add(fragment)
        if fragment in self._trained and (entry.tokens_of(me) or self._goes_on(fragment)):
            self._trained[fragment] = NOTHING

    def _goes_on(self, fragment: int) -> bool:
        return fragment in self._made - self._changed


class WorkerWatch:
    """The detection of a hanging worker: its silence, the time since its last progress, is longer than `patience`
    seconds, and much longer than any silence in a finished training. Stopping a training does not end the silence."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._silence_before = 0.0  # part of the silence, in seconds, before the present training began
        self._since: float | None = None  # time of the last progress in the present training; None between trainings
        self._longest_now = 0.0  # longest silence in the present training, in seconds
        self._longest_ever: float | None = None  # longest silence in any finished training, in seconds
        self.is_resting = False  # True once the run has ended, so that no progress is expected

    def begin(self, now: float) -> None:
        self._since, self._longest_now, self.is_resting = now, 0.0, False

    def rest(self) -> None:
        """Expect no progress until the next training begins, because the run has ended."""
        self._since, self.is_resting = None, True

    def progress(self, now: float) -> None:
        """Record that the worker made progress at the time `now`, and how long it had made none."""
        self._longest_now = max(self._longest_now, self._silence(now))
        self.forgive(now)

    def forgive(self, now: float) -> None:
        """Count the silence anew from the time `now`, because the worker may have waited for an average."""
        if self._since is not None:
            self._silence_before, self._since = 0.0, now

    def finish(self, now: float) -> None:
        """Record that the training was finished at the time `now`, and the longest silence in it."""
        self.progress(now)
        self._since, self._longest_ever = None, max(self._longest_now, self._longest_ever or 0.0)

    def end(self, now: float) -> None:
        """Stop watching at the time `now`. The worker's silence before `now` counts in the next training, too."""
        self._silence_before, self._since = self._silence(now), None

    def is_stuck(self, now: float) -> bool:
        """Return True if there has been no progress for longer than `patience`, and longer than STUCK times the longest
        silence in finished trainings. Before the first finished training return False."""
        if self._since is None or self._longest_ever is None:
            return False
        return self._silence(now) > max(self._patience, STUCK * self._longest_ever)

    def _silence(self, now: float) -> float:
        return self._silence_before + (now - self._since if self._since is not None else 0.0)
