"""Checks of the machine itself. Each takes facts, and returns what they mean."""

from __future__ import annotations

import sys

from opendiloco.doctor.facts import Cards, Folder, Gpu, Kernels, Machine, Taken, Torch
from opendiloco.doctor.findings import Finding, Value, failed, passed, skipped, warned
from opendiloco.owner.sensors import GpuState, Sensor
from opendiloco.quantities import in_words
from opendiloco.workers.options import WorkerOptions, needs_gpu_count

LEAST_PYTHON = (3, 11)
LITTLE_MEMORY = 2 * 10**9
"""Bytes: Python's libraries, the peer process and a small model."""
FULL_DISK, LITTLE_DISK = 10**8, 5 * 10**9
LEAST_SHM, LITTLE_SHM = 64 << 20, 1 << 30
"""Bytes that NCCL wants in /dev/shm for GPUs of one machine: with less than Docker's 64 MiB it fails."""
HOT, HOT_GPU, NEARLY = 95.0, 87.0, 5.0
"""Degrees Celsius: of a sensor that names no limit of its own, of a GPU, and below a limit."""
SLOW_KERNELS = 0.5
"""GB/s of the slowest operation. A billion parameters would take half a minute of each outer step."""
LIMITED = 0.6
"""Share of a GPU's usual power below which it is said that it is limited."""
INSTALL_TORCH = "Install a build of torch for this GPU (pytorch.org says how), into the environment of diloco-peer."


def check_python(version: str, cores: int) -> Finding:
    found = f"Python {version}, {cores} core{'s' * (cores != 1)} to train on"
    if tuple(map(int, version.split(".")[:2])) < LEAST_PYTHON:
        wanted = ".".join(map(str, LEAST_PYTHON))
        return failed("python", found, f"Install Python {wanted} or newer.", version=version, cores=cores)
    return passed("python", found, version=version, cores=cores)


def check_torch(torch: Torch | None, cards: Cards) -> Finding:
    """Whether torch is there, and was built for the GPUs that are."""
    if torch is None:
        return failed("torch", "torch is not installed", "pip install diloco-peer into this environment again.")
    values = {"version": torch.version, "platform": torch.platform}
    if torch.error and torch.gpus is None:
        return failed("torch", f"torch {torch.version} cannot be imported: {torch.error}", "Install torch again.")
    found = f"torch {torch.version}, built for {torch.platform or 'CPUs alone'}"
    if torch.platform is None and cards.names:
        found = f"{found}, but this machine has a GPU: {', '.join(cards.names)}"
        return warned("torch", found, f"It would train on the CPU. {INSTALL_TORCH}", **values)
    return passed("torch", found, **values)


def check_gpu(torch: Torch | None, cards: Cards, device: str = "auto") -> Finding:
    """Whether torch can compute on this machine's GPUs. `device` is what the owner wants to train on."""
    there = ", ".join(cards.names)
    if torch is None:
        return skipped("gpu", "torch is not there to ask")
    if torch.gpus:
        broken = [gpu for gpu in torch.gpus if gpu.error]
        if broken and device != "cpu":
            found = "; ".join(f"torch cannot compute on {gpu.name}: {gpu.error}" for gpu in broken)
            return failed("gpu", found, f"{INSTALL_TORCH} Or train on the CPU: --device cpu.", gpus=len(torch.gpus))
        return _about_gpus(torch.gpus)
    wants_gpu = device.startswith("cuda")
    if torch.gpus is None:  # nobody has asked torch
        return skipped("gpu", f"not asked; on this machine: {there or 'none'}")
    if not there:
        return (
            failed("gpu", f"there is no GPU for --device {device}", "Train on the CPU: --device cpu.", gpus=0)
            if wants_gpu
            else passed("gpu", "no GPU here: it trains on the CPU", gpus=0)
        )
    if cards.driver is None:
        found = f"{there} is here, but no driver of it can be seen"
        remedy = "Install NVIDIA's driver; start a container with --gpus all."
    else:
        found = f"{there} is here with driver {cards.driver}, but torch sees none" + (
            f": {torch.error}" if torch.error else ""
        )
        remedy = f"Update the driver, or: {INSTALL_TORCH}" if torch.platform else INSTALL_TORCH
    return (failed if wants_gpu else warned)("gpu", found, remedy, gpus=0)


def _about_gpus(gpus: tuple[Gpu, ...]) -> Finding:
    names = ", ".join(f"{gpu.name} ({in_words(gpu.memory)}, {'.'.join(map(str, gpu.capability))})" for gpu in gpus)
    without = [gpu.name for gpu in gpus if not gpu.has_bf16]
    has_bf16 = not without
    if without:
        found, remedy = f"{names}: without bf16", "Runs in bf16 are computed in fp32 here, which takes longer."
        return warned("gpu", found, remedy, gpus=len(gpus), bf16=has_bf16)
    return passed("gpu", f"{names}, with bf16", gpus=len(gpus), bf16=has_bf16)


def check_compiler(has_compiler: bool, has_gpu: bool) -> Finding:
    if not has_gpu:
        return skipped("compiler", "no GPU: models are compiled only on GPUs")
    if not has_compiler:
        return warned("compiler", "there is no C compiler: the model is not compiled, which is slower", "Install gcc.")
    return passed("compiler", "a C compiler is there for torch.compile")


