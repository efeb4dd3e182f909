"""What there is to see of a volunteer at one moment, in words and numbers; and the lines that show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opendiloco.contributions import Contribution
from opendiloco.quantities import in_words
from opendiloco.stages import WITH_A_COMPILER
from peers.protocol.states import State

FINDING, CHECKING, DOWNLOADING = "finding the run", "checking this machine", "downloading the state"
PREPARING, COMPILING, TRAINING = "preparing data", "compiling", "training"
SYNCHRONISING, FINISHED, LEAVING = "synchronising", "finished: handing out the model", "leaving the run"
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
"""What a peer that has begun is doing, as people call it."""
ROUTINE = frozenset({TRAINING, SYNCHRONISING, OF_STATES[State.READY]})
"""Phases of every outer step."""
ABOUT_DATA = ("tokenizing ", "downloading ", "checking ", "waiting for tokens")
BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 40
MEGABIT = 1e6 / 8


@dataclass(frozen=True)
class Work:
    """How far something has come: `share` of it is done, in so many seconds. None: not known."""

    share: float | None = None
    seconds: float = 0.0

    @property
    def left(self) -> float | None:
        """Return the seconds that it will take yet, if it goes on like that."""
        return self.seconds * (1 - self.share) / self.share if self.share else None


@dataclass(frozen=True)
class Rate:
    """Bytes a second now, and what they may be at most."""

    now: float
    cap: float | None


@dataclass(frozen=True)
class Outlook:
    """One moment of a volunteer. `paused` says why it is; empty: it is not."""

    phase: str
    outer_step: int
    outer_steps: int
    inner_step: int
    inner_steps: int
    work: Work
    peers: int
    reach: str
    loss: float | None = None
    losses: Sequence[float] = ()
    tokens_per_second: float = 0.0
    held_out: str | None = None
    contribution: Contribution | None = None
    up: Rate = Rate(0, None)
    down: Rate = Rate(0, None)
    donors: int = 0
    paused: tuple[str, ...] = ()
    machine: str = ""


def phase_of_stage(stage: str) -> str:
    """Return which phase a stage of the start belongs to."""
    if stage in (FINDING, CHECKING):
        return stage
    if stage in WITH_A_COMPILER:
        return COMPILING
    return PREPARING if stage.startswith(ABOUT_DATA) else CHECKING


def stage_line(stage: str, work: Work) -> str:
    """Return a stage of the start on one line, with its phase."""
    phase = phase_of_stage(stage)
    said = phase if stage == phase else f"{phase}: {stage}"
    return f"{said} {how_far(work)}".rstrip()


def how_far(work: Work) -> str:
    """Return how far something has come, in words; nothing where there is nothing to say."""
    if work.share is None:
        return f"({duration(work.seconds)})" if work.seconds >= 1 else ""
    left = f", about {duration(work.left)} left" if work.left is not None and work.share < 1 else ""
    return f"{work.share:.0%}{left}"


def healthy_line(outlook: Outlook) -> str:
    """Return all that matters on one line of a log."""
    said = [f"outer step {outlook.outer_step}/{outlook.outer_steps}", doing(outlook)]
    if outlook.loss is not None:
        said.append(f"loss {outlook.loss:.3f}")
    if outlook.tokens_per_second:
        said.append(f"{outlook.tokens_per_second:,.0f} tokens/s")
    said += [f"{outlook.peers} peers", f"reach {outlook.reach}"]
    if outlook.contribution is not None:
        said.append(contributed(outlook.contribution))
    said.append(f"{rate(outlook.up)} up, {rate(outlook.down)} down")
    return ", ".join(said)


def outlook_lines(outlook: Outlook) -> list[str]:
    """Return the same on a few lines of a terminal, with the curve of the loss."""
    lines = [f"outer step {outlook.outer_step}/{outlook.outer_steps} · {doing(outlook)}"]
    if outlook.losses:
        lines.append(f"loss {outlook.losses[-1]:.3f} {curve(outlook.losses)}")
    speed = f"{outlook.tokens_per_second:,.0f} tokens/s · " if outlook.tokens_per_second else ""
    lines.append(f"{speed}{outlook.peers} peers · reach {outlook.reach}")
    lines.append(f"up {rate(outlook.up)} · down {rate(outlook.down)}{outlook.machine and ' · ' + outlook.machine}")
    if outlook.contribution is not None:
        lines.append(f"contributed {contributed(outlook.contribution)}")
    return lines


def doing(outlook: Outlook) -> str:
    """Return what the volunteer is doing, how far it has come, and when the next round is."""
    if outlook.paused:
        return f"paused: {', '.join(outlook.paused)}"
    if outlook.phase == TRAINING:
        left = outlook.work.left
        soon = "" if left is None else f", next round in {duration(left)}"
        return f"training, inner step {outlook.inner_step}/{outlook.inner_steps}{soon}"
    donors = f" from {outlook.donors} donors at {rate(outlook.down)}" if outlook.phase == DOWNLOADING else ""
    return f"{outlook.phase}{donors} {how_far(outlook.work)}".rstrip()


def contributed(own: Contribution) -> str:
    """Return what one has contributed."""
    return f"{tokens(own.tokens)} in {own.rounds} rounds: {own.share:.0%}, rank {own.rank} of {own.peers}"


def tokens(count: int) -> str:
    """Return a number of tokens, to three digits."""
    return f"{in_words(count).removesuffix('B').rstrip()} tokens" if count >= 1000 else f"{count} tokens"


def rate(rate: Rate) -> str:
    """Return a rate in megabits a second, beside its cap."""
    cap = "" if rate.cap is None else f" of {rate.cap / MEGABIT:g}"
    return f"{rate.now / MEGABIT:.1f}{cap} Mbit/s"


def duration(seconds: float) -> str:
    """Return a duration as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def curve(values: Sequence[float], width: int = CURVE_WIDTH) -> str:
    """Return a curve of values as bars; of more than fit, each bar has the mean of some."""
    count = min(width, len(values))
    means = [_mean(values[len(values) * at // count : len(values) * (at + 1) // count]) for at in range(count)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[0] * count
    return "".join(BARS[min(int((mean - low) / (high - low) * len(BARS)), len(BARS) - 1)] for mean in means)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
