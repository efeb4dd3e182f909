"""The command line `diloco-peer`. Each module defines some commands, which import heavy packages only when they run, so
that `--help` never waits for torch, hivemind or pydantic."""

from __future__ import annotations

from opendiloco.cli.group import main

__all__ = ["main"]
