"""Names of teams, which peers say of themselves."""

from __future__ import annotations

import re

TEAM_LENGTH = 32  # characters
TEAM = r"^([!-~]([ -~]*[!-~])?)?$"
"""Printable ASCII, without spaces at its ends; empty: none."""


def check_team(name: str) -> None:
    """Raises: ValueError unless others can be told this name."""
    if not name or len(name) > TEAM_LENGTH or not re.fullmatch(TEAM, name):
        raise ValueError(
            f"{name!r} is no name of a team: give 1 to {TEAM_LENGTH} printable ASCII characters, without spaces at its "
            "ends"
        )
