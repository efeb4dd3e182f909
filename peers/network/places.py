"""How much is given away at once: in all, and to one peer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from peers.network.channel import RefusalError

WAIT = 20.0  # seconds that a peer may wait for a place
FEW = 2  # places of a peer while they are scarce: one, and one that it has given up, whose end is not seen here yet
LONGEST = 600.0  # seconds for which one may be held: no reader waits longer for what it has asked for


class Places:
    """`count` in all, `each` for one peer; but only a `FEW` while less than half are free: a slow one may hold its
    places for long, and few such would have them all."""

    def __init__(self, count: int, each: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._count = count
        self._each = each
        self._taken: Counter[str] = Counter()

    @asynccontextmanager
    async def one_for(self, peer: str) -> AsyncIterator[None]:
        """Raises: RefusalError when there is none for long, or the peer has its share; TimeoutError when it is held for
        too long.
        """
        is_scarce = 2 * (self._count - self._taken.total()) < self._count
        if self._taken[peer] >= (min(FEW, self._each) if is_scarce else self._each):
            raise RefusalError("other parts are on their way to you")
        self._taken[peer] += 1
        try:
            try:
                async with asyncio.timeout(WAIT):
                    await self._free.acquire()
            except TimeoutError:
                raise RefusalError("too many fetch from here now") from None
            try:
                async with asyncio.timeout(LONGEST):
                    yield
            finally:
                self._free.release()
        finally:
            self._taken[peer] -= 1
            if not self._taken[peer]:
                del self._taken[peer]
