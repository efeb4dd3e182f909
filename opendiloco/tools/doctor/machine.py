"""Checks of this machine's software and hardware. `join` makes the fast checks before it starts anything."""

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
from opendiloco.shared_memory import available_memory, memory_remedy
from opendiloco.storage.run_folder import default_state_folder
from opendiloco.tools.doctor.findings import Finding, Value, Verdict, failed, passed, skipped, warned
from opendiloco.tools.doctor.torch_probe import Gpu, Torch, installed_torch, probed_torch
from opendiloco.workers.options import WorkerOptions, needs_gpu_count

if TYPE_CHECKING:
    from opendiloco.workers.needs import Needs

logger = logging.getLogger(__name__)

SHM = Path("/dev/shm")
LEAST_PYTHON = (3, 11)  # the oldest supported Python: `requires-python` of pyproject.toml
LITTLE_MEMORY = 2 * 10**9
"""Bytes for Python's libraries, the peer process and a small model."""
FULL_DISK, LITTLE_DISK = 10**8, 5 * 10**9  # free bytes below which `check_disk` fails, and below which it warns
LEAST_SHM, LITTLE_SHM = 64 << 20, 1 << 30
"""Free bytes of /dev/shm below which NCCL fails with several GPUs (64 MiB, as in a Docker container), and below which
`_check_shm` warns."""
HOT, HOT_GPU, NEARLY = 95.0, 87.0, 5.0
"""Degrees Celsius: the limit of a sensor that names none, the limit of a GPU, and the margin below a sensor's limit."""
SLOW_KERNELS = 0.5
"""GB/s of the slowest operation, below which `check_kernels` warns: a billion parameters then take more than half a
minute in each outer step."""
LIMITED = 0.6
"""Share of a GPU's default power limit below which a lower limit is reported."""


# The quick checks of `join` ------------------------------------------------------------------------------------------
def check_quickly(state: Path | None, options: WorkerOptions) -> None:
    """Log warnings about this machine. Import torch only if a GPU's driver seems too old, and do not check the run's
    needs of memory and disk. Raises: MachineError for a problem that prevents training."""
    torch, cards = installed_torch(), _cards_for(options)
    if torch is not None and cards.are_reachable and cards.are_too_old_for(torch.platform):
        torch = probed_torch(torch)  # tries the GPU, since NVIDIA's compatibility package may make an old driver usable
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
    if "free" not in disk.values:  # `check_disk` could not write to the folder
        findings.append(disk)
    for finding in findings:
        if finding.verdict is Verdict.FAIL:
            raise MachineError(f"{finding.found}.", f"{finding.remedy} Run `diloco-peer doctor` for details.")
        if finding.verdict is Verdict.WARN:
            logger.warning("%s. %s", finding.found, finding.remedy)


# The checks -----------------------------------------------------------------------------------------------------------
def machine_findings(torch: Torch | None, options: WorkerOptions) -> list[Finding]:
    """Return the findings of all checks of this machine that need no C kernels, network or run."""
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
    found = f"Python {version} on {cores} core{'s' * (cores != 1)}"
    if tuple(map(int, version.split(".")[:2])) < LEAST_PYTHON:
        wanted = ".".join(map(str, LEAST_PYTHON))
        return failed("python", found, f"Install Python {wanted} or newer.", version=version, cores=cores)
    return passed("python", found, version=version, cores=cores)


