"""The findings of the doctor's checks: each has a verdict, an observation and a remedy. They are printed as lines,
summed up in a sentence, or written as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from opendiloco.errors import fit_for_terminal
from peers.errors import DilocoPeerError

if TYPE_CHECKING:
    from rich.console import Console

Value = str | int | float | bool | None

CHECKS: Mapping[str, str] = {
    "python": "Python's version, and the number of cores",
    "torch": "torch can be imported; the GPUs that it was built for",
    "gpu": "torch can compute on the GPUs that this machine has",
    "compiler": "there is a C compiler, if torch.compile needs one",
    "shm": "/dev/shm has room for several GPUs",
    "heat": "temperatures of processors and GPUs",
    "power": "batteries, and limits of the GPUs' power",
    "kernels": "the C kernels give the reference's bits; their speed",
    "p2pd": "libp2p's daemon starts",
    "ports": "the ports of `--listen` and `--data-port` are free",
    "ipv6": "this machine has an address of its own on the internet",
    "bootstrap": "a bootstrap node answers, and takes this machine into the swarm",
    "clock": "this machine's clock against that of the bootstrap node",
    "reach": "how others reach this machine: a bootstrap node dials it back",
    "run": "a node knows the run, and this version can train in it",
    "admission": "the run admits this machine",
    "data": "the run's data can be read here",
    "peers": "how this machine reaches the peers of the run",
    "bandwidth": "the bandwidth of the link, to a peer or to a bootstrap node",
    "memory": "free main memory and GPU memory, compared with the run's needs",
    "disk": "the folder for checkpoints can be written, and has space",
    "speed": "how fast this machine trains the run's model",
    "round": "how long an outer step takes, and what it costs in traffic a day",
}
"""Every check by its name, in the order in which they are made. docs/volunteer.md#what-doctor-checks has them, too."""


class Verdict(StrEnum):
    """The result of a check. `FAIL`: the machine cannot train; `WARN`: it can train, but has a problem with a
    remedy."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """The finding of one check. `found` is a sentence for people, or the reason why the check was skipped. `values`
    hold the same facts for programs, in bytes, seconds and bits a second."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""
    values: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.name in CHECKS, self.name


def passed(name: str, found: str, **values: Value) -> Finding:
    return Finding(name, Verdict.PASS, found, values=values)


def warned(name: str, found: str, remedy: str, **values: Value) -> Finding:
    return Finding(name, Verdict.WARN, found, remedy, values)


def failed(name: str, found: str, remedy: str, **values: Value) -> Finding:
    return Finding(name, Verdict.FAIL, found, remedy, values)


def skipped(name: str, reason: str) -> Finding:
    return Finding(name, Verdict.SKIPPED, reason)


def failed_with(name: str, error: DilocoPeerError) -> Finding:
    """Return a failed finding for the check `name`, with the message and the remedy of `error`."""
    return failed(name, error.message, error.remedy)


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict among these findings. Skipped checks do not count; without findings, the verdict is
    PASS."""
    verdicts = {finding.verdict for finding in findings}
    return next((verdict for verdict in (Verdict.FAIL, Verdict.WARN) if verdict in verdicts), Verdict.PASS)


STYLES = {Verdict.PASS: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red", Verdict.SKIPPED: "dim"}
VERDICT_WIDTH, NAME_WIDTH = max(map(len, Verdict)), max(map(len, CHECKS))


def show(console: Console, finding: Finding) -> None:
    """Print a finding and its remedy: in columns on a terminal, otherwise as plain lines."""
    finding = replace(finding, found=fit_for_terminal(finding.found), remedy=fit_for_terminal(finding.remedy))
    if not console.is_terminal:
        line = f"{finding.verdict:<{VERDICT_WIDTH}} {finding.name:<{NAME_WIDTH}} {finding.found}"
        remedy = f"\n{'':<{VERDICT_WIDTH + NAME_WIDTH + 2}}-> {finding.remedy}" if finding.remedy else ""
        console.out(line + remedy, highlight=False)
        return
    from rich.markup import escape  # imported only to print on a terminal, because `join` uses this module without rich
    from rich.table import Table

    table = Table.grid(padding=(0, 1))
    table.add_column(width=VERDICT_WIDTH, style=STYLES[finding.verdict], no_wrap=True)
    table.add_column(width=NAME_WIDTH, style="bold", no_wrap=True)
    table.add_column(style="dim" if finding.verdict is Verdict.SKIPPED else "")
    table.add_row(finding.verdict, finding.name, escape(finding.found))
    if finding.remedy:
        table.add_row("", "", f"→ {escape(finding.remedy)}")
    console.print(table, highlight=False)


def conclusion(findings: Sequence[Finding], run_id: str | None) -> str:
    """Return a sentence that says if the machine can train, or take part in the run, and names the checks with
    problems."""
    goal = f"take part in {run_id}" if run_id else "train"
    failing, warning = (
        [finding.name for finding in findings if finding.verdict is verdict] for verdict in (Verdict.FAIL, Verdict.WARN)
    )
    if failing:
        return f"This machine cannot {goal} as it is: see {', '.join(failing)}."
    if warning:
        return f"This machine can {goal}, and could do better: see {', '.join(warning)}."
    return f"This machine can {goal}."


def as_json(findings: Sequence[Finding], run_id: str | None) -> str:
    """Return one JSON object with the worst verdict, the run's id and all findings."""
    checks = [
        {
            "name": finding.name,
            "verdict": finding.verdict.value,
            "found": finding.found,
            "remedy": finding.remedy,
            "values": {  # null replaces infinity and NaN, which JSON does not have
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in finding.values.items()
            },
        }
        for finding in findings
    ]
    return json.dumps({"verdict": worst(findings).value, "run": run_id, "checks": checks}, indent=2)
