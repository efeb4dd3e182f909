"""What a check finds: a verdict, what was seen, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from peers.errors import DilocoPeerError

Value = str | int | float | bool | None

CHECKS: Mapping[str, str] = {
    "python": "Python's version, and for how many cores there is work",
    "torch": "torch can be imported; for which GPUs it was built",
    "gpu": "torch can compute on the GPUs that this machine has",
    "compiler": "a C compiler is there where torch.compile needs one",
    "shm": "/dev/shm has room for several GPUs",
    "heat": "temperatures of processors and GPUs",
    "power": "batteries, and limits of the GPUs' power",
    "kernels": "the C kernels give the reference's bits, and how fast",
    "p2pd": "libp2p's daemon starts",
    "ports": "the ports of `--listen` and `--data-port` are free",
    "ipv6": "this machine has an address of its own on the internet",
    "bootstrap": "a bootstrap node answers, and takes this machine into the swarm",
    "clock": "this machine's clock against that of the bootstrap node",
    "reach": "how others reach this machine: a bootstrap node dials it back",
    "run": "somebody knows the run, and this version can train in it",
    "admission": "the run admits this machine",
    "data": "what the run reads can be read here",
    "peers": "how this machine reaches the peers of the run",
    "bandwidth": "what the link carries, to a peer or to a bootstrap node",
    "memory": "free main memory, and that of GPUs, against what the run takes",
    "disk": "the folder for checkpoints can be written to, and has room",
    "speed": "how fast this machine trains the run's model",
    "round": "how long an outer step takes, and what it costs in traffic a day",
}
"""Every check by its name, in the order in which they are made. docs/doctor.md has them with their remedies."""


class Verdict(StrEnum):
    """What a check says. A machine with a `FAIL` cannot train, one with a `WARN` can, and could do better."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """What one check found. `found` is a sentence for people, or the reason why the check was skipped.

    `values` are the same for programs: bytes, seconds, bits a second.
    """

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
    """Return the finding that says what an error says."""
    return failed(name, error.message, error.remedy)


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the verdict on all of them together. What was skipped counts for nothing."""
    verdicts = {finding.verdict for finding in findings}
    return next((verdict for verdict in (Verdict.FAIL, Verdict.WARN) if verdict in verdicts), Verdict.PASS)
