"""Checks that a GPU computes as the CPU does, and the speed of copying theta to and from a GPU: `python -m
benchmarks.gpu_checks --device cuda`.

A small Llama in fp32 takes two outer steps of two replicas on the CPU and on the device. The resulting weights may
differ only by their rounding. Theta must come back from the device bit for bit, and so must AdamW's moments by way of a
file.

The rest is the rate, in bytes a second, at which `Shards` moves theta between the device and the memory that a worker
shares with its peer process. It is compared with the link's own rate: a copy of as many bytes from and to pinned
memory.
"""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmarks.convergence import SETTINGS
from benchmarks.methods import EXACT
from benchmarks.reporting import Bar, json_option, report
from opendiloco.model.layout import Layout
from opendiloco.model.parameters import STAGED_VALUES, Shards, pin
from opendiloco.shared_memory import SharedVectors, Vector
from opendiloco.training.reference import Reference, Work
from opendiloco.training.team import choose_device
from peers.values.leases import SampleRange

REPETITIONS = 3
RUN = "checks"
BATCH = 4


def untrained(device: torch.device, inner_steps: int) -> Reference:
    """Return an untrained reference run with exact averages, because int8 would enlarge the smallest differences
    between devices."""
    changes = {"schedule": {"warmup_steps": 1, "stable_steps": 2 * inner_steps, "decay_steps": 1}}
    config = SETTINGS["1m"].config(0, 2 * inner_steps, inner_steps, BATCH, changes)
    return Reference(config, codec=EXACT, device=device)


def trained(device: torch.device, inner_steps: int) -> Reference:
    """Return a reference run in which two replicas have trained on the device for two outer steps."""
    reference, samples = untrained(device, inner_steps), inner_steps * BATCH
    for first in (0, 2 * samples):
        leases = (SampleRange(first, first + samples), SampleRange(first + samples, first + 2 * samples))
        reference.outer_step([Work(name, (lease,), inner_steps) for name, lease in zip("ab", leases, strict=True)])
    return reference


def differences(here: Reference, there: Reference, start: Vector) -> float:
    """Return the distance between two runs' weights, as a share of the second run's distance from the initial weights
    `start`."""
    return float(np.linalg.norm(here.state.theta - there.state.theta) / np.linalg.norm(there.state.theta - start))


def theta_comes_back(reference: Reference) -> bool:
    replica, back = reference.build_replica(), np.full_like(reference.state.theta, np.nan)
    replica.load(reference.state.theta)
    replica.store(back)
    return bool((back == reference.state.theta).all())


def moments_come_back(reference: Reference, folder: Path) -> bool:
    replica, again = reference.members["a"].replica, reference.build_replica()
    replica.keep_moments(folder / "kept", RUN, 2)()
    again.recall_moments(folder / "kept", RUN)
    again.keep_moments(folder / "again", RUN, 2)()
    return (folder / "kept").read_bytes() == (folder / "again").read_bytes()


def rate(device: torch.device, size: int, move: Callable[[], object]) -> float:
    """Return the median speed of `move`, which copies `size` bytes, in GB a second. The first copy is not counted."""
    seconds = []
    for _ in range(1 + REPETITIONS):
        synchronise(device)
        began = time.perf_counter()
        move()
        synchronise(device)
        seconds.append(time.perf_counter() - began)
    return size / statistics.median(seconds[1:]) / 1e9


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def moves(device: torch.device, values: int) -> dict[str, float]:
    """Return the speeds of copying theta to and from the device, in GB a second, by the kind of copy. Theta has
    `values` values in 40 parameters."""
    layout = Layout([(f"p{number}", (values // 40 // 1024, 1024)) for number in range(40)])
    vectors, size = SharedVectors.create(layout.size), 4 * layout.size
    vectors.theta[:] = 1.0
    tensors = {each.name: torch.zeros(each.shape, device=device) for each in layout}
    is_gpu = device.type == "cuda"
    staging = torch.empty(STAGED_VALUES, pin_memory=True) if is_gpu else None
    shards, flat = Shards(layout, staging=staging), torch.zeros(layout.size, device=device)
    link = torch.empty(layout.size, pin_memory=is_gpu)
    rates = {
        "load, by a staging buffer": rate(device, size, lambda: shards.load(vectors.theta, tensors)),
        "store, by a staging buffer": rate(device, size, lambda: shards.store(tensors, vectors.local)),
    }
    pin(vectors.both, device)
    return rates | {
        "load": rate(device, size, lambda: shards.load(vectors.theta, tensors)),
        "store": rate(device, size, lambda: shards.store(tensors, vectors.local)),
        "link, to the device": rate(device, size, lambda: flat.copy_(link, non_blocking=True)),
        "link, from the device": rate(device, size, lambda: link.copy_(flat, non_blocking=True)),
    }


def machine(device: torch.device) -> dict[str, str]:
    """Return facts about the measured machine by name, such as its processor, GPU and torch version."""
    facts = {"python": platform.python_version(), "torch": torch.__version__, "processor": platform.processor()}
    if device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
        with suppress(OSError):
            facts["driver"] = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    return facts


@click.command(help=__doc__)
@click.option("--device", default="cuda", show_default=True)
@click.option("--values", default=200_000_000, show_default=True, help="fp32 values to move.")
@click.option("--inner-steps", default=5, show_default=True, help="Inner steps of each outer step.")
@json_option
def main(device: str, values: int, inner_steps: int, json_file: Path | None) -> None:
    there, cpu = choose_device(device), torch.device("cpu")
    start = untrained(cpu, inner_steps).state.theta
    ours, expected = trained(there, inner_steps), trained(cpu, inner_steps)
    differ = differences(ours, expected, start)
    with tempfile.TemporaryDirectory(prefix="gpu-checks-") as folder:
        checks = {"theta": theta_comes_back(ours), "moments": moments_come_back(ours, Path(folder))}
    rates = moves(there, values)
    rows: list[dict[str, Any]] = [{"what": name, "value": value} for name, value in machine(there).items()]
    rows.append({"what": "weights differ from the CPU's by, as a share of their way", "value": f"{differ:.2e}"})
    rows += [{"what": f"{name}, GB/s", "value": f"{value:.2f}"} for name, value in rates.items()]
    bars = [Bar("0.001 / the difference of weights", 1e-3 / max(differ, 1e-12), 1.0)]
    bars += [Bar(f"{name} back bit for bit", float(is_same), 1.0) for name, is_same in checks.items()]
    for way, link in (("load", "to"), ("store", "from")):
        bars.append(Bar(f"{way} / the link {link} the device", rates[way] / rates[f"link, {link} the device"], 0.7))
    report(f"checks on {there}", rows, bars, json_file)


if __name__ == "__main__":
    main()
