"""Units; and texts for bytes, bandwidths and durations."""

from __future__ import annotations

from typing import Literal, TypeAlias

VALUE_BYTES = 4  # bytes of an fp32 value, the type of weights, moments and averages
MEGABIT, GIGABYTE = 1e6 / 8, 1e9  # bytes
SECONDS_A_DAY = 86_400  # without leap seconds, as computers count
FormatName: TypeAlias = Literal["int8", "uint4", "e2m1-block32", "e2m1", "e3m0", "fp16", "sparse"]
"""The name of a payload format (docs/codecs.md)."""
OptimizerState: TypeAlias = Literal["device", "host", "8bit"]
"""The place of an inner optimizer's moments between two steps: on the device, in main memory, or on the device in 8
bits a value."""
UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def in_words(count: int) -> str:
    """Return a number of bytes with a unit, to three digits."""
    unit, name = next(((size, name) for size, name in UNITS if count >= size), UNITS[-1])
    return f"{float(f'{count / unit:.3g}'):g} {name}"


def bandwidth_in_words(bits_per_second: float) -> str:
    """Return a bandwidth with a unit, to three digits."""
    for factor, unit in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits_per_second >= factor:
            return f"{bits_per_second / factor:.3g} {unit}"
    return f"{bits_per_second / 1e3:.3g} kbit/s"


def days_in_words(days: float) -> str:
    """Return a duration in its largest whole unit, to two digits."""
    for name, length in (("days", 1.0), ("hours", 1 / 24), ("minutes", 1 / 1440)):
        if days >= length:
            count = float(f"{days / length:.2g}")
            return f"{count:g} {name if count != 1 else name.removesuffix('s')}"
    return "less than a minute"


def duration(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours."""
    minutes, hours = seconds / 60, seconds / 3600
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 90 else f"{hours:.1f} h"


def counted(count: int, thing: str) -> str:
    """Return a count of things: "1 round", "2 rounds"."""
    return f"{count} {thing}{'' if count == 1 else 's'}"