def _check_torch(torch: Torch | None, cards: Cards, optimizer_state: OptimizerState = "device") -> Finding:
    """Check that torch is installed and, on a machine with GPUs, built for GPUs. Check that torchao is installed if
    `optimizer_state` needs it."""
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
    """Check that torch can compute on this machine's GPUs. `device` is the owner's choice with --device."""
    names = ", ".join(cards.names)
    if torch is None:
        return skipped("gpu", "torch is not installed")
    if torch.gpus:
        broken = [gpu for gpu in torch.gpus if gpu.error]
        if broken and device != "cpu":
            problems = [unusable(gpu.name, gpu.capability, torch.version, gpu.error) for gpu in broken]
            return failed("gpu", "; ".join(found for found, _ in problems), problems[0][1], gpus=len(torch.gpus))
        return _about_gpus(torch.gpus)
    wants_gpu = device.startswith("cuda")
    if torch.gpus is None:  # torch was not tested on the GPUs
        return skipped("gpu", f"not tried; on this machine: {names or 'none'}")
    if not names and wants_gpu:
        return failed("gpu", f"there is no GPU for --device {device}", "Train on the CPU: --device cpu.", gpus=0)
    if not names:
        return passed("gpu", "no GPU here: it trains on the CPU", gpus=0)
    if not cards.is_driven:
        found = f"{names} is here, but has no visible driver"
        remedy = "Install NVIDIA's driver; start a container with --gpus all."
        return (failed if wants_gpu else warned)("gpu", found, remedy, gpus=0)
    found, remedy = cards.hidden_from(torch.version, torch.platform, torch.error)
    is_chosen = torch.platform is None and not wants_gpu  # a torch for CPUs suits an owner who wants no GPU
    return (warned if is_chosen else failed)("gpu", found, remedy, gpus=0)


def _about_gpus(gpus: tuple[Gpu, ...]) -> Finding:
    names = ", ".join(f"{gpu.name} ({in_words(gpu.memory)}, {'.'.join(map(str, gpu.capability))})" for gpu in gpus)
    if all(gpu.has_bf16 for gpu in gpus):
        return passed("gpu", f"{names}, with bf16", gpus=len(gpus), bf16=True)
    found, remedy = (
        f"{names}: without bf16",
        "A run in bf16 trains in fp16 (from Volta on) or fp32 here, which is slower.",
    )
    return warned("gpu", found, remedy, gpus=len(gpus), bf16=False)


def _check_compiler(has_gpu: bool) -> Finding:
    if not has_gpu:
        return skipped("compiler", "no GPU: models are compiled only on GPUs")
    if not any(map(shutil.which, [*filter(None, [os.environ.get("CC")]), "gcc", "clang"])):
        return warned("compiler", "there is no C compiler: the model is not compiled, which is slower", "Install gcc.")
    return passed("compiler", "torch.compile has a C compiler")


def _check_shm(gpus: int) -> Finding:
    """Check the free space in /dev/shm, which NCCL needs for several GPUs. The project's own shared memory uses no file
    there."""
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
        return warned("heat", f"slowed down by heat: {', '.join(slowed)}", "Give it more air; clean its fans.")
    name, celsius, limit = max(readings, key=lambda reading: reading[1] - reading[2])
    found = f"{name} is at {celsius:.0f} °C"
    if celsius >= limit:
        return warned("heat", f"{found}: hot already", "Give the machine more air; clean its fans.", celsius=celsius)
    return passed("heat", f"{found}, the hottest of {len(readings)}", celsius=celsius)


def _check_power(gpus: Sequence[GpuState]) -> Finding:
    if is_on_battery():
        return warned("power", "this machine is on battery", "Plug it in: training drains a battery fast.")
    slowed = [gpu.name for gpu in gpus if gpu.is_slowed_by_power]
    if slowed:
        return warned("power", f"slowed down by too little power: {', '.join(slowed)}", "Check the power supply.")
    limits = [(gpu, gpu.limit, gpu.default_limit) for gpu in gpus if gpu.limit and gpu.default_limit]
    for gpu, limit, default in limits:
        if limit < LIMITED * default:
            found = f"{gpu.name} is limited to {limit:.0f} of {default:.0f} W"
            return warned("power", found, f"Raise it, unless you set it: nvidia-smi -pl {default:.0f}.", limit=limit)
    if not limits:
        return skipped("power", "not on battery; no GPU reports a power limit")
    return passed("power", ", ".join(f"{gpu.name}: {limit:.0f} of {default:.0f} W" for gpu, limit, default in limits))


