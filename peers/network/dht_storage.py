"""What a node of hivemind's DHT keeps for others, in a bounded number of bytes."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

from peers.network.daemon import HIVEMIND
from peers.network.records import RECORD_OVERHEAD, SLACK, RecordBudget
from peers.presence.heartbeat import SIZE_LIMIT

DHTLocalStorage: Any = HIVEMIND.protocol.DHTLocalStorage
RECORDS = 256  # under one key: whoever asks for it is sent them all. Of a run's peers a sample is enough
OWN_BYTES = RECORDS * (SIZE_LIMIT + RECORD_OVERHEAD)  # for each key that this node has a part in
OTHERS_BYTES = 64 << 20  # for everything else together


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]  # hivemind has no types
    """Refuses new records when they would take more memory than there is for them.

    What lies under a `favoured` key has room of its own, which strangers with made-up runs can't fill. Where one key
    has all the records that it may, a new one replaces another, so that nobody keeps all others out by coming first:
    one of the half that was there for the shorter time, drawn by chance. The other half stays, as do those of the peers
    that the run's manifest names, for as long as they are renewed in time: whoever floods a key came later.
    """

    def __init__(self, chance: random.Random | None = None) -> None:
        super().__init__()
        self._chance = chance or random.Random()
        self._favoured: dict[Any, RecordBudget] = {}
        self._others = RecordBudget(OTHERS_BYTES)
        self._named: dict[Any, frozenset[Any]] = {}
        self._orders: WeakKeyDictionary[Any, dict[Any, None]] = WeakKeyDictionary()
        """The order in which the subkeys under a key came, by what hivemind keeps the records in."""

    def favour(self, key: Any) -> None:
        self._favoured.setdefault(key, RecordBudget(OWN_BYTES))

    def disfavour(self, key: Any) -> None:
        """Give a key no more room than all others: what lies there stays until it expires."""
        self._favoured.pop(key, None)

    def name(self, key: Any, subkeys: Collection[Any]) -> None:
        """Never replace the records of these under a key; of none: of nobody any more."""
        if subkeys:
            self._named[key] = frozenset(subkeys)
        else:
            self._named.pop(key, None)

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        if subkey is not None:
            return self.store_subkey(key, subkey, value, expiration_time)
        budget = self._budget(key)
        is_admitted = budget.admit((key, None), len(value), expiration_time, time.time())
        return is_admitted and super().store(key, value, expiration_time)

    def store_subkey(self, key: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        under = self._under(key)
        is_new = subkey not in under
        leaving = self._leaving(key, under) if is_new and len(under) >= RECORDS else None
        instead_of = None if leaving is None else (key, leaving)
        if not self._budget(key).admit((key, subkey), len(value), expiration_time, time.time(), instead_of):
            return False
        if leaving is not None:
            del under[leaving], self._orders[under][leaving]
            _forget_what_was_replaced(under)
        is_stored: bool = super().store_subkey(key, subkey, value, expiration_time)
        if is_new and is_stored:
            order = self._order(self._under(key))
            order.pop(subkey, None)  # it was here before, and away since
            order[subkey] = None
        return is_stored

    def _under(self, key: Any) -> Any:
        """Return what lies under a key, by subkey."""
        held = self.get(key)
        is_dictionary = held is not None and isinstance(held.value, HIVEMIND.protocol.DictionaryDHTValue)
        return held.value if is_dictionary else {}

    def _leaving(self, key: Any, under: Any) -> Any:
        """Return whose record a new one replaces."""
        named = self._named.get(key, frozenset())
        return self._chance.choice([one for one in list(self._order(under))[RECORDS // 2 :] if one not in named])

    def _order(self, under: Any) -> dict[Any, None]:
        order = self._orders.setdefault(under, {})
        if len(order) > len(under):
            for gone in [subkey for subkey in order if subkey not in under]:
                del order[gone]
        return order

    def _budget(self, key: Any) -> RecordBudget:
        return self._favoured.get(key, self._others)


def _forget_what_was_replaced(under: Any) -> None:
    """hivemind would keep a heap entry of each record until it had expired."""
    if len(under.expiration_heap) > 2 * len(under.key_to_heap) + SLACK:
        under.expiration_heap[:] = under.key_to_heap.values()
        heapq.heapify(under.expiration_heap)


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
