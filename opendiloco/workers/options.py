"""The owner's choices of how this machine trains, which no other peer needs to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opendiloco.errors import MachineError
from opendiloco.quantities import OptimizerState

TEMPERATURE = 0.8
"""Of samples, unless told otherwise: a little more likely than the model would write by itself."""
AUTO = "auto"


def parse_overlap(text: str) -> int | None:
    """Return a number of inner steps, or None for "auto". Raises: ValueError."""
    if text == AUTO:
        return None
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text} is neither auto nor a number of inner steps, of which there is at least 1")
    return int(text)


@dataclass(frozen=True)
class WorkerOptions:
    """`device` is "auto" (all GPUs if torch sees any, else the CPU), "cpu", "cuda" (all GPUs) or one, as "cuda:1".

    `cpu_workers` counts on the CPU, `gpus` (None: all) on GPUs. Each worker has `threads` CPU threads, also to draw the
    initial weights (None: see `choose_threads`, and all cores to draw; 1 by default: more sum in another order).
    `micro_batch` windows go through the model at once (None: as many as fit, on the CPU no more than the run says).
    `activation_checkpointing` None: as the run recommends. `compile` None: on GPUs. With `tf32`, GPUs multiply in TF32
    where the run says fp32. With `whole_gradients`, workers that share a model keep their gradients whole until a
    batch's last window; with `whole_layers` also its layers, from the forward to the backward pass. They share it
    `replicas` times, each of so many equal groups once. Between two steps the inner optimizer's moments are on the
    device, in main memory or in 8 bits a value, as `optimizer_state` says.
    `overlap` is "auto" or a number: an average is merged here so many inner steps after its fragment was stored (None:
    as the run says).
    Workers are `nice`, 0 to 19: other processes that are less so come first. All processes of the volunteer together
    keep to `max_memory` bytes of main memory, as far as they can choose.
    What is compiled is kept in the folder `compile_cache` (None: where PyTorch keeps it).
    Workers that are lost are started again up to `restarts` times in a row. Without `trains` there is one worker, which
    only evaluates, generates and exports; without `reads` it opens none of the run's text, and only generates.
    """

    device: str = "auto"
    cpu_workers: int = 1
    gpus: int | None = None
    threads: int | None = 1
    micro_batch: int | None = None
    activation_checkpointing: bool | None = None
    compile: bool | None = None
    compile_cache: str | None = None
    tf32: bool = False
    whole_layers: bool = False
    whole_gradients: bool = False
    replicas: int = 1
    optimizer_state: OptimizerState = "device"
    overlap: str | None = None
    restarts: int = 0
    nice: int = 0
    max_memory: int | None = None
    trains: bool = True
    reads: bool = True

    @property
    def reduces_once(self) -> bool:
        """Whether workers sum their gradients once an inner step, not with each micro-batch."""
        return self.whole_gradients or self.whole_layers


def needs_gpu_count(options: WorkerOptions) -> bool:
    """Whether `choose_devices` must know how many GPUs torch sees."""
    return options.device in ("auto", "cuda")


def choose_threads(options: WorkerOptions, devices: Sequence[str], cores: int) -> int:
    """Return the CPU threads of each worker: one beside a GPU. On the CPU, workers share all cores but one, which the
    peer process has to itself: it hears others while they train."""
    if options.threads is not None:
        return options.threads
    on_cpu = sum(device == "cpu" for device in devices)
    return max(1, (cores - 1) // on_cpu) if on_cpu else 1


def choose_devices(options: WorkerOptions, gpus: int) -> list[str]:
    """The device of each worker on a machine with so many GPUs. Raises: MachineError when these are too few."""
    wanted = options.gpus or (gpus if needs_gpu_count(options) else 0)
    if options.gpus and not needs_gpu_count(options):
        raise MachineError(
            f"--gpus {options.gpus} and --device {options.device} contradict each other.", "Leave out one."
        )
    if wanted > gpus:
        raise MachineError(
            f"--gpus {wanted} are more than torch can use here: {gpus}.",
            "Use --device cpu, fewer GPUs, or a torch that supports them.",
        )
    if wanted:
        devices = [f"cuda:{number}" for number in range(wanted)]
    elif options.device in ("auto", "cpu"):
        devices = ["cpu"] * options.cpu_workers
    else:
        devices = [options.device]
    return devices if options.trains else devices[:1]
