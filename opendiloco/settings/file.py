"""The configuration file: TOML with one key for each setting, checked before anything goes by it."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from opendiloco.errors import SettingsError
from opendiloco.settings.join_settings import FileSettings
from opendiloco.settings.setting import VARIABLE_PREFIX, model_of, settings_of

FILE_VARIABLE = "DILOCO_CONFIG"
OTHER_VARIABLES = frozenset({FILE_VARIABLE, "DILOCO_KERNELS", "DILOCO_PEER_TEST"})
"""Environment variables that are no settings, and are ours."""


def read_settings_file(path: Path | None = None) -> dict[str, Any]:
    """Return what a file says, as TOML has it: each value by its setting's name.

    By default it is the user's own, which need not be there. Raises: SettingsError.
    """
    found = path or default_settings_path()
    try:
        values = tomllib.loads(found.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if path is None:
            return {}
        raise SettingsError(f"there is no configuration file {path}.", "Check the path.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{found}: not valid TOML: {error}.", "Correct the syntax there.") from error
    except OSError as error:
        raise SettingsError(f"{found} cannot be read: {error.strerror}.", "Check its permissions.") from error
    if values:
        _check(values, found)
    return values


def _check(values: Mapping[str, Any], path: Path) -> None:
    """Raises: SettingsError. What this imports takes a moment, and `--help` should not."""
    from pydantic import ValidationError

    from opendiloco.config.section import describe_validation_error

    model = model_of(FileSettings, needs_all=False)
    try:
        model.model_validate_json(json.dumps(values, default=str))  # as JSON, lists are tuples, and texts paths
    except ValidationError as error:
        raise SettingsError(describe_validation_error(str(path), error, model)) from error


def default_settings_path() -> Path:
    """`~/.config/diloco-peer/config.toml`, or where XDG_CONFIG_HOME says."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "diloco-peer" / "config.toml"


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a line about each variable that looks like a setting's and is none's."""
    known = {setting.variable for setting in settings_of(FileSettings)} | OTHER_VARIABLES
    lines = []
    for name in sorted(environment):
        if name.startswith(VARIABLE_PREFIX) and name not in known:
            alike = get_close_matches(name, known, n=1)
            hint = f"; did you mean {alike[0]}?" if alike else "."
            lines.append(f"the environment variable {name} is no setting's{hint}")
    return lines


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a process that goes by its command line alone."""
    settings = {setting.variable for setting in settings_of(FileSettings)}
    return {name: value for name, value in environment.items() if name not in settings} | {FILE_VARIABLE: os.devnull}
