"""The reports on a machine's training: one log line for each outer step, gauges for Prometheus, values for trackers.

`peers.metrics` has the counters of every peer; this module has those that only a training peer knows.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import Gauge, Info

from opendiloco.config.run_config import RunConfig
from opendiloco.evaluation_turns import bits_per_byte, loss_in_words
from opendiloco.model.utilisation import peak_tokens_per_second
from opendiloco.workers.control import Configured, InnerLoopDone, InnerStepDone
from opendiloco.workers.options import WorkerOptions
from opendiloco.workers.trackers import Tracker
from peers.presence.heartbeat import HeldOutLoss

logger = logging.getLogger(__name__)

VALUES = {
    "loss": "Mean loss, nats per token",
    "gradient_norm": "Mean gradient norm before clipping",
    "learning_rate": "Learning rate of the last inner step",
    "tokens": "Tokens trained",
    "tokens_per_second": "Tokens a second",
    "flops_utilisation": "Model FLOPs utilisation (MFU), 0 to 1",
    "data_wait_share": "Share of time waiting for data",
    "average_wait_share": "Share of time waiting for averages",
    "late_averages": "Averages that training waited for",
    "overlap_seconds": "Seconds from taking a fragment to merging its average",
    "longest_average_seconds": "Most seconds from taking a fragment to its average",
    "peak_memory_bytes": "Peak memory of the first worker",
    "skipped_inner_steps": "Inner steps skipped for a non-finite loss or gradient",
}
"""Values of this machine's training for one outer step. Metrics use these names; trackers use training/NAME."""

OUTER_VALUES = {
    "learning_rate": "Outer learning rate",
    "momentum": "Outer momentum",
    "pseudo_gradient_norm": "Norm of own pseudo-gradient",
    "average_norm": "Norm of averaged pseudo-gradient",
    "cosine": "Cosine of own and averaged pseudo-gradient",
    "momentum_norm": "Norm of momentum after the step",
    "round_seconds": "Seconds in rounds",
    "pause_seconds": "Seconds from the end of training to the new state",
    "sent_bytes": "Bytes sent in rounds",
    "received_bytes": "Bytes received in rounds",
    "peak_sent_rate": "Highest send rate, bytes a second",
    "peak_received_rate": "Highest receive rate, bytes a second",
}
"""Values of one outer step on this machine. Metrics use these names; trackers use outer_step/NAME."""

GAUGES = {name: Gauge(f"diloco_peer_training_{name}", text) for name, text in VALUES.items()}
OUTER_GAUGES = {name: Gauge(f"diloco_peer_outer_{name}", text) for name, text in OUTER_VALUES.items()}
BITS_PER_BYTE = Gauge("diloco_peer_held_out_bits_per_byte", "Held-out loss, bits per byte")
RUN = Info("diloco_peer_run", "Configuration: the manifest, this peer's options, versions")
COMPILED = Gauge("diloco_peer_training_is_compiled", "1 if workers train compiled blocks, else 0")
LABEL_LENGTH = 200
"""Characters kept of a configuration value, because a run's author may write values of any length."""
for _gauge in (*GAUGES.values(), *OUTER_GAUGES.values(), BITS_PER_BYTE):
    _gauge.set(math.nan)  # each gauge is NaN until its first value is known


def _values_of(done: InnerLoopDone, peak_tokens_per_second: float | None) -> dict[str, float]:
    """Return the measured values of one training, such as loss and speed, by their names in `VALUES`. Unknown values
    are NaN, as is the FLOPs utilisation if `peak_tokens_per_second` is None."""
    seconds = max(done.seconds, 1e-9)
    speed = done.tokens / seconds
    computed = max(seconds - done.average_wait_seconds, 0.0)
    return {
        "loss": done.loss,
        "gradient_norm": done.gradient_norm,
        "learning_rate": done.learning_rate,
        "tokens": done.tokens,
        "tokens_per_second": speed,
        "flops_utilisation": speed / peak_tokens_per_second if peak_tokens_per_second else math.nan,
        "data_wait_share": min(done.waited_seconds / seconds, 1.0),
        "average_wait_share": min(done.average_wait_seconds / seconds, 1.0),
        "late_averages": math.nan if math.isnan(done.average_wait_seconds) else done.late_averages,
        "overlap_seconds": done.overlap * computed / done.inner_steps if done.overlap * done.inner_steps else math.nan,
        "longest_average_seconds": done.longest_average_seconds or math.nan,
        "peak_memory_bytes": done.peak_memory_bytes,
        "skipped_inner_steps": done.skipped,
    }


