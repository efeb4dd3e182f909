"""What the doctor says: a line for each finding, a verdict in the end, or one JSON object."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from opendiloco.errors import fit_for_terminal
from opendiloco.tools.doctor.findings import CHECKS, Finding, Verdict, worst

STYLES = {Verdict.PASS: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red", Verdict.SKIPPED: "dim"}
VERDICT_WIDTH, NAME_WIDTH = max(map(len, Verdict)), max(map(len, CHECKS))


def show(console: Console, finding: Finding) -> None:
    """Print a finding: in columns on a terminal, else as one line, and its remedy as another one."""
    finding = replace(finding, found=fit_for_terminal(finding.found), remedy=fit_for_terminal(finding.remedy))
    if not console.is_terminal:
        console.out(plain_line(finding), highlight=False)
        return
    table = Table.grid(padding=(0, 1))
    table.add_column(width=VERDICT_WIDTH, style=STYLES[finding.verdict], no_wrap=True)
    table.add_column(width=NAME_WIDTH, style="bold", no_wrap=True)
    table.add_column(style="dim" if finding.verdict is Verdict.SKIPPED else "")
    table.add_row(finding.verdict, finding.name, _escaped(finding.found))
    if finding.remedy:
        table.add_row("", "", f"→ {_escaped(finding.remedy)}")
    console.print(table, highlight=False)


def plain_line(finding: Finding) -> str:
    """Return a finding without colours."""
    line = f"{finding.verdict:<{VERDICT_WIDTH}} {finding.name:<{NAME_WIDTH}} {finding.found}"
    return f"{line}\n{'':<{VERDICT_WIDTH + NAME_WIDTH + 2}}-> {finding.remedy}" if finding.remedy else line


def conclusion(findings: Sequence[Finding], run_id: str | None) -> str:
    """Return the verdict in a sentence."""
    what = f"take part in {run_id}" if run_id else "train"
    by_verdict = {verdict: [finding.name for finding in findings if finding.verdict is verdict] for verdict in Verdict}
    failing, warning = by_verdict[Verdict.FAIL], by_verdict[Verdict.WARN]
    if failing:
        return f"This machine cannot {what} as it is: see {', '.join(failing)}."
    if warning:
        return f"This machine can {what}, and could do better: see {', '.join(warning)}."
    return f"This machine can {what}."


def as_json(findings: Sequence[Finding], run_id: str | None) -> str:
    """Return all findings as one JSON object. docs/doctor.md has its keys."""
    checks = [
        {
            "name": finding.name,
            "verdict": finding.verdict.value,
            "found": finding.found,
            "remedy": finding.remedy,
            "values": {name: _finite(value) for name, value in finding.values.items()},
        }
        for finding in findings
    ]
    return json.dumps({"verdict": worst(findings).value, "run": run_id, "checks": checks}, indent=2)


def _finite(value: object) -> object:
    """JSON has neither infinity nor NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
