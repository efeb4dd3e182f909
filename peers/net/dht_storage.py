"""What a node of hivemind's DHT keeps for others, in a bounded number of bytes."""

from __future__ import annotations

import time
from typing import Any

from peers.net.daemon import HIVEMIND
from peers.net.records import RecordBudget

DHTLocalStorage: Any = HIVEMIND.protocol.DHTLocalStorage
OWN_BYTES = 1 << 20  # for each key that this node has a part in
RECORDS = 256  # under one key: whoever asks for it is sent them all. Of a run's peers a sample is enough
OTHERS_BYTES = 64 << 20  # for everything else together


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]  # hivemind has no types
    """Refuses new records when they would take more memory than there is for them.

    What lies under a `favoured` key has room of its own, which strangers with made-up runs can't fill.
    """

    def __init__(self) -> None:
        super().__init__()
        self._favoured: dict[Any, RecordBudget] = {}
        self._others = RecordBudget(OTHERS_BYTES)

    def favour(self, key: Any) -> None:
        self._favoured.setdefault(key, RecordBudget(OWN_BYTES))

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        if subkey is not None:
            return self.store_subkey(key, subkey, value, expiration_time)
        return self._admits(key, None, value, expiration_time) and super().store(key, value, expiration_time)

    def store_subkey(self, key: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        admitted = self._has_place_under(key, subkey) and self._admits(key, subkey, value, expiration_time)
        return admitted and super().store_subkey(key, subkey, value, expiration_time)

    def _has_place_under(self, key: Any, subkey: Any) -> bool:
        held = self.get(key)
        under = held.value if held is not None and isinstance(held.value, HIVEMIND.protocol.DictionaryDHTValue) else ()
        return len(under) < RECORDS or subkey in under

    def _admits(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        budget = self._favoured.get(key, self._others)
        return budget.admit((key, subkey), len(value), expiration_time, time.time())


def bounded(storage: Any) -> BoundedStorage:
    """A bounded storage with the same records, as far as there is room."""
    copy = BoundedStorage()
    for key, (value, expiration) in list(storage.items()):
        if isinstance(value, HIVEMIND.protocol.DictionaryDHTValue):
            for subkey, (inner, inner_expiration) in list(value.items()):
                copy.store_subkey(key, subkey, inner, inner_expiration)
        else:
            copy.store(key, value, expiration)
    return copy
