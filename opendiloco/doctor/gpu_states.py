"""Heat and power of GPUs, as far as NVIDIA's own tool shows them. What cannot be read is left out."""

from __future__ import annotations

from contextlib import suppress

from opendiloco.doctor.facts import GpuState
from opendiloco.owner import nvidia_smi

QUERY = (
    "name",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "power.default_limit",
    "clocks_throttle_reasons.active",
)
QUERY_SECONDS = 10.0
SLOWED_BY_HEAT, SLOWED_BY_POWER = 0x20 | 0x40, 0x80
"""Bits of NVML's reasons for slower clocks: thermal slowdowns by software and hardware; the power supply's brake."""


def query_gpus() -> tuple[GpuState, ...]:
    """Return what nvidia-smi says of each GPU; nothing without it."""
    return parse_gpus(nvidia_smi.query(QUERY, QUERY_SECONDS))


def parse_gpus(text: str) -> tuple[GpuState, ...]:
    """Return the GPUs of nvidia-smi's table, one a line. Fields that it does not know, such as "[N/A]", are None."""
    found = []
    for name, celsius, watts, limit, default, reasons in nvidia_smi.rows(text, QUERY):
        bits = 0
        with suppress(ValueError):
            bits = int(reasons, 16)
        found.append(
            GpuState(
                name,
                celsius=nvidia_smi.number(celsius),
                watts=nvidia_smi.number(watts),
                limit=nvidia_smi.number(limit),
                default_limit=nvidia_smi.number(default),
                is_slowed_by_heat=bool(bits & SLOWED_BY_HEAT),
                is_slowed_by_power=bool(bits & SLOWED_BY_POWER),
            )
        )
    return tuple(found)
