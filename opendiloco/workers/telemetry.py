"""What a machine's training comes to: one log line for each outer step, gauges for Prometheus, and values for trackers.

`peers.metrics` has what any peer counts; here is what only training knows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from prometheus_client import Gauge

from opendiloco.workers.control import InnerLoopDone, InnerStepDone
from opendiloco.workers.trackers import Tracker
from peers.presence.heartbeat import HeldOutLoss

logger = logging.getLogger(__name__)

VALUES = {
    "loss": "Mean training loss, nats per token",
    "gradient_norm": "Mean gradient norm before clipping",
    "tokens": "Tokens trained",
    "tokens_per_second": "Training speed",
    "flops_utilisation": "Model FLOPs utilisation, 0 to 1; NaN: the peak of this device is not known",
    "data_wait_share": "Share of the time, 0 to 1, in which training waited for data",
    "peak_memory_bytes": "Most memory of the first worker: on a GPU in that training, on the CPU since it started",
    "skipped_inner_steps": "Inner steps that changed nothing, since their loss or gradient was not finite",
}
"""Of one outer step's training on this machine: the same in metrics, and in trackers as training/…"""

GAUGES = {
    name: Gauge(f"diloco_peer_training_{name}", f"{text}; this machine's last outer step")
    for name, text in VALUES.items()
}
for _gauge in GAUGES.values():
    _gauge.set(math.nan)  # until something has been trained


def values_of(done: InnerLoopDone, peak_tokens_per_second: float | None) -> dict[str, float]:
    """One training's `VALUES`; NaN where one is not known."""
    seconds = max(done.seconds, 1e-9)
    speed = done.tokens / seconds
    return {
        "loss": done.loss,
        "gradient_norm": done.gradient_norm,
        "tokens": done.tokens,
        "tokens_per_second": speed,
        "flops_utilisation": speed / peak_tokens_per_second if peak_tokens_per_second else math.nan,
        "data_wait_share": min(done.waited_seconds / seconds, 1.0),
        "peak_memory_bytes": done.peak_memory_bytes,
        "skipped_inner_steps": done.skipped,
    }


class Telemetry:
    """The one place that says how training goes. `inner_steps` of each outer step count in the trackers' steps."""

    def __init__(self, inner_steps: int, peak_tokens_per_second: float | None = None) -> None:
        self.trackers: list[Tracker] = []
        self._inner_steps = inner_steps
        self._peak_tokens_per_second = peak_tokens_per_second

    def progressed(self, index: int, progress: InnerStepDone) -> None:
        """One inner step of outer step `index` is done."""
        values = {"inner_step/loss": progress.loss, "inner_step/gradient_norm": progress.gradient_norm}
        self._track(index * self._inner_steps + progress.inner_step, values)

    def trained(self, index: int, done: InnerLoopDone) -> None:
        """This machine's training for outer step `index` is done."""
        values = values_of(done, self._peak_tokens_per_second)
        if done.skipped:
            logger.warning(
                "outer step %d: %d inner steps were skipped; their loss or gradient was not finite", index, done.skipped
            )
        logger.info("trained after outer step %d: %s", index, line_of(values))
        for name, value in values.items():
            GAUGES[name].set(value)
        self._track(
            index * self._inner_steps + done.inner_steps, {f"training/{name}": value for name, value in values.items()}
        )

    def evaluated(self, held_out: HeldOutLoss, is_runs_text: bool = True) -> None:
        """This machine has evaluated theta, on the run's held-out text or on other text of its own. (`peers.metrics`
        has the gauge.)"""
        name, other = "held_out/loss", ""
        if not is_runs_text:
            name, other = "own_held_out/loss", ", on other text than the run's: not to be compared with other machines'"
        logger.info("held-out loss %.4f after outer step %d%s", held_out.loss, held_out.index, other)
        self._track(held_out.index * self._inner_steps, {name: held_out.loss})

    def _track(self, inner_step: int, values: Mapping[str, float]) -> None:
        """A tracker that fails is given up: training need not end of it."""
        known = {name: value for name, value in values.items() if math.isfinite(value)}
        for tracker in tuple(self.trackers):
            try:
                tracker.record(inner_step, known)
            except Exception as error:  # each library has its own ways to object
                self.trackers.remove(tracker)
                logger.warning("%s takes no more values: %s", type(tracker).__name__, error)


def line_of(values: Mapping[str, float]) -> str:
    """`VALUES` for people."""
    known = {name: value for name, value in values.items() if not math.isnan(value)}
    norm = f"gradient norm {known['gradient_norm']:.3g}, " if "gradient_norm" in known else ""
    waiting = f"{known['data_wait_share']:.1%} waiting for data, " if "data_wait_share" in known else ""
    utilisation = f"{known['flops_utilisation']:.1%}" if "flops_utilisation" in known else "unknown"
    return (
        f"{values['tokens']:.0f} tokens, loss {values['loss']:.4f}, {norm}{values['tokens_per_second']:.0f} tokens/s, "
        f"MFU {utilisation}, {waiting}{values['peak_memory_bytes'] / 2**30:.2f} GiB"
    )
