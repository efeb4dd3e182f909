"""How much memory tensors take while something runs: on GPUs the allocator knows; on the CPU each tensor is noticed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opendiloco.inner.device_facts import forget_peak_memory, peak_memory


def peak_while(work: Callable[[], None], device: torch.device) -> int:
    """The most bytes of this device that tensors made by `work` take at any time."""
    if device.type == "cuda":
        forget_peak_memory(device)
        before: int = torch.cuda.memory_allocated(device)
        work()
        return peak_memory(device) - before
    noticed = _Noticing()
    with noticed:
        work()
    return noticed.peak


class _Noticing(TorchDispatchMode):
    """Sees what each operation returns. What an operation takes for itself alone is not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._present = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        inputs = [one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        result = operation(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in inputs:
                self._notice(one.untyped_storage())
        return result

    def _notice(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._forget(key, size))
            self._present += size
            self.peak = max(self.peak, self._present)

    def _forget(self, key: int, size: int) -> None:
        del self._storages[key]
        self._present -= size
