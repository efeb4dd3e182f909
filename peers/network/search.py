"""A search of hivemind's DHT that leaves no task behind when it is cancelled.

hivemind's `traverse_dht` cancels its workers then, and forgets the tasks with which they wait for the end of the
search: that end never comes, and Python complains of each when it collects it. So the search is not cancelled here, but
ended: what it asks of other nodes is, and it hears that nothing more is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any


def ending_when_cancelled(traverse: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Awaitable[Any]]:
    """Return hivemind's `traverse_dht` as a function whose cancellation ends all that it began."""

    async def search(*arguments: Any, **options: Any) -> Any:
        return await _Search(options.pop("get_neighbors"), options.pop("found_callback", None)).run(
            traverse, *arguments, **options
        )

    return search


class _Search:
    """One search, and the requests to other nodes that it waits for."""

    def __init__(
        self, get_neighbors: Callable[..., Awaitable[Any]], found: Callable[..., Awaitable[Any]] | None
    ) -> None:
        self._get_neighbors = get_neighbors
        self._found = found
        self._requests: set[asyncio.Future[Any]] = set()
        self._is_ended = False

    async def run(self, traverse: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any, **options: Any) -> Any:
        callbacks = {"get_neighbors": self._ask, "found_callback": self._found and self._tell}
        searching = asyncio.create_task(traverse(*arguments, **callbacks, **options))
        try:
            return await asyncio.shield(searching)
        except asyncio.CancelledError:
            self._is_ended = True
            for request in self._requests:
                request.cancel()
            await asyncio.wait([searching])
            with suppress(asyncio.CancelledError):
                searching.exception()  # nobody wants to hear of it
            raise

    async def _ask(self, node: Any, queries: Collection[Any]) -> dict[Any, tuple[tuple[Any, ...], bool]]:
        """The neighbors that a node knows for each query, and whether the search for that is over."""
        answer: dict[Any, tuple[tuple[Any, ...], bool]] | None = None
        if not self._is_ended:
            answer = await self._unless_ended(self._get_neighbors(node, queries))
        return dict.fromkeys(queries, ((), True)) if answer is None else answer

    async def _tell(self, *found: Any) -> None:
        assert self._found is not None
        if not self._is_ended:
            await self._unless_ended(self._found(*found))

    async def _unless_ended(self, work: Awaitable[Any]) -> Any:
        """What comes of it; None when the search has been ended meanwhile."""
        request = asyncio.ensure_future(work)
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)
        try:
            await asyncio.wait([request])
        except asyncio.CancelledError:
            request.cancel()
            raise
        if self._is_ended:
            with suppress(asyncio.CancelledError):
                request.exception()
            return None
        return request.result()