class Telemetry:
    """The recorder of a machine's training in this process's log lines, gauges and trackers. On the x-axis of trackers
    an outer step counts as `inner_steps` inner steps.

    `bytes_per_token` is that of the held-out text, or None if unknown. If known, losses are also reported in bits per
    byte.
    """

    def __init__(
        self,
        inner_steps: int,
        peak_tokens_per_second: float | None = None,
        bytes_per_token: float | None = None,
    ) -> None:
        self.trackers: list[Tracker] = []
        self.latest: Mapping[str, float] = {}
        """The measured values of the last training, by their names in `VALUES`."""
        self.bytes_per_token = bytes_per_token
        self._inner_steps = inner_steps
        self._peak_tokens_per_second = peak_tokens_per_second

    @classmethod
    def of(cls, config: RunConfig, options: WorkerOptions, configured: Configured, workers: int) -> Telemetry:
        """Return the telemetry of a machine with this many workers. `configured` is the first worker's reply to
        `Configure`."""
        precision = "tf32" if options.tf32 and config.training.precision == "fp32" else config.training.precision
        peak = peak_tokens_per_second(configured.device_name, workers, precision, configured.flops_per_token)
        return cls(config.training.inner_steps, peak, configured.bytes_per_token)

    def track_with(self, trackers: Iterable[Tracker], configuration: Mapping[str, Any]) -> None:
        """Add trackers, and record the run's configuration in them and in Prometheus."""
        RUN.info(dict(_labels(configuration)))
        for tracker in trackers:
            self.trackers.append(tracker)
            self._tell(tracker, lambda tracker: tracker.configure(configuration))

    def progressed(self, index: int, progress: InnerStepDone) -> None:
        """Record one inner step of outer step `index` in the trackers."""
        values = {
            "inner_step/loss": progress.loss,
            "inner_step/gradient_norm": progress.gradient_norm,
            "inner_step/learning_rate": progress.learning_rate,
        }
        self._track(index * self._inner_steps + progress.inner_step, values)

    def trained(self, index: int, done: InnerLoopDone) -> None:
        """Record this machine's finished training for outer step `index` in a log line, gauges and the trackers."""
        values = self.latest = _values_of(done, self._peak_tokens_per_second)
        if done.skipped:
            logger.warning(
                "outer step %d: %d inner steps were skipped; their loss or gradient was not finite",
                index + 1,
                done.skipped,
            )
        logger.debug("trained after outer step %d: %s", index, _line_of(values))
        for name, value in values.items():
            GAUGES[name].set(value)
        self._track(
            index * self._inner_steps + done.inner_steps, {f"training/{name}": value for name, value in values.items()}
        )

    def outer_step(self, index: int, values: Mapping[str, float]) -> None:
        """Record the `OUTER_VALUES` of one outer step. `index` is the number of outer steps before it."""
        logger.debug("outer step %d: %s", index + 1, _outer_line_of(values))
        for name, value in values.items():
            OUTER_GAUGES[name].set(value)
        self._track((index + 1) * self._inner_steps, {f"outer_step/{name}": value for name, value in values.items()})

    def evaluated(self, held_out: HeldOutLoss, is_runs_text: bool = True) -> None:
        """Record a held-out loss of theta that this machine has computed: in a log line, in the trackers and, as bits
        per byte, in a gauge. `is_runs_text` is false if the text is not the run's."""
        bits = self.heard(held_out, "held_out" if is_runs_text else "own_held_out")
        BITS_PER_BYTE.set(math.nan if bits is None else bits)
        other = "" if is_runs_text else ", on another text than the run's, so other machines' losses do not compare"
        logger.info("held-out loss %s after outer step %d%s", loss_in_words(held_out.loss, bits), held_out.index, other)

    def heard(self, held_out: HeldOutLoss, kind: str = "held_out") -> float | None:
        """Record a held-out loss, by default one that another peer has computed, in the trackers. Return the loss in
        bits per byte, or None if the text's bytes per token are unknown."""
        values, bits = {f"{kind}/loss": held_out.loss}, None
        if self.bytes_per_token is not None:
            values[f"{kind}/bits_per_byte"] = bits = bits_per_byte(held_out.loss, self.bytes_per_token)
        self._track(held_out.index * self._inner_steps, values)
        return bits

    def _track(self, inner_step: int, values: Mapping[str, float]) -> None:
        known = {name: value for name, value in values.items() if math.isfinite(value)}
        for tracker in tuple(self.trackers):
            self._tell(tracker, lambda tracker: tracker.record(inner_step, known))

    def _tell(self, tracker: Tracker, say: Callable[[Tracker], None]) -> None:
        """Call `say(tracker)`. If the call fails, remove the tracker, so that training continues."""
        try:
            say(tracker)
        except Exception as error:  # each tracker's library raises its own errors
            self.trackers.remove(tracker)
            logger.warning("%s takes no more values: %s", type(tracker).__name__, error)


