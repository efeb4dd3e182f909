"""DiLoCo training over the internet: the pieces that `diloco-peer` is made of, usable on their own."""

from __future__ import annotations

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    # Reading the installed metadata takes milliseconds that most importers need not pay.
    if name == "__version__":
        from importlib.metadata import version

        return version("diloco-peer")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
