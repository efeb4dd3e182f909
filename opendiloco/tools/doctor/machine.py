"""Checks of the machine itself; among them those that take no time, which `join` makes before anything else."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING

from opendiloco.cores import usable_cores
from opendiloco.errors import MachineError
from opendiloco.gpus import INSTALL_TORCH, INSTALL_TORCHAO, Cards, read_cards, unusable
from opendiloco.owner.facts import GpuState, is_on_battery, read_gpus, read_sensors
from opendiloco.quantities import OptimizerState, in_words
from opendiloco.shared_memory import available_memory
from opendiloco.storage.run_folder import default_state_folder
from opendiloco.tools.doctor.findings import Finding, Value, Verdict, failed, passed, skipped, warned
from opendiloco.tools.doctor.torch_probe import Gpu, Torch, installed_torch, probed_torch
from opendiloco.workers.options import WorkerOptions, needs_gpu_count

if TYPE_CHECKING:
    from opendiloco.workers.needs import Needs

logger = logging.getLogger(__name__)

SHM = Path("/dev/shm")
LEAST_PYTHON = (3, 11)  # `requires-python` of pyproject.toml
LITTLE_MEMORY = 2 * 10**9
"""Bytes: Python's libraries, the peer process and a small model."""
FULL_DISK, LITTLE_DISK = 10**8, 5 * 10**9  # bytes: for the log and identity; for a small model's checkpoints
LEAST_SHM, LITTLE_SHM = 64 << 20, 1 << 30
"""Bytes that NCCL wants in /dev/shm for GPUs of one machine: with less than Docker's 64 MiB it fails."""
HOT, HOT_GPU, NEARLY = 95.0, 87.0, 5.0
"""Degrees Celsius: of a sensor that names no limit of its own, of a GPU, and below a limit."""
SLOW_KERNELS = 0.5
"""GB/s of the slowest operation. A billion parameters would take half a minute of each outer step."""
LIMITED = 0.6
"""Share of a GPU's usual power below which it is said that it is limited."""


# What `join` looks at first ------------------------------------------------------------------------------------------
def check_quickly(state: Path | None, options: WorkerOptions) -> None:
    """Log what could be better on this machine. Nothing is imported, started or asked for it, unless a GPU's driver
    seems too old; how much memory and disk the run takes is not known yet.

    Raises: MachineError for what would keep it from training.
    """
    torch, cards = installed_torch(), _cards_for(options)
    if torch is not None and cards.are_reachable and cards.are_too_old_for(torch.platform):
        torch = probed_torch(torch)  # NVIDIA's package for compatibility may make up for it
    gpus = _gpus_in_use(torch, options)
    findings = [
        _check_python(),
        _check_torch(torch, cards, options.optimizer_state),
        _check_gpu(torch, cards, options.device),
        _check_compiler(gpus > 0),
        _check_shm(gpus),
        _check_power(()),
    ]
    disk = check_disk(state)
    if "free" not in disk.values:  # nothing can be written there at all
        findings.append(disk)
    for finding in findings:
        if finding.verdict is Verdict.FAIL:
            raise MachineError(f"{finding.found}.", f"{finding.remedy} `diloco-peer doctor` explains more.")
        if finding.verdict is Verdict.WARN:
            logger.warning("%s. %s", finding.found, finding.remedy)


# The checks -----------------------------------------------------------------------------------------------------------
def machine_findings(torch: Torch | None, options: WorkerOptions) -> list[Finding]:
    """Return what the checks find that need no kernels, no network and no run."""
    gpus, cards, states = _gpus_in_use(torch, options), _cards_for(options), read_gpus()
    return [
        _check_python(),
        _check_torch(torch, cards, options.optimizer_state),
        _check_gpu(torch, cards, options.device),
        _check_compiler(gpus > 0),
        _check_shm(gpus),
        _check_heat(states),
        _check_power(states),
    ]


def _check_python() -> Finding:
    version, cores = python_version(), usable_cores()
    found = f"Python {version}, {cores} core{'s' * (cores != 1)} to train on"
    if tuple(map(int, version.split(".")[:2])) < LEAST_PYTHON:
        wanted = ".".join(map(str, LEAST_PYTHON))
        return failed("python", found, f"Install Python {wanted} or newer.", version=version, cores=cores)
    return passed("python", found, version=version, cores=cores)


def _check_torch(torch: Torch | None, cards: Cards, optimizer_state: OptimizerState = "device") -> Finding:
    """Return whether torch is there, and was built for the GPUs that are; and torchao, where it is needed."""
    if torch is None:
        return failed("torch", "torch is not installed", "Install it into this environment: pip install torch")
    values = {"version": torch.version, "platform": torch.platform}
    if torch.error and torch.gpus is None:
        return failed("torch", f"torch {torch.version} cannot be imported: {torch.error}", "Install torch again.")
    if optimizer_state == "8bit" and find_spec("torchao") is None:
        return failed("torch", "torchao, which --optimizer-state 8bit needs, is not installed", INSTALL_TORCHAO)
    found = f"torch {torch.version}, built for {torch.platform or 'CPUs alone'}"
    if torch.platform is None and cards.names:
        found = f"{found}, but this machine has a GPU: {', '.join(cards.names)}"
        return warned("torch", found, f"It would train on the CPU. {INSTALL_TORCH}", **values)
    return passed("torch", found, **values)


