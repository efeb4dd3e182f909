"""Child processes that run a module of ours, with the modules that are here, from whatever folder this was started."""

from __future__ import annotations

import os
import sys

NICENESS = 19  # of those that prepare or save something: the lowest priority, since training comes first


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a process of its own."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(**variables: str) -> dict[str, str]:
    """Return the environment for it: that of this process, with further variables."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables


def last_line(output: str) -> str:
    """Return the last line of what a process has printed, or nothing: where it says how its job went."""
    return output.strip().rpartition("\n")[2].strip()
