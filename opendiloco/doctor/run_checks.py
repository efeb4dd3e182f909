"""Checks of a run against this machine: whether it can take part, how fast, and at what price."""

from __future__ import annotations

from opendiloco.doctor.facts import Outlook, Speed
from opendiloco.doctor.findings import Finding, failed, passed, skipped, warned
from opendiloco.plan.report import duration
from opendiloco.quantities import in_words


def check_run(run_id: str, peers: int, outer_step: int, outer_steps: int) -> Finding:
    """`outer_step` is the furthest that a peer says it is at."""
    values = {"peers": peers, "outer_step": outer_step, "outer_steps": outer_steps}
    found = f"{run_id}: {peers} peer{'s' * (peers != 1)} there, outer step {outer_step} of {outer_steps}"
    if peers and outer_step >= outer_steps:
        return warned("run", f"{found}: it is finished", "There is nothing more to train in it.", **values)
    return passed("run", found, **values)


def check_speed(speed: Speed | None, why_not: str = "") -> Finding:
    if speed is None:
        return skipped("speed", why_not or "of CPUs, and of GPUs whose peak is not known, only a trial tells it")
    how = f"measured over {speed.steps} inner steps"
    if not speed.steps:
        how = "estimated from the GPU's peak" + (f"; {why_not}" if why_not else "")
    values = {"tokens_per_second": speed.tokens_per_second, "is_measured": bool(speed.steps)}
    return passed("speed", f"{speed.tokens_per_second:,.0f} tokens/s, {how}", **values)


def check_round(outlook: Outlook | None, is_measured: bool = False, why_not: str = "") -> Finding:
    """`is_measured`: the speed is, and so it is certain enough that a machine is too slow."""
    if outlook is None:
        return skipped("round", why_not)
    if outlook.is_supposed:
        with_whom = "with one peer like this machine, since nobody is there"
    else:
        with_whom = f"with {outlook.peers - 1} other{'s' * (outlook.peers != 2)}, if their links are like this one"
    found = (
        f"an outer step takes {duration(outlook.cycle_seconds)} {with_whom}: {duration(outlook.training_seconds)}"
        f" for {outlook.inner_steps} inner steps, {duration(outlook.round_seconds)} to average;"
        f" {in_words(round(outlook.sent))} up and as much down in each, {in_words(round(outlook.sent_a_day))} a day"
    )
    if outlook.joining_seconds is not None:
        found += f"; joining takes {duration(max(1.0, outlook.joining_seconds))}"
    values = {
        "outer_step_seconds": outlook.cycle_seconds,
        "training_seconds": outlook.training_seconds,
        "round_seconds": outlook.round_seconds,
        "sent_bytes": outlook.sent,
        "sent_bytes_a_day": outlook.sent_a_day,
        "joining_seconds": outlook.joining_seconds,
        "peers": outlook.peers,
    }
    if outlook.joining_seconds is None:
        found, remedy = f"{found}; it would never catch up with the others", "Use a faster link."
        return (failed if is_measured else warned)("round", found, remedy, **values)
    if not outlook.cycles:
        found, remedy = f"{found}; it is too slow: its work would never count", "Use a faster machine, or more GPUs."
        return (failed if is_measured else warned)("round", found, remedy, **values)
    if outlook.cycles > 1:
        found = f"{found}; its work counts in one of {outlook.cycles} outer steps"
        return warned("round", found, "A faster machine would count in each.", **values)
    return passed("round", found, **values)
