"""The progress of a volunteer at one moment: its phase, and all that its owner may want to know, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opendiloco.stages import WITH_A_COMPILER
from opendiloco.view.contributions import Contribution
from peers.protocol.states import State

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
ROUTINE = frozenset({TRAINING, SYNCHRONISING, OF_STATES[State.READY]})
"""Phases of every outer step."""
ABOUT_DATA = ("tokenizing ", "downloading ", "checking ", "waiting for tokens")
"""How the names of those stages begin that prepare data."""


@dataclass(frozen=True)
class Work:
    """How far something has come: `share` of it is done, after so many seconds. None: nobody knows."""

    share: float | None = None
    seconds: float = 0.0

    @property
    def left(self) -> float | None:
        """Return the seconds that remain if it goes on at this speed; None where nobody knows."""
        return self.seconds * (1 - self.share) / self.share if self.share else None


@dataclass(frozen=True)
class Traffic:
    """Bulk data in one direction: bytes a second now, the cap on them, and all bytes until now."""

    rate: float = 0.0
    cap: float | None = None
    total: int = 0


@dataclass(frozen=True)
class Fragments:
    """Of a run that streams: how many fragments there are, how many of this cycle's are being averaged and how many are
    done, and after how many inner steps an average is merged here. Of the last training: how many averages it waited
    for, for which share of its time, and how many seconds the slowest took; None: none was awaited yet."""

    count: int
    averaging: int
    done: int
    overlap: int
    late: int = 0
    wait_share: float = 0.0
    longest: float | None = None


@dataclass(frozen=True)
class Progress:
    """One moment of a volunteer. It is paused while there are `pause_reasons`.

    `reachable` says whether others can dial this machine; `links` counts the other peers by the way to them. `held_out`
    says in words how good the model is on held-out text, and `machine` which temperature and power can be read; both
    may be empty.
    """

    phase: str
    outer_step: int
    outer_steps: int
    inner_step: int
    inner_steps: int
    work: Work
    peers: int
    reachable: str
    links: Mapping[str, int]
    loss: float | None = None
    losses: Sequence[float] = ()
    tokens_per_second: float = 0.0
    held_out: str = ""
    contribution: Contribution | None = None
    fragments: Fragments | None = None
    up: Traffic = Traffic()
    down: Traffic = Traffic()
    donors: int = 0
    pause_reasons: tuple[str, ...] = ()
    machine: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the progress as JSON can say it, for log lines that programs read."""
        own = self.contribution
        return {
            "phase": self.phase,
            "outer_steps": self.outer_steps,
            "inner_step": self.inner_step,
            "inner_steps": self.inner_steps,
            "seconds_left": None if self.work.left is None else round(self.work.left, 1),
            "peers": self.peers,
            "reachable": self.reachable,
            "links": dict(self.links),
            "loss": self.loss,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "contribution": None if own is None else own.plain(),
            "sent_bytes": self.up.total,
            "received_bytes": self.down.total,
            "pause_reasons": list(self.pause_reasons),
        }


def phase_of_stage(stage: str) -> str:
    """Return which phase a stage of the start belongs to."""
    if stage in (FINDING, CHECKING):
        return stage
    if stage in WITH_A_COMPILER:
        return COMPILING
    return PREPARING if stage.startswith(ABOUT_DATA) else STARTING
