"""transformers without what it does for nothing when only causal language models are built.

With any model it imports the losses of its object detectors, and with them scipy's optimizers: a tenth of the time and
of the memory that a worker takes to start. And it looks through the sources of all its models twice, which takes as
long again. Here scipy comes when such a loss is computed, and what the first look has found serves the second.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

SCIPY = "scipy.optimize"

Structure = dict[frozenset[str], dict[str, set[str]]]
"""The objects of each module, by what must be installed for them."""


class _Later(ModuleType):
    """Stands for a module of functions, each of which imports it when it is called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):  # the import system asks for `__path__`
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

        def call(*arguments: Any, **named: Any) -> Any:
            return getattr(importlib.import_module(self.__name__), name)(*arguments, **named)

        return call


def load_transformers() -> Any:
    """Import transformers and what is common to its models. Returns the package, the same as `import` does."""
    os.environ.setdefault("USE_HUB_KERNELS", "NO")  # some architectures would fetch theirs from the hub by themselves
    package = importlib.import_module("transformers")
    with scanned_once(package):
        importlib.import_module("transformers.models")
    with scipy_comes_later():
        importlib.import_module("transformers.loss.loss_utils")
    return package


@contextmanager
def scanned_once(package: Any) -> Iterator[None]:
    """Meanwhile, `transformers.models` is told of its contents what `transformers` has found out about them."""
    utilities: Any = importlib.import_module("transformers.utils.import_utils")
    scan, folder = utilities.define_import_structure, Path(package.__file__).parent / "models"

    def known(path: str, prefix: str | None = None) -> Structure:
        if prefix is not None or Path(path) != folder / "__init__.py":
            return scan(path, prefix)  # type: ignore[no-any-return]
        found: Structure = scan(folder, prefix="models")  # the same call as that of `transformers`, which is kept
        return {needs: _below("models.", modules) for needs, modules in found.items()}

    utilities.define_import_structure = known
    try:
        yield
    finally:
        utilities.define_import_structure = scan


def _below(prefix: str, modules: dict[str, set[str]]) -> dict[str, set[str]]:
    return {name.removeprefix(prefix): names for name, names in modules.items() if name.startswith(prefix)}


@contextmanager
def scipy_comes_later() -> Iterator[None]:
    """Meanwhile, who imports a function of scipy's optimizers gets one that will import it; unless it is there."""
    if SCIPY in sys.modules:
        yield
        return
    sys.modules[SCIPY] = _Later(SCIPY)
    try:
        yield
    finally:
        del sys.modules[SCIPY]
