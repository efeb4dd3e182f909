"""hivemind's searches, ended in the middle: nothing of them is left."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from peers.network.hivemind_lite import load_hivemind

HIVEMIND = load_hivemind()
DHTID = HIVEMIND.protocol.DHTID
NODES = [DHTID.generate(f"node {number}") for number in range(5)]
KEY = DHTID.generate("key")


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Neither tasks nor complaints of asyncio's about tasks that were collected before they had ended."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    before = asyncio.all_tasks()
    yield
    assert asyncio.all_tasks() == before
    gc.collect()
    assert complaints == []


class Swarm:
    """Nodes that are asked for neighbors, and do not answer until they may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.is_asked = asyncio.Event()
        self.is_told = asyncio.Event()
        self.under_way = 0

    async def get_neighbors(self, node: Any, queries: Collection[Any]) -> dict[Any, tuple[tuple[Any, ...], bool]]:
        self.is_asked.set()
        await self._answer()
        return {query: (tuple(NODES), False) for query in queries}

    async def found(self, query: Any, nearest: list[Any], visited: set[Any]) -> None:
        self.is_told.set()
        self.may_answer.clear()
        await self._answer()

    async def _answer(self) -> None:
        self.under_way += 1
        try:
            await self.may_answer.wait()
        finally:
            self.under_way -= 1

    async def search(self, **options: Any) -> Any:
        return await HIVEMIND.node.traverse_dht(
            [KEY],
            NODES[:2],
            beam_size=5,
            num_workers=4,
            queries_per_call=1,
            get_neighbors=self.get_neighbors,
            **options,
        )


async def cancel(searching: asyncio.Task[Any]) -> None:
    searching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await searching


def test_a_search_finds_the_nearest_nodes() -> None:
    async def scenario() -> None:
        swarm = Swarm()
        swarm.may_answer.set()
        with nothing_left_behind():
            nearest, _ = await swarm.search()
            assert set(nearest[KEY]) == set(NODES)

    asyncio.run(scenario())


def test_of_a_search_that_is_cancelled_while_nodes_are_asked_nothing_is_left() -> None:
    async def scenario() -> None:
        swarm = Swarm()
        with nothing_left_behind():
            searching = asyncio.create_task(swarm.search(found_callback=swarm.found))
            await swarm.is_asked.wait()
            await cancel(searching)
            assert not swarm.is_told.is_set(), "it was given up, not finished"
            assert swarm.under_way == 0
            del searching

    asyncio.run(scenario())


def test_of_a_search_that_is_cancelled_while_its_finds_are_told_nothing_is_left() -> None:
    async def scenario() -> None:
        swarm = Swarm()
        swarm.may_answer.set()
        with nothing_left_behind():
            searching = asyncio.create_task(swarm.search(found_callback=swarm.found))
            await swarm.is_told.wait()
            await cancel(searching)
            assert swarm.under_way == 0
            del searching

    asyncio.run(scenario())
