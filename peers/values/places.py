"""Where in the world a machine is, as its owner says it: in whole degrees, which are about a hundred kilometers."""

from __future__ import annotations

from typing import TypeAlias

LATITUDE, LONGITUDE = 90, 180  # degrees at most, to either side

Place: TypeAlias = tuple[int, int]
"""Degrees north and degrees east."""


def parse_place(text: str) -> Place:
    """Return the place that is nearest to what is given in degrees; others are told nothing more precise.

    Raises: ValueError unless it is on the globe.
    """
    try:
        north, east = (float(part) for part in text.split(","))
    except ValueError:
        north = east = float("nan")
    if not (abs(north) <= LATITUDE and abs(east) <= LONGITUDE):
        raise ValueError(
            f"{text!r} is no place: give degrees north and east, with a minus for south and west, as 52,13 or -34,-58"
        )
    return round(north), round(east)


def check_place(text: str) -> None:
    """Raises: ValueError unless others can be told this place."""
    parse_place(text)
