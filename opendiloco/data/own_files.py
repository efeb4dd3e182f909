"""What a machine's owner names of this machine for a run whose model or tokenizer is local."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class OwnFiles:
    """The model's folder, and the tokenizer's folder or file; None where the owner names none."""

    model: Path | None = None
    tokenizer: Path | None = None


NONE = OwnFiles()
