"""NVIDIA's own tool, `nvidia-smi`, as it is asked about GPUs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress

PROGRAM = "nvidia-smi"


def ask(*arguments: str, seconds: float) -> str:
    """Return what the tool prints. Raises: OSError, subprocess.SubprocessError."""
    command = [PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds).stdout


def query(columns: Sequence[str], seconds: float) -> str:
    """Return the tool's table of these columns; an empty one where the tool is missing or fails."""
    if shutil.which(PROGRAM) is not None:
        with suppress(OSError, subprocess.SubprocessError):
            return ask(f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits", seconds=seconds)
    return ""


def rows(text: str, columns: Sequence[str]) -> list[list[str]]:
    """Return the cells of such a table, a GPU a row. Lines that have not all columns are left out."""
    found = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [cells for cells in found if len(cells) == len(columns)]


def number(cell: str) -> float | None:
    """Return a cell's number; None where the tool does not know it, and says "[N/A]"."""
    with suppress(ValueError):
        return float(cell)
    return None
