"""Which processes another one has started."""

from __future__ import annotations

import os
from pathlib import Path


def child_processes(parent: int | None = None) -> dict[int, str]:
    """Names by process id of the direct children of `parent`, or of this process.

    Asked child by child who its parent is: `/proc/PID/task/*/children` loses those of a thread that is just ending.
    """
    parent = os.getpid() if parent is None else parent
    children = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (process / "stat").read_text().partition("(")[2].rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        if int(rest.split()[1]) == parent:
            children[int(process.name)] = name
    return children
