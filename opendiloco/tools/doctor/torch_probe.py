"""The torch installation and the GPUs that torch sees. torch is probed in a separate process, so that a driver that
hangs or crashes cannot stop the caller.

`python -m opendiloco.tools.doctor.torch_probe` prints the result as JSON; `installed_torch` reads only files.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from opendiloco.child_processes import child_environment, last_line, module_command
from opendiloco.gpus import first_sentence, usable_gpus

PROBE_SECONDS = 60.0
"""Limit for a probe. On an idle machine, torch's import takes 2, and a GPU's first use a few more."""
PLATFORM = re.compile(r"^(cuda|hip)\b[^=\n]*= *'([^']+)'", re.MULTILINE)
NAMES = {"cuda": "CUDA", "hip": "ROCm"}


@dataclass(frozen=True)
class Gpu:
    """A GPU as torch sees it; `memory` and `free` are in bytes. `error` is the reason why torch cannot compute on the
    GPU; empty if torch can."""

    name: str
    capability: tuple[int, int]
    memory: int
    free: int
    has_bf16: bool
    error: str = ""


@dataclass(frozen=True)
class Torch:
    """The torch installation. `platform` is the GPU platform for which torch was built, such as "CUDA 12.8"; None: CPUs
    only. `gpus` is None if torch was not probed. `error` is torch's message if it sees no GPU or cannot be imported."""

    version: str
    platform: str | None
    gpus: tuple[Gpu, ...] | None = None
    error: str = ""


def installed_torch() -> Torch | None:
    """Return the torch installation, read from its files in milliseconds without an import; None if torch is not
    installed."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        installed = version("torch")
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except (PackageNotFoundError, OSError):
        return None
    found = PLATFORM.search(text)
    return Torch(installed, None if found is None else f"{NAMES[found[1]]} {found[2]}")


def probed_torch(torch: Torch | None) -> Torch | None:
    """Import torch in a separate process, and return the installation with the GPUs that torch sees, or with an error.
    Return None if torch is not installed."""
    if torch is None:
        return None
    command = module_command("opendiloco.tools.doctor.torch_probe")
    try:
        done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return replace(torch, error=f"it did not answer within {PROBE_SECONDS:.0f} s")
    return _answered(torch, done.returncode, done.stdout, done.stderr)


def _answered(torch: Torch, code: int, out: str, err: str) -> Torch:
    """Return the installation with the GPUs in the probe's output `out`, or with an error if the probe failed."""
    try:
        result: dict[str, Any] = json.loads(last_line(out))
        gpus = tuple(Gpu(**(gpu | {"capability": tuple(gpu["capability"])})) for gpu in result["gpus"])
        return replace(torch, gpus=gpus, error=result["error"])
    except (ValueError, LookupError, TypeError):
        why = last_line(err) or f"it ended with status {code}"
        return replace(torch, error=f"{signal.Signals(-code).name} ended it" if code < 0 else why)


def _probe() -> dict[str, object]:
    """Import torch, compute on each GPU, and return the GPUs and torch's error as JSON values."""
    import torch

    count, error = usable_gpus()
    return {"gpus": [asdict(_gpu(torch, number)) for number in range(count)], "error": error}


def _gpu(torch: Any, number: int) -> Gpu:
    device, error, free = torch.device("cuda", number), "", 0
    about = torch.cuda.get_device_properties(device)
    try:
        torch.ones(2, device=device).sum().item()
        free, _ = torch.cuda.mem_get_info(device)
    except RuntimeError as failure:
        error = first_sentence(failure)
    with torch.cuda.device(device):
        has_bf16 = not error and torch.cuda.is_bf16_supported(including_emulation=False)
    return Gpu(about.name, (about.major, about.minor), about.total_memory, free, has_bf16, error)


if __name__ == "__main__":
    print(json.dumps(_probe()))
