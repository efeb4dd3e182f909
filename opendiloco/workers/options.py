"""The owner's choices for training on this machine, which no other peer needs to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opendiloco.errors import MachineError
from opendiloco.quantities import OptimizerState

TEMPERATURE = 0.8
"""Default sampling temperature. Below 1, likely tokens become more likely than the model predicts."""
AUTO = "auto"


def parse_overlap(text: str) -> int | None:
    """Return the owner's overlap as a number of inner steps, or None for "auto". Raises: ValueError for other texts."""
    if text == AUTO:
        return None
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text} is neither auto nor a number of inner steps, 1 or more")
    return int(text)


@dataclass(frozen=True)
class WorkerOptions:
    """The owner's choices for the workers of one machine.

    `device` is "auto" (all GPUs if torch sees any, else the CPU), "cpu", "cuda" (all GPUs), or one GPU, such as
    "cuda:1". `cpu_workers` is the number of workers on the CPU, `gpus` the number on GPUs (None: all GPUs).

    `threads` is the number of CPU threads of each worker, also for drawing the initial weights. None: see
    `choose_threads`, and all cores for drawing. The default is 1, because sums by several threads differ in their
    rounding.

    `micro_batch` windows go through the model at once (None: as many as fit; on the CPU at most the run's number).
    `activation_checkpointing` None: as the run recommends. `compile` None: on GPUs. With `tf32`, GPUs multiply in TF32
    where the run asks for fp32.

    With `whole_gradients`, workers that share a model keep whole gradients until the last window of a batch. With
    `whole_layers`, they also keep whole layers from the forward to the backward pass. `replicas` is the number of equal
    groups of workers; the workers of one group share one copy of the model.

    `optimizer_state` is the place of the inner optimizer's moments between two steps: on the device, in main memory, or
    on the device in 8 bits a value. `overlap` is the number of inner steps between storing a fragment and merging its
    average, or "auto" (None: as the run says).

    Workers run with the niceness `nice`, 0 to 19, so that processes with a lower one come first. All processes of the
    volunteer together keep to `max_memory` bytes of main memory as far as possible. Compiled code is kept in the folder
    `compile_cache` (None: PyTorch's own folder).

    Lost workers are restarted up to `restarts` times in a row. Without `trains` there is one worker, which evaluates,
    generates and exports. Without `reads` it opens none of the run's text, and can only generate.
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
        """True if workers sum their gradients once per inner step instead of once per micro-batch."""
        return self.whole_gradients or self.whole_layers


def needs_gpu_count(options: WorkerOptions) -> bool:
    """Return True if `choose_devices` needs the number of GPUs that torch sees."""
    return options.device in ("auto", "cuda")


def choose_threads(options: WorkerOptions, devices: Sequence[str], cores: int) -> int:
    """Return the number of CPU threads of each worker, on a machine with `cores` usable cores.

    A worker beside a GPU has one. Workers on the CPU share all cores but one, which the peer process needs to receive
    messages while they train.
    """
    if options.threads is not None:
        return options.threads
    on_cpu = sum(device == "cpu" for device in devices)
    return max(1, (cores - 1) // on_cpu) if on_cpu else 1


def choose_devices(options: WorkerOptions, gpus: int) -> list[str]:
    """Return the device of each worker, such as "cuda:0", on a machine with `gpus` GPUs. Raises: MachineError if the
    options ask for more GPUs, or contradict each other."""
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