def check_kernels(kernels: Kernels) -> Finding:
    if kernels.error:
        return failed("kernels", f"the C kernels cannot be used: {kernels.error}", "Install diloco-peer again.")
    if kernels.differing:
        return failed(
            "kernels",
            f"the kernels {', '.join(kernels.differing)} do not give the reference's bits here",
            "Set DILOCO_KERNELS=scalar, and report this with the processor's name: it is a bug, or broken hardware.",
        )
    speeds = ", ".join(f"{name} {speed:.1f} GB/s" for name, speed in kernels.speeds.items())
    found = f"{kernels.chosen}: right to the bit; {speeds}"
    values: dict[str, Value] = {"set": kernels.chosen, **kernels.speeds}
    if kernels.speeds and min(kernels.speeds.values()) < SLOW_KERNELS:
        return warned("kernels", f"{found}: slow", "Stop other programs; unset DILOCO_KERNELS.", **values)
    return passed("kernels", found, **values)


def check_shm(free: int | None, gpus: int) -> Finding:
    """Only several GPUs of one machine need /dev/shm: NCCL's. Ours is memory without a name."""
    found = "there is no /dev/shm" if free is None else f"{in_words(free)} free in /dev/shm"
    if gpus < 2:
        return passed("shm", f"{found}; only several GPUs need it", free=free)
    remedy = "Make it larger: `mount -o remount,size=4G /dev/shm`; in a container, --shm-size 4g."
    if free is None or free < LEAST_SHM:
        return failed("shm", f"{found}: too little for {gpus} GPUs", remedy, free=free)
    if free < LITTLE_SHM:
        return warned("shm", f"{found}: little for {gpus} GPUs", remedy, free=free)
    return passed("shm", found, free=free)


def check_memory(free: int, gpus: tuple[Gpu, ...] = (), taken: Taken | None = None) -> Finding:
    """Free memory against what a run takes; without a run, against what the smallest would."""
    found, values = f"{in_words(free)} of main memory free", {"free": free}
    if taken is None:
        if free < LITTLE_MEMORY:
            return warned("memory", found, "Stop other programs: the smallest run takes about 2 GB.", **values)
        return passed("memory", found, **values)
    found, values = f"{found}; the run takes {in_words(taken.memory)}", values | {"needed": taken.memory}
    if free < taken.memory:
        return failed("memory", found, "Stop other programs, or use a machine with more memory.", **values)
    used = gpus[: taken.gpus]
    if taken.gpu is not None and used:
        least = min(gpu.free for gpu in used)
        found = f"{found}; of each GPU {in_words(taken.gpu)} and activations, of {in_words(least)} that are free"
        values |= {"gpu_free": least, "gpu_needed": taken.gpu}
        if least < taken.gpu:
            return failed("memory", found, "Use more GPUs, or larger ones; end what else uses them.", **values)
    return passed("memory", found, **values)


def check_disk(folder: Folder, taken: Taken | None = None) -> Finding:
    where, remedy = f"{folder.path}", "Name a folder on a disk with space with --state."
    if folder.error:
        return failed("disk", f"{where} cannot be written to: {folder.error}", remedy)
    found, values = f"{in_words(folder.free)} free for {where}", {"free": folder.free}
    if folder.free < FULL_DISK:
        return failed("disk", found, remedy, **values)
    if taken is not None:
        found, values = (
            f"{found}; checkpoints take {in_words(taken.disk)}, and the log",
            values | {"needed": taken.disk},
        )
        if folder.free < taken.disk:
            return warned("disk", found, f"{remedy} Or keep fewer: --keep 1, --moments none.", **values)
    elif folder.free < LITTLE_DISK:
        return warned("disk", found, f"{remedy} Checkpoints take 24 bytes a parameter, and moments 16.", **values)
    return passed("disk", found, **values)


def check_heat(sensors: tuple[Sensor, ...], gpus: tuple[GpuState, ...]) -> Finding:
    readings = [(sensor.name, sensor.celsius, (sensor.critical or HOT + NEARLY) - NEARLY) for sensor in sensors]
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


def check_power(is_on_battery: bool, gpus: tuple[GpuState, ...]) -> Finding:
    if is_on_battery:
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


def machine_findings(machine: Machine, options: WorkerOptions) -> list[Finding]:
    """Return what the checks find that need no kernels, no network and no run."""
    gpus = gpus_in_use(machine, options)
    cards = machine.cards if options.device != "cpu" else Cards()  # whoever wants the CPU need not hear of GPUs
    return [
        check_python(machine.python, machine.cores),
        check_torch(machine.torch, cards),
        check_gpu(machine.torch, cards, options.device),
        check_compiler(machine.has_compiler, gpus > 0),
        check_shm(machine.shm, gpus),
        check_heat(machine.sensors, machine.gpu_states),
        check_power(machine.is_on_battery, machine.gpu_states),
    ]


def gpus_in_use(machine: Machine, options: WorkerOptions) -> int:
    """Return how many GPUs would train. Where torch was not asked, those on the buses count, if it is built for any."""
    torch = machine.torch
    if torch is None or options.device == "cpu":
        return 0
    seen = len(machine.cards.names) if torch.platform else 0
    there = seen if torch.gpus is None else len(torch.gpus)
    wanted = options.gpus or there if needs_gpu_count(options) else 1
    return min(wanted, there)


def python_version() -> str:
    return ".".join(map(str, sys.version_info[:3]))