def _check_gpu(torch: Torch | None, cards: Cards, device: str = "auto") -> Finding:
    """Whether torch can compute on this machine's GPUs. `device` is what the owner wants to train on."""
    there = ", ".join(cards.names)
    if torch is None:
        return skipped("gpu", "torch is not there to ask")
    if torch.gpus:
        broken = [gpu for gpu in torch.gpus if gpu.error]
        if broken and device != "cpu":
            said = [unusable(gpu.name, gpu.capability, torch.version, gpu.error) for gpu in broken]
            return failed("gpu", "; ".join(found for found, _ in said), said[0][1], gpus=len(torch.gpus))
        return _about_gpus(torch.gpus)
    wants_gpu = device.startswith("cuda")
    if torch.gpus is None:  # nobody has asked torch
        return skipped("gpu", f"not asked; on this machine: {there or 'none'}")
    if not there and wants_gpu:
        return failed("gpu", f"there is no GPU for --device {device}", "Train on the CPU: --device cpu.", gpus=0)
    if not there:
        return passed("gpu", "no GPU here: it trains on the CPU", gpus=0)
    if not cards.is_driven:
        found = f"{there} is here, but no driver of it can be seen"
        remedy = "Install NVIDIA's driver; start a container with --gpus all."
        return (failed if wants_gpu else warned)("gpu", found, remedy, gpus=0)
    found, remedy = cards.hidden_from(torch.version, torch.platform, torch.error)
    is_chosen = torch.platform is None and not wants_gpu  # a build for CPUs alone, which trains on them
    return (warned if is_chosen else failed)("gpu", found, remedy, gpus=0)


def _about_gpus(gpus: tuple[Gpu, ...]) -> Finding:
    names = ", ".join(f"{gpu.name} ({in_words(gpu.memory)}, {'.'.join(map(str, gpu.capability))})" for gpu in gpus)
    if all(gpu.has_bf16 for gpu in gpus):
        return passed("gpu", f"{names}, with bf16", gpus=len(gpus), bf16=True)
    found, remedy = (
        f"{names}: without bf16",
        "Runs in bf16 are computed in fp16 here (since Volta) or fp32, which takes longer.",
    )
    return warned("gpu", found, remedy, gpus=len(gpus), bf16=False)


def _check_compiler(has_gpu: bool) -> Finding:
    if not has_gpu:
        return skipped("compiler", "no GPU: models are compiled only on GPUs")
    if not any(map(shutil.which, [*filter(None, [os.environ.get("CC")]), "gcc", "clang"])):
        return warned("compiler", "there is no C compiler: the model is not compiled, which is slower", "Install gcc.")
    return passed("compiler", "a C compiler is there for torch.compile")


def _check_shm(gpus: int) -> Finding:
    """Only several GPUs of one machine need /dev/shm: NCCL's. Ours is memory without a name."""
    free = _free_shm()
    found = "there is no /dev/shm" if free is None else f"{in_words(free)} free in /dev/shm"
    if gpus < 2:
        return passed("shm", f"{found}; only several GPUs need it", free=free)
    remedy = "Make it larger: `mount -o remount,size=4G /dev/shm`; in a container, --shm-size 4g."
    if free is None or free < LEAST_SHM:
        return failed("shm", f"{found}: too little for {gpus} GPUs", remedy, free=free)
    if free < LITTLE_SHM:
        return warned("shm", f"{found}: little for {gpus} GPUs", remedy, free=free)
    return passed("shm", found, free=free)


def _check_heat(gpus: Sequence[GpuState]) -> Finding:
    readings = [(sensor.name, sensor.celsius, (sensor.critical or HOT + NEARLY) - NEARLY) for sensor in read_sensors()]
    readings += [(gpu.name, gpu.celsius, HOT_GPU) for gpu in gpus if gpu.celsius is not None]
    slowed = [gpu.name for gpu in gpus if gpu.is_slowed_by_heat]
    if not readings and not slowed:
        return skipped("heat", "no temperature can be read here")
    if slowed:
        return warned("heat", f"too hot, and slowed down: {', '.join(slowed)}", "Give it more air; clean its fans.")
    name, celsius, limit = max(readings, key=lambda reading: reading[1] - reading[2])
    found = f"{name} is at {celsius:.0f} °C"
    if celsius >= limit:
        return warned("heat", f"{found}: hot already", "Give the machine more air; clean its fans.", celsius=celsius)
    return passed("heat", f"{found}, the hottest of {len(readings)}", celsius=celsius)


