"""`python -m opendiloco.cli` is `diloco-peer`."""

from __future__ import annotations

from opendiloco.cli import main

if __name__ == "__main__":
    main(prog_name="diloco-peer")
