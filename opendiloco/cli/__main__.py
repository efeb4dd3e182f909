"""The entry point `python -m opendiloco.cli`, the same as `diloco-peer`."""

from __future__ import annotations

from opendiloco.cli import main

if __name__ == "__main__":
    main(prog_name="diloco-peer")