def _check_power(gpus: Sequence[GpuState]) -> Finding:
    if is_on_battery():
        return warned("power", "this machine is on battery", "Plug it in: training takes all the power there is.")
    slowed = [gpu.name for gpu in gpus if gpu.is_slowed_by_power]
    if slowed:
        return warned("power", f"slowed down for want of power: {', '.join(slowed)}", "Check the power supply.")
    limits = [(gpu, gpu.limit, gpu.default_limit) for gpu in gpus if gpu.limit and gpu.default_limit]
    for gpu, limit, default in limits:
        if limit < LIMITED * default:
            found = f"{gpu.name} is limited to {limit:.0f} of {default:.0f} W"
            return warned("power", found, f"Raise it unless you mean it: nvidia-smi -pl {default:.0f}.", limit=limit)
    if not limits:
        return skipped("power", "not on battery; no GPU says what its limit is")
    return passed("power", ", ".join(f"{gpu.name}: {limit:.0f} of {default:.0f} W" for gpu, limit, default in limits))


def check_kernels() -> Finding:
    """Run the kernels' self-test: two seconds."""
    try:
        from opendiloco import kernels

        speeds = kernels.measure_speeds(threads=1)
        chosen, differing = kernels.chosen_kernels(), kernels.differing_sets()
    except Exception as error:  # whatever an extension that does not load, or a wrong DILOCO_KERNELS, raises
        why = " ".join(str(error).split())
        return failed("kernels", f"the C kernels cannot be used: {why}", "Install diloco-peer again.")
    if differing:
        return failed(
            "kernels",
            f"the kernels {', '.join(differing)} do not give the reference's bits here",
            "Set DILOCO_KERNELS=scalar, and report this with the processor's name: it is a bug, or broken hardware.",
        )
    listed = ", ".join(f"{name} {speed:.1f} GB/s" for name, speed in speeds.items())
    found = f"{chosen}: right to the bit; {listed}"
    values: dict[str, Value] = {"set": chosen, **speeds}
    if min(speeds.values()) < SLOW_KERNELS:
        return warned("kernels", f"{found}: slow", "Stop other programs; unset DILOCO_KERNELS.", **values)
    return passed("kernels", found, **values)


def check_memory(gpus: Sequence[Gpu] = (), needs: Needs | None = None) -> Finding:
    """Compare free memory with what a run takes on these GPUs (none: on the CPU), or the smallest run."""
    free = available_memory()
    found, values = f"{in_words(free)} of main memory free", {"free": free}
    if needs is None:
        if free < LITTLE_MEMORY:
            return warned("memory", found, "Stop other programs: the smallest run takes about 2 GB.", **values)
        return passed("memory", found, **values)
    needed = needs.main_memory if gpus else needs.main_memory_on_cpu
    found, values = f"{found}; the run takes {in_words(needed)}", values | {"needed": needed}
    if free < needed:
        return failed("memory", found, "Stop other programs, or use a machine with more memory.", **values)
    if gpus:
        least, each = min(gpu.free for gpu in gpus), needs.device_memory
        found = f"{found}; of each GPU {in_words(each)} and activations, of {in_words(least)} that are free"
        values |= {"gpu_free": least, "gpu_needed": each}
        if least < each:
            return failed(
                "memory",
                found,
                "Use more GPUs, or larger ones; end what else uses them; try --optimizer-state host.",
                **values,
            )
    return passed("memory", found, **values)


def check_disk(state: Path | None, needs: Needs | None = None) -> Finding:
    where, remedy = state or default_state_folder(), "Name a folder on a disk with space with --state."
    try:
        free = _free_disk(where)
    except OSError as error:
        return failed("disk", f"{where} cannot be written to: {error.strerror or error}", remedy)
    found, values = f"{in_words(free)} free for {where}", {"free": free}
    if free < FULL_DISK:
        return failed("disk", found, remedy, **values)
    if needs is not None:
        found = f"{found}; checkpoints take {in_words(needs.disk)}, and the log"
        values |= {"needed": needs.disk}
        if free < needs.disk:
            return warned("disk", found, f"{remedy} Or keep fewer: --keep 1, --moments none.", **values)
    elif free < LITTLE_DISK:
        return warned("disk", found, f"{remedy} Checkpoints take 24 bytes a parameter, and moments 16.", **values)
    return passed("disk", found, **values)


# What is there --------------------------------------------------------------------------------------------------------
def _gpus_in_use(torch: Torch | None, options: WorkerOptions) -> int:
    """Return how many GPUs would train. Where torch was not asked, those on the buses count, if it is built for any."""
    if torch is None or options.device == "cpu":
        return 0
    seen = len(read_cards().names) if torch.platform else 0
    there = seen if torch.gpus is None else len(torch.gpus)
    wanted = options.gpus or there if needs_gpu_count(options) else 1
    return min(wanted, there)


def _cards_for(options: WorkerOptions) -> Cards:
    """Return the GPUs on the buses; none for an owner who wants the CPU, and need not hear of them."""
    return Cards() if options.device == "cpu" else read_cards()


def _free_shm(path: Path = SHM) -> int | None:
    with suppress(OSError):
        return shutil.disk_usage(path).free
    return None


def _free_disk(path: Path) -> int:
    """Return the free bytes for a folder, after writing to it or the nearest one above it. Raises: OSError."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    with tempfile.TemporaryFile(dir=there):
        return shutil.disk_usage(there).free
