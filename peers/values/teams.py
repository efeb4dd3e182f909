"""Names of teams, which peers say of themselves."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

TEAM_LENGTH = 32  # characters
_TEAM = r"^([!-~]([ -~]*[!-~])?)?$"

Team = Annotated[str, Field(strict=True, max_length=TEAM_LENGTH, pattern=_TEAM)]
"""Printable ASCII, without spaces at its ends; empty: none."""


def check_team(name: str) -> None:
    """Raises: ValueError unless others can be told this name."""
    if not name or len(name) > TEAM_LENGTH or not re.fullmatch(_TEAM, name):
        raise ValueError(
            f"{name!r} is no name of a team: give 1 to {TEAM_LENGTH} printable ASCII characters, without spaces at its "
            "ends"
        )
