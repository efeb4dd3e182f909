"""How this machine trains: what its owner chooses, and no other peer needs to know."""

from __future__ import annotations

from dataclasses import dataclass

from opendiloco.errors import MachineError


@dataclass(frozen=True)
class WorkerOptions:
    """`device` is "auto" (all GPUs if torch sees any, else the CPU), "cpu", "cuda" (all GPUs) or one, as "cuda:1".

    `cpu_workers` counts on the CPU, `gpus` (None: all) on GPUs; each worker has `threads` CPU threads. `micro_batch` is
    how many windows go through the model at once (None: as many as fit, up to what the run recommends).
    `activation_checkpointing` None: as the run recommends. `compile` None: on GPUs.
    Workers that are lost are started again up to `restarts` times in a row. Without `trains` there is one worker, which
    only evaluates, generates and exports.
    """

    device: str = "auto"
    cpu_workers: int = 1
    gpus: int | None = None
    threads: int = 1
    micro_batch: int | None = None
    activation_checkpointing: bool | None = None
    compile: bool | None = None
    restarts: int = 0
    trains: bool = True


def needs_gpu_count(options: WorkerOptions) -> bool:
    """Whether `choose_devices` must know how many GPUs torch sees."""
    return options.device in ("auto", "cuda")


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
