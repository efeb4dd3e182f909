"""A volunteer's progress in words: one line for a log, or a few for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from opendiloco.quantities import duration, in_words
from opendiloco.view.contributions import Contribution
from opendiloco.view.progress import DOWNLOADING, TRAINING, Fragments, Progress, Traffic, Work, phase_of_stage

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 40
MEGABIT = 1e6 / 8


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


def healthy_line(progress: Progress) -> str:
    """Return all that matters on one line of a log."""
    said = [f"outer step {progress.outer_step}/{progress.outer_steps}", activity(progress)]
    if progress.loss is not None:
        said.append(f"loss {progress.loss:.3f}")
    if progress.tokens_per_second:
        said.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    if progress.fragments is not None:
        said.append(averages(progress.fragments))
    said += [f"{progress.peers} peers", reach(progress)]
    if progress.contribution is not None:
        said.append(contributed(progress.contribution))
    said.append(f"{rate(progress.up)} up, {rate(progress.down)} down")
    if progress.machine:
        said.append(progress.machine)
    return ", ".join(said)


def progress_lines(progress: Progress) -> list[str]:
    """Return the same on a few lines of a terminal, with the curve of the loss."""
    lines = [f"outer step {progress.outer_step}/{progress.outer_steps} · {activity(progress)}"]
    if progress.losses:
        lines.append(f"loss {progress.losses[-1]:.3f} {curve(progress.losses)}")
    if progress.held_out:
        lines.append(progress.held_out)
    speed = f"{progress.tokens_per_second:,.0f} tokens/s · " if progress.tokens_per_second else ""
    lines.append(f"{speed}{progress.peers} peers · {reach(progress)}")
    if progress.fragments is not None:
        lines += [under_way(progress.fragments), averages(progress.fragments)]
    if progress.contribution is not None:
        lines.append(f"contributed {contributed(progress.contribution)}")
    lines.append(f"up {traffic(progress.up)} · down {traffic(progress.down)}")
    if progress.machine:
        lines.append(f"this machine: {progress.machine}")
    return lines


def activity(progress: Progress) -> str:
    """Return what the volunteer is doing, how far it has come, and when the next round is."""
    if progress.pause_reasons:
        return f"paused: {', '.join(progress.pause_reasons)}"
    if progress.phase == TRAINING:
        left = progress.work.left
        soon = "" if left is None else f", next round in {duration(left)}"
        return f"training, inner step {progress.inner_step}/{progress.inner_steps}{soon}"
    donors = ""
    if progress.phase == DOWNLOADING and progress.donors:
        donors = f" from {counted(progress.donors, 'donor')} at {rate(progress.down)}"
    return f"{progress.phase}{donors} {how_far(progress.work)}".rstrip()


def under_way(fragments: Fragments) -> str:
    """Return what becomes of this cycle's fragments."""
    return f"{fragments.averaging} of {counted(fragments.count, 'fragment')} averaging, {fragments.done} done"


def averages(fragments: Fragments) -> str:
    """Return when averages come, and whether training waits for them."""
    merged = f"merged after {counted(fragments.overlap, 'step')}"
    if fragments.longest is None:
        return f"averages {merged}"
    late = f", {fragments.late} late ({fragments.wait_share:.0%})" if fragments.late else ""
    return f"averages in {fragments.longest:.1f} s, {merged}{late}"


def reach(progress: Progress) -> str:
    """Return whether others can dial this machine, and the ways to the others."""
    links = ", ".join(f"{count} {way}" for way, count in progress.links.items())
    return f"reachable: {progress.reachable}" + (f" (links: {links})" if links else "")


def contributed(own: Contribution) -> str:
    """Return what a peer has contributed."""
    rounds = counted(own.rounds, "round")
    return f"{tokens(own.tokens)} in {rounds}: {own.share:.0%}, rank {own.rank} of {own.peers}"


def counted(count: int, thing: str) -> str:
    """Return a count of things: "1 round", "2 rounds"."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def tokens(count: int) -> str:
    """Return a number of tokens, to three digits."""
    return f"{in_words(count).removesuffix('B').rstrip()} tokens" if count >= 1000 else f"{count} tokens"


def rate(traffic: Traffic) -> str:
    """Return a rate in megabits a second, beside its cap."""
    cap = "" if traffic.cap is None else f" of {traffic.cap / MEGABIT:g}"
    return f"{traffic.rate / MEGABIT:.1f}{cap} Mbit/s"


def traffic(traffic: Traffic) -> str:
    """Return a rate, and all bytes until now."""
    return f"{rate(traffic)} ({in_words(traffic.total)})"


def curve(values: Sequence[float], width: int = CURVE_WIDTH) -> str:
    """Return a curve of values as bars. Where they do not fit, each bar is the mean of several."""
    count = min(width, len(values))
    means = [_mean(values[len(values) * at // count : len(values) * (at + 1) // count]) for at in range(count)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[0] * count
    return "".join(BARS[min(int((mean - low) / (high - low) * len(BARS)), len(BARS) - 1)] for mean in means)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