def check_kernels() -> Finding:
    """Compare the results of the C kernels' instruction sets, and measure the kernels' speed, in about two seconds."""
    try:
        from opendiloco import kernels

        speeds = kernels.measure_speeds(threads=1)
        chosen, differing = kernels.chosen_kernels(), kernels.differing_sets()
    except Exception as error:  # a broken extension and a wrong DILOCO_KERNELS raise errors of many types
        why = " ".join(str(error).split())
        return failed("kernels", f"the C kernels cannot be used: {why}", "Install diloco-peer again.")
    if differing:
        return failed(
            "kernels",
            f"the kernels {', '.join(differing)} do not give the reference's bits here",
            "Set DILOCO_KERNELS=scalar, and report this with the processor's name: a bug or broken hardware.",
        )
    listed = ", ".join(f"{name} {speed:.1f} GB/s" for name, speed in speeds.items())
    found = f"{chosen}: equal to the reference, bit for bit; {listed}"
    values: dict[str, Value] = {"set": chosen, **speeds}
    if min(speeds.values()) < SLOW_KERNELS:
        return warned("kernels", f"{found}: slow", "Stop other programs; unset DILOCO_KERNELS.", **values)
    return passed("kernels", found, **values)


def check_memory(gpus: Sequence[Gpu] = (), needs: Needs | None = None) -> Finding:
    """Compare the free memory with the needs of a run on these GPUs (empty: on the CPU). Without `needs`, compare it
    with the needs of the smallest run."""
    free = available_memory()
    found, values = f"{in_words(free)} of main memory free", {"free": free}
    if needs is None:
        if free < LITTLE_MEMORY:
            remedy = f"The smallest run takes about 2 GB. {memory_remedy(LITTLE_MEMORY)}"
            return warned("memory", found, remedy, **values)
        return passed("memory", found, **values)
    needed = needs.main_memory if gpus else needs.main_memory_on_cpu
    found, values = f"{found}; the run needs {in_words(needed)}", values | {"needed": needed}
    if free < needed:
        return failed("memory", found, memory_remedy(needed), **values)
    if gpus:
        least, each = min(gpu.free for gpu in gpus), needs.device_memory
        found = f"{found}; each GPU needs {in_words(each)} and activations, and has {in_words(least)} free"
        values |= {"gpu_free": least, "gpu_needed": each}
        if least < each:
            return failed(
                "memory",
                found,
                "Use more or larger GPUs; stop other programs on them; try --optimizer-state host.",
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
        found = f"{found}; checkpoints take {in_words(needs.disk)}, the log some more"
        values |= {"needed": needs.disk}
        if free < needs.disk:
            return warned("disk", found, f"{remedy} Or keep fewer: --keep 1, --moments none.", **values)
    elif free < LITTLE_DISK:
        return warned("disk", found, f"{remedy} Checkpoints take 24 bytes a parameter, and moments 16.", **values)
    return passed("disk", found, **values)


# Readings -------------------------------------------------------------------------------------------------------------
def _gpus_in_use(torch: Torch | None, options: WorkerOptions) -> int:
    """Return the number of GPUs on which `join` would train. If torch was not tested on the GPUs, all GPUs on the
    machine's buses count, or none if torch is built for CPUs only."""
    if torch is None or options.device == "cpu":
        return 0
    cards = len(read_cards().names) if torch.platform else 0
    usable = cards if torch.gpus is None else len(torch.gpus)
    wanted = options.gpus or usable if needs_gpu_count(options) else 1
    return min(wanted, usable)


def _cards_for(options: WorkerOptions) -> Cards:
    return Cards() if options.device == "cpu" else read_cards()


def _free_shm(path: Path = SHM) -> int | None:
    with suppress(OSError):
        return shutil.disk_usage(path).free
    return None


def _free_disk(path: Path) -> int:
    """Return the free bytes on the disk of `path`, after a test write to that folder or its nearest existing parent.
    Raises: OSError if the write fails."""
    folder = path.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder):
        return shutil.disk_usage(folder).free
