"""The command `diloco-peer`. Commands live in modules of their own, which import what they need when they run, so that
`--help` never waits for torch, hivemind or pydantic."""

from __future__ import annotations

from opendiloco.cli.group import main

__all__ = ["main"]
