"""The curves that a peer sends to trackers in addition to those of its own training: values of each outer step, and
other peers' held-out losses."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from opendiloco.run import Run
from opendiloco.storage.run_folder import HeldOutCurve
from opendiloco.training.outer import OuterStepTaken
from opendiloco.view.run_view import RunView
from opendiloco.workers.options import WorkerOptions
from opendiloco.workers.telemetry import Telemetry
from peers.driver.rounds import RoundCosts
from peers.presence.heartbeat import Heartbeat

VERSIONED = ("diloco-peer", "torch", "transformers", "hivemind")


class Curves:
    """Sends each outer step's values and the peers' held-out losses to `telemetry`. `held_out` has the losses that were
    sent already."""

    def __init__(self, telemetry: Telemetry, held_out: HeldOutCurve | None = None) -> None:
        self._telemetry = telemetry
        self.held_out = held_out or HeldOutCurve()
        self._before = RoundCosts()

    def add_outer_step(self, step: OuterStepTaken, costs: RoundCosts) -> None:
        """Send the values of an outer step to telemetry. `costs` are the costs of all rounds so far, summed."""
        statistics = step.statistics
        values = {
            "learning_rate": step.learning_rate,
            "momentum": step.momentum,
            "pseudo_gradient_norm": statistics.pseudo_gradient_norm,
            "average_norm": statistics.average_norm,
            "cosine": statistics.cosine,
            "momentum_norm": statistics.momentum_norm,
            "round_seconds": costs.seconds - self._before.seconds,
            "pause_seconds": step.pause_seconds,
            "sent_bytes": costs.sent_bytes - self._before.sent_bytes,
            "received_bytes": costs.received_bytes - self._before.received_bytes,
            "peak_sent_rate": costs.peak_sent or math.nan,
            "peak_received_rate": costs.peak_received or math.nan,
        }
        self._before = costs
        self._telemetry.outer_step(step.index, values)

    def add_heartbeats(self, own: Heartbeat, view: RunView) -> None:
        """Send to telemetry the first held-out loss that heartbeats report for each outer step, without verifying the
        loss."""
        if own.held_out is not None:  # record this peer's loss so that it is not sent to telemetry again
            self.held_out.add(own.held_out.index, own.held_out.loss)
        for loss in view.held_out:
            if self.held_out.add(loss.index, loss.loss):
                self._telemetry.heard(loss)


def configuration_of(run: Run, peer_id: str, device: str, options: WorkerOptions | None = None) -> dict[str, Any]:
    """Return, as JSON values, the configuration with which the curves were made: the run's manifest, this machine, and
    library versions."""
    machine: dict[str, Any] = {"device": device, "python": sys.version.split()[0]}
    if options is not None:
        machine["options"] = asdict(replace(options, compile_cache=None))  # omitted: names a folder on this machine
    return {
        "run_id": run.run_id,
        "peer_id": peer_id,
        "run": run.manifest.values,
        "machine": machine,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the installed versions of the libraries that affect the training's numbers, by library name."""
    found = {}
    for name in VERSIONED:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