def _labels(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield a label's name and text for each value of a nested configuration. The name joins the keys that lead to the
    value, by "_"."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _labels(inner, f"{path}_{key}" if path else key)
    elif value is not None:
        text = value if isinstance(value, str) else json.dumps(value)
        yield re.sub(r"\W", "_", path, flags=re.ASCII), text[:LABEL_LENGTH]


def _line_of(values: Mapping[str, float]) -> str:
    known = {name: value for name, value in values.items() if not math.isnan(value)}
    norm = f"gradient norm {known['gradient_norm']:.3g}, " if "gradient_norm" in known else ""
    waiting = f"{known['data_wait_share']:.1%} waiting for data, " if "data_wait_share" in known else ""
    if known.get("average_wait_share"):
        waiting += f"{known['average_wait_share']:.1%} waiting for averages, "
    if "longest_average_seconds" in known:
        in_time = f" of {known['overlap_seconds']:.1f}" if "overlap_seconds" in known else ""
        waiting += f"averages after {known['longest_average_seconds']:.1f}{in_time} s at most, "
    utilisation = f"{known['flops_utilisation']:.1%}" if "flops_utilisation" in known else "unknown"
    return (
        f"{values['tokens']:.0f} tokens, loss {values['loss']:.4f}, {norm}{values['tokens_per_second']:.0f} tokens/s, "
        f"MFU {utilisation}, {waiting}{values['peak_memory_bytes'] / 2**30:.2f} GiB"
    )


def _outer_line_of(values: Mapping[str, float]) -> str:
    known = {name: value for name, value in values.items() if not math.isnan(value)}
    parts = [f"learning rate {values['learning_rate']:.3g}, momentum {values['momentum']:.3g}"]
    if "pseudo_gradient_norm" in known:
        parts.append(f"pseudo-gradient norm {values['pseudo_gradient_norm']:.3g}")
    if "cosine" in known:
        parts.append(f"cosine to the average {values['cosine']:.3f}")
    parts += [f"average norm {values['average_norm']:.3g}", f"momentum norm {values['momentum_norm']:.3g}"]
    parts.append(f"{values['round_seconds']:.1f} s in rounds")
    if "pause_seconds" in known:
        parts.append(f"{values['pause_seconds']:.1f} s without training")
    for way in ("sent", "received"):
        peak = known.get(f"peak_{way}_rate")
        at_most = f" at {8 * peak / 1e6:.1f} Mbit/s at most" if peak is not None else ""
        parts.append(f"{values[f'{way}_bytes'] / 1e6:.1f} MB {way}{at_most}")
    return ", ".join(parts)
