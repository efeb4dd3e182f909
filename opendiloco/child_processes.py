"""The start of child processes that run a module of this project with this process's import path."""

from __future__ import annotations

import os
import sys

NICENESS = 19  # nice value of child processes that prepare or save data beside training: the lowest CPU priority


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with `arguments` in a new Python process."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(**variables: str) -> dict[str, str]:
    """Return the environment for a child process: this process's environment and import path, and `variables`."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables


def last_line(output: str) -> str:
    """Return the last line of a child process's output, which reports its result, or an empty string if there is no
    output."""
    return output.strip().rpartition("\n")[2].strip()
