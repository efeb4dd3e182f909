"""The checks that `join` makes before anything else: those that take no time, and save whoever waits for the rest."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from opendiloco.doctor.facts import Machine
from opendiloco.doctor.findings import Finding, Verdict
from opendiloco.doctor.machine_checks import check_disk, machine_findings
from opendiloco.errors import MachineError
from opendiloco.workers.options import WorkerOptions

logger = logging.getLogger(__name__)

SLOW_TO_KNOW = ("heat", "gpu")
"""What the quick facts say nothing of."""


def check_quickly(state: Path | None, options: WorkerOptions) -> None:
    """Log what could be better on this machine. Raises: MachineError for what would keep it from training."""
    from opendiloco.doctor.system import quick_machine

    judge(quick_findings(quick_machine(state), options))


def quick_findings(machine: Machine, options: WorkerOptions) -> Iterator[Finding]:
    """Yield what these checks find. How much memory and disk the run takes is not known yet."""
    yield from (finding for finding in machine_findings(machine, options) if finding.name not in SLOW_TO_KNOW)
    if machine.folder.error:
        yield check_disk(machine.folder)


def judge(findings: Iterator[Finding]) -> None:
    """Log warnings; raise the first failure. Raises: MachineError."""
    for finding in findings:
        if finding.verdict is Verdict.FAIL:
            raise MachineError(f"{finding.found}.", f"{finding.remedy} `diloco-peer doctor` explains more.")
        if finding.verdict is Verdict.WARN:
            logger.warning("%s. %s", finding.found, finding.remedy)
