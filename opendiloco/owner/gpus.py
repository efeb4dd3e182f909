"""NVIDIA's GPUs as `nvidia-smi` has them: temperature, power, and the limit of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opendiloco.owner import nvidia_smi

SECONDS = 20.0
COLUMNS = ("index", "uuid", "temperature.gpu", "power.draw", "power.limit")


@dataclass(frozen=True)
class Gpu:
    """One GPU, and what can be read of it. Power is in watts."""

    index: str
    uuid: str
    celsius: float | None = None
    watts: float | None = None
    limit: float | None = None


def look_at_gpus() -> list[Gpu]:
    """Return the GPUs that nvidia-smi sees; none where it is missing or fails."""
    return parse_gpus(nvidia_smi.query(COLUMNS, SECONDS))


def parse_gpus(text: str) -> list[Gpu]:
    """Return what nvidia-smi has said, a GPU a line."""
    rows = nvidia_smi.rows(text, COLUMNS)
    return [Gpu(index, uuid, *map(nvidia_smi.number, cells)) for index, uuid, *cells in rows]


def used_gpus(device: str, gpus: int | None, seen: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """Return which of the GPUs that nvidia-smi has `seen` a volunteer with these settings trains on."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    visible = list(seen) if named is None else _visible(named, seen)
    _, _, number = device.partition(":")
    if number.isdigit():
        return visible[int(number) : int(number) + 1]
    return [] if device == "cpu" else visible[:gpus]


def _visible(named: str, seen: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names by index, or by how their UUID begins, up to the first that is
    not there: so CUDA reads it."""
    found = []
    for name in map(str.strip, named.split(",")):
        gpu = next((one for one in seen if name and (one.index == name or _is_uuid_of(name, one))), None)
        if gpu is None:
            break
        found.append(gpu)
    return found


def _is_uuid_of(name: str, gpu: Gpu) -> bool:
    return name.startswith("GPU-") and gpu.uuid.startswith(name)
