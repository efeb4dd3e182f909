"""What this peer trains for the next entry: its lease, how far it is, how fast, and what becomes of the work."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from statistics import median_high
from typing import ClassVar

from peers.log.header import NO_PAYLOAD, Header
from peers.log.state import LogState
from peers.protocol.context import Context
from peers.protocol.effects import StopTraining, TokensLost, Train
from peers.protocol.events import Captured, TrainingDone, TrainingProgress
from peers.protocol.internal import Leased, WorkEnds
from peers.protocol.pace import Pace
from peers.protocol.part import Part, Row, Table
from peers.values.leases import Lease, sample_count
from peers.values.workload import Progress, Trained

NOTHING = Trained((), 0, 0.0)
"""What a peer has trained for a fragment whose turn it missed."""
STUCK = 3.0
"""Times the longest pause between two signs of progress, after which a worker seems to hang."""


class TrainerState(StrEnum):
    IDLE = "idle"
    TRAINING = "training"
    TRAINED = "trained"


IDLE, TRAINING, TRAINED = TrainerState


class Trainer(Part):
    """One lease after another. What a worker reports of work that is void by now changes nothing but the speed."""

    TABLE: ClassVar[Table] = {
        IDLE: {
            Leased: Row("_begin", {TRAINING: "has a lease"}),
            TrainingProgress: Row("_measure"),
            WorkEnds: Row("_end"),
        },
        TRAINING: {
            TrainingProgress: Row("_progressed"),
            TrainingDone: Row("_done", {TRAINED: "inner steps are done"}),
            WorkEnds: Row("_end", {IDLE: "an entry was made, or the work could not count"}),
        },
        TRAINED: {
            TrainingProgress: Row("_late_progress"),
            WorkEnds: Row("_end", {IDLE: "the work is in an entry, or void"}),
        },
    }
    EXACT = frozenset({Leased, WorkEnds})
    state: TrainerState

    def __init__(self, context: Context) -> None:
        super().__init__(IDLE)
        self.lease: Lease | None = None
        self.trained: Trained | None = None
        self.progress: Progress | None = None
        self.captured: dict[int, Trained] = {}
        """What was captured of fragments in this training; nothing of those of which an entry has it."""
        self._index = 0  # the outer step that it is for
        self._unchanged = set[int]()  # fragments of which an entry was made before it began, or without a payload
        self._changed = set[int]()  # those of which one has been made since, with a payload
        self.speed = 0.0  # tokens a second, when we last trained
        self.in_vain = 0  # leases in a row of which nothing came into an entry
        self._context = context
        self._pace = Pace.of(context.settings)
        self._began_at = self._moved_at = context.now
        self._silent = 0.0  # seconds of trainings that were ended since the worker last went on with one
        self._longest_pause: float | None = None  # between two signs of progress, in trainings that came to an end
        self._pause = 0.0  # the longest one in the present training
        self._seconds: float | None = None

    # What happens ---------------------------------------------------------------------------------------------
    def _begin(self, leased: Leased) -> None:
        self.lease, self._began_at = leased.lease, self._context.now
        self._moved_at, self._pause = self._context.now, 0.0
        self._index = leased.log.position.index
        self._unchanged, self._changed = {entry.fragment for entry in leased.log.made}, set()
        self._enter(TRAINING)
        self._context.emit(Train(leased.log.position.index, leased.lease, leased.steps, leased.log.lineage_tokens))

    def _progressed(self, event: TrainingProgress) -> None:
        """The first sign shows that a worker has begun. It may do so with each lease, and hang. Before, it may still
        take the last inner steps of the lease before."""
        is_of_lease = event.progress.inner_step > 0
        if self.progress is not None or not is_of_lease:
            self._moves()
        if is_of_lease:
            self.progress = event.progress
        self._measure(event)

    def _moves(self) -> None:
        self._pause = max(self._pause, self._silence)
        self._moved_at, self._silent = self._context.now, 0.0

    def _late_progress(self, event: TrainingProgress) -> None:
        if event.progress.inner_step > 0:
            self.progress = None
        self._measure(event)

    def _measure(self, event: TrainingProgress) -> None:
        self.speed = event.progress.tokens_per_second

    def _done(self, event: TrainingDone) -> None:
        self.trained = event.trained
        self._moves()
        self._longest_pause = max(self._pause, self._longest_pause or 0.0)
        self._seconds = self._context.now - self._began_at
        self._enter(TRAINED)

    def _end(self, ends: WorkEnds) -> None:
        """What we have trained is in an entry, or void."""
        self.stop()
        self._silent = self._silence
        if ends.entry is not None and ends.entry.tokens_of(self._context.me):
            self.in_vain = 0
        else:
            self.in_vain += self.work > 0
            if self.work:
                reason = f"no entry after {ends.position} takes what we have trained"
                self._context.emit(TokensLost("work", self.work, reason))
        self.lease = self.trained = self.progress = None
        self.captured = {}
        if self.state is not IDLE:
            self._enter(IDLE)

    def capture(self, event: Captured) -> None:
        """Keep what was captured of a fragment, until an entry has it."""
        if self.state is TRAINING:
            self.captured[event.fragment] = NOTHING if self._goes_on_with(event.fragment) else event.trained

    def keeps(self, fragment: int) -> bool:
        """Whether what was captured of a fragment is in a slot, or waits for one, or is in an entry."""
        return fragment in self.captured and not self._goes_on_with(fragment)

    def _goes_on_with(self, fragment: int) -> bool:
        """Whether workers go on with what they have of a fragment, so that it is captured once more: nobody had trained
        it; or they began when the cycle had its entry, and the next cycle's may come too late for the lease."""
        return fragment in self._unchanged - self._changed

    def entered(self, entry: Header) -> None:
        """A fragment's entry is made. What was captured of it is in that, or waits for the next one. Where a part of it
        is in that, the rest is lost: nothing counts twice."""
        fragment = entry.fragment
        (self._unchanged if entry.payload == NO_PAYLOAD else self._changed).add(fragment)
        has_ours = any(member.peer == self._context.me and member.tokens for member in entry.roster)
        if fragment in self.captured and (has_ours or self._goes_on_with(fragment)):
            self.captured[fragment] = NOTHING

    def stop(self) -> None:
        if self.state is TRAINING:
            self._context.emit(StopTraining())

    def is_late(self, log: LogState) -> bool:
        """Whether the cycle that this training began in is over. From then on its worker waits for no average: those of
        its cycle are there. Nor for those that follow, though they may take what it has learned."""
        return log.position.index > self._index

    # What others want to know ---------------------------------------------------------------------------------
    @property
    def has_lasted(self) -> float:
        """Seconds since the last lease was taken up."""
        return self._context.now - self._began_at

    @property
    def work(self) -> int:
        """The tokens that we have trained and that are in no entry yet."""
        if self.trained is not None:
            return self.trained.tokens
        if self.progress is None or self.lease is None:
            return 0
        settings = self._context.settings
        samples = self.progress.inner_step * settings.samples_per_lease // settings.inner_steps
        return min(samples, sample_count(self.lease)) * settings.tokens_per_sample

    @property
    def is_training(self) -> bool:
        """Whether the worker is at work; also while an entry that was missed is applied beside it."""
        return self.state is TRAINING

    @property
    def _silence(self) -> float:
        """For how long the worker has trained and not gone on, whichever leases it had."""
        return self._silent + (self._context.now - self._moved_at if self.state is TRAINING else 0.0)

    def waits(self) -> None:
        """The worker may be waiting for an average: that is no silence of its own, which begins when it is there."""
        if self.state is TRAINING:
            self._moved_at, self._silent = self._context.now, 0.0

    @property
    def is_stuck(self) -> bool:
        """Whether the worker has shown nothing for much longer than it ever took: it hangs, or is started again."""
        if self.state is not TRAINING or self._longest_pause is None:
            return False
        patience = max(self._context.settings.timing.partition_grace, STUCK * self._longest_pause)
        return self._silence > patience

    def outlives(self, entry: Header) -> bool:
        """Whether what we are training, or have trained, can go into a cycle after the one that this entry closes
        without it.

        The worker must have loaded theta, which is about to change.
        """
        is_loaded = self.progress is not None or self.trained is not None
        lease = next((one.samples for one in entry.leases if one.peer == self._context.me), None)
        return self.lease is not None and is_loaded and self.lease == lease

    def _fastest(self, speeds: Collection[float]) -> float:
        """The highest of others' speeds, as heartbeats tell, but no more than a usual peer keeps up with by the
        smallest lease: so less than half of all, who may say anything, have nobody train next to nothing."""
        usual = median_high([self.speed, *speeds])
        return min(max(speeds, default=0.0), usual / self._pace.smallest_share)

    def steps_of(self, speed: float, speeds: Collection[float]) -> int:
        """Return the inner steps that a peer of this speed makes beside others with these speeds."""
        return self._steps_at(speed, self._fastest(speeds))

    def _steps_at(self, speed: float, fastest: float) -> int:
        """Return the inner steps that a peer makes while the fastest peer makes all. A newcomer finds out: all."""
        return self._pace.steps(speed, fastest) if speed else self._pace.inner_steps

    def steps_of_grant(self, steps: int, speeds: Collection[float]) -> int:
        """Inner steps that we make of a grant of so many, beside others with these speeds. Nobody keeps it for us: in
        an asynchronous run, which does not wait, we make as many as we have time for until the fastest peer has made
        them."""
        fastest = self._fastest(speeds)
        if self._pace.contributions is None or not self.speed or self.speed >= fastest:
            return min(steps, self._steps_at(self.speed, fastest))
        return max(1, int(steps * self.speed / fastest))

    def wants(self, speeds: Collection[float]) -> int:
        """The samples of the next lease that we finish together with others of these speeds; 0: a whole one."""
        settings, steps = self._context.settings, self.steps_of(self.speed, speeds)
        return 0 if steps == settings.inner_steps else steps * settings.samples_per_lease // settings.inner_steps

    def is_too_slow(self, usual: float) -> bool:
        """Whether the smallest lease takes us longer than a lease stays ours while most others go on."""
        least = self._pace.least_steps / self._pace.inner_steps
        return 0 < self.speed * (1 + self._context.settings.staleness) < least * usual

    def grace(self) -> float:
        """How long to wait for who still trains, after what training took us."""
        return self._context.settings.timing.grace if self._seconds is None else self._pace.grace(self._seconds)

    def slack(self, round: float, usual: float) -> float:
        """How long to wait for those who come soon in an asynchronous run, where a round takes so many seconds, and
        most others train so many tokens a second: whoever leads may itself train for several cycles."""
        if self._seconds is None:
            return self.grace()
        training = min(self._seconds, self._pace.lease_tokens / usual) if usual else self._seconds
        return self._pace.slack(training, round)

    def inner_step(self) -> int:
        """How far we are with the lease."""
        return self.progress.inner_step if self.progress else 0
