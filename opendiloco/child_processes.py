"""Child processes that run a module of this project, with the same import path as this process in any folder."""

from __future__ import annotations

import os
import sys

NICENESS = 19  # lowest CPU priority, for child processes that prepare or save data beside training


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a process of its own."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a child process: this process's environment with further variables."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables


def last_line(output: str) -> str:
    """Return the last line of a process's output, which reports its result, or an empty string."""
    return output.strip().rpartition("\n")[2].strip()
