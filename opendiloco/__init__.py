"""DiLoCo training over the internet: the Python packages behind the command `diloco-peer`, also usable without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opendiloco.library import DiLoCo

__all__ = ["DiLoCo", "__version__"]


def __getattr__(name: str) -> Any:
    # Public names are imported on first use, because importing torch takes seconds and reading the version
    # milliseconds.
    if name == "DiLoCo":
        from opendiloco.library import DiLoCo

        return DiLoCo
    if name == "__version__":
        from importlib.metadata import version

        return version("diloco-peer")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
