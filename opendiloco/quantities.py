"""Units of quantities, and functions that return bytes, bandwidths and durations as texts."""

from __future__ import annotations

from typing import Literal, TypeAlias

VALUE_BYTES = 4  # bytes of an fp32 value, the type of weights, moments and averages
MEGABIT, GIGABYTE = 1e6 / 8, 1e9  # bytes in a megabit and in a gigabyte
SECONDS_A_DAY = 86_400  # seconds of a day without leap seconds
FormatName: TypeAlias = Literal["int8", "uint4", "e2m1-block32", "e2m1", "e3m0", "fp16", "sparse"]
"""The name of a payload format (docs/codecs.md)."""
OptimizerState: TypeAlias = Literal["device", "host", "8bit"]
"""The place of an inner optimizer's moments between two steps: on the device, in main memory, or on the device in 8
bits a value."""
UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def in_words(count: int) -> str:
    """Return a number of bytes as a text with a unit and three significant digits, such as "1.25 GB"."""
    unit, name = next(((size, name) for size, name in UNITS if count >= size), UNITS[-1])
    return f"{float(f'{count / unit:.3g}'):g} {name}"


def bandwidth_in_words(bits_per_second: float) -> str:
    """Return a bandwidth as a text with a unit and three significant digits, such as "12.5 Mbit/s"."""
    for factor, unit in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits_per_second >= factor:
            return f"{bits_per_second / factor:.3g} {unit}"
    return f"{bits_per_second / 1e3:.3g} kbit/s"


def days_in_words(days: float) -> str:
    """Return a number of days as a text in days, hours or minutes with two significant digits, such as "1.5 hours"."""
    for name, length in (("days", 1.0), ("hours", 1 / 24), ("minutes", 1 / 1440)):
        if days >= length:
            count = float(f"{days / length:.2g}")
            return f"{count:g} {name if count != 1 else name.removesuffix('s')}"
    return "less than a minute"


def duration(seconds: float) -> str:
    """Return a duration as a text in seconds, minutes or hours, such as "45 s"."""
    minutes, hours = seconds / 60, seconds / 3600
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 90 else f"{hours:.1f} h"


def counted(count: int, thing: str) -> str:
    """Return a count with its noun in the singular or plural, such as "1 round" or "2 rounds"."""
    return f"{count} {thing}{'' if count == 1 else 's'}"
