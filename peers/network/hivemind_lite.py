"""hivemind's DHT node and libp2p client, imported without torch.

`import hivemind` runs package `__init__` modules that import its averager, mixture of experts and optimizer, and with
them torch. That costs seconds of start-up and hundreds of megabytes in a bootstrap node or a peer process, which
compute nothing. But `hivemind.dht.node` and `hivemind.p2p` themselves need no torch. So the three packages with a heavy
`__init__` are entered into `sys.modules` without running it: submodules are found through their `__path__`. The first
use of a missing name (`hivemind.Optimizer`) runs the real `__init__`, in the same module object. Other code can
`import hivemind` as usual, before or after, and shares every class with us.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from importlib.util import find_spec, module_from_spec
from multiprocessing import Lock
from types import ModuleType
from typing import Any, NamedTuple

from peers.errors import LocalNetworkError
from peers.values.system import cancel_and_wait, start_task

HEAVY_PACKAGES = ("hivemind", "hivemind.utils", "hivemind.dht")
# Names that hivemind's torch-free modules import from hivemind.utils, by the submodule that defines them.
UTILITIES = {
    "hivemind.utils.logging": ("get_logger",),
    "hivemind.utils.serializer": ("MSGPackSerializer", "SerializerBase"),
    "hivemind.utils.timed_storage": ("get_dht_time",),
}


class _Hivemind(NamedTuple):
    node: Any  # module hivemind.dht.node
    protocol: Any  # module hivemind.dht.protocol
    validation: Any  # module hivemind.dht.validation
    p2p: Any  # package hivemind.p2p
    multiaddr: Any  # module hivemind.utils.multiaddr


class _DeferredPackage(ModuleType):
    """A package whose `__init__` module runs at the first access to a name that is not defined yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":  # the import system and inspect ask for many such names
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        submodule = sys.modules.get(f"{self.__name__}.{name}")
        if submodule is not None:  # the submodule is being imported, and not yet an attribute of the package
            return submodule
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__class__ = ModuleType  # type: ignore[assignment]  # no second run while the first is under way
        try:
            self.__spec__.loader.exec_module(self)
        except BaseException:
            self.__class__ = _DeferredPackage
            raise
        return getattr(self, name)


def load_hivemind() -> _Hivemind:
    """Import hivemind's modules without torch, and return them. hivemind's log messages go through standard `logging`.

    Raises: LocalNetworkError when hivemind cannot create the lock that it creates on import.
    """
    try:
        Lock()
    except (OSError, ImportError) as error:
        raise LocalNetworkError(
            f"/dev/shm cannot be used ({getattr(error, 'strerror', None) or error}), where hivemind creates a lock.",
            "Mount it: `mount -t tmpfs tmpfs /dev/shm`; a container has one of its own unless its options forbid that.",
        ) from error
    if "hivemind" not in sys.modules:
        for name in HEAVY_PACKAGES:
            _enter_deferred(name)
        for module, names in UTILITIES.items():
            for name in names:
                setattr(sys.modules["hivemind.utils"], name, getattr(importlib.import_module(module), name))
    _quiet_hivemind()
    node, traverse = importlib.import_module("hivemind.dht.node"), importlib.import_module("hivemind.dht.traverse")
    node.traverse_dht = _ending_when_cancelled(traverse.traverse_dht)  # type: ignore[attr-defined]
    return _Hivemind(
        node,
        importlib.import_module("hivemind.dht.protocol"),
        importlib.import_module("hivemind.dht.validation"),
        importlib.import_module("hivemind.p2p"),
        importlib.import_module("hivemind.utils.multiaddr"),
    )


def _quiet_hivemind() -> None:
    """Remove hivemind's own log handler, which writes to stderr. Its warnings and errors go to the root logger."""
    importlib.import_module("hivemind.utils.logging").use_hivemind_log_handler("nowhere")
    logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames the level to WARN for the whole process
    logging.getLogger("hivemind").setLevel(logging.WARNING)


def _enter_deferred(name: str) -> None:
    spec = find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    package = module_from_spec(spec)
    package.__class__ = _DeferredPackage
    sys.modules[name] = package
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, package)


def _ending_when_cancelled(traverse: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Awaitable[Any]]:
    """Return hivemind's `traverse_dht` as a function that ends its requests to other nodes when it is cancelled.

    hivemind leaves its requests to other nodes under way. Here they end, and the search finishes with its results so
    far.
    """

    async def search(*arguments: Any, get_neighbors: Any, found_callback: Any = None, **options: Any) -> Any:
        is_over = asyncio.Event()

        async def unless_over(work: Callable[..., Coroutine[Any, Any, Any]], *details: Any) -> Any:
            """Return the result of `work`, a request to a node; None if the search ends first."""
            if is_over.is_set():
                return None
            request, end = start_task(work(*details)), start_task(is_over.wait())
            try:
                await asyncio.wait((request, end), return_when=asyncio.FIRST_COMPLETED)
                return None if is_over.is_set() else request.result()
            finally:
                await cancel_and_wait(request, end)

        async def ask(node: Any, queries: Collection[Any]) -> dict[Any, tuple[tuple[Any, ...], bool]]:
            """Return, for each searched DHT key in `queries`, the neighbours that `node` knows, and True if the search
            for this key may end."""
            return await unless_over(get_neighbors, node, queries) or dict.fromkeys(queries, ((), True))

        tell = found_callback and partial(unless_over, found_callback)
        searching = start_task(traverse(*arguments, get_neighbors=ask, found_callback=tell, **options))
        try:
            return await asyncio.shield(searching)
        except asyncio.CancelledError:
            is_over.set()
            await asyncio.gather(searching, return_exceptions=True)
            raise

    return search
