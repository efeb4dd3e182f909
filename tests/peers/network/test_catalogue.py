"""The list of runs that a bootstrap node tells: a page at a time, checked by whoever asked."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peers.errors import SwarmUnreachableError
from peers.network.bootstrap import LIST_RUNS, PAGE, RUNS_LIMIT, _BootstrapNode, listed_runs
from peers.network.channel import PeerUnreachableError, RefusalError
from peers.network.known_runs import KnownRuns
from peers.network.transport import HivemindTransport
from peers.values.identity import Identity

RUNS = [f"run{number}-{'a' * 32}" for number in range(2 * PAGE + 3)]
ONE, TWO = (f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}" for _ in range(2))


class Node:
    """Answers as a bootstrap node with these runs does. Another address than `ONE` is nobody's."""

    def __init__(self, runs: list[str]) -> None:
        store: Any = SimpleNamespace(run_ids=lambda: runs)
        transport: Any = SimpleNamespace(runs=KnownRuns())
        self.node = _BootstrapNode(transport, store, {})

    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
        if peer_id not in ONE:
            raise PeerUnreachableError(peer_id, "nobody is there")
        assert name == LIST_RUNS
        return await self.node.on_list("12D3KooWasker", payload)


def listed(node: Node, addresses: list[str], limit: int = RUNS_LIMIT) -> list[str]:
    return asyncio.run(listed_runs(cast(HivemindTransport, node), addresses, limit))


@pytest.mark.parametrize(("limit", "count"), [(1000, len(RUNS)), (PAGE + 1, PAGE + 1), (3, 3)])
def test_pages_are_put_together(limit: int, count: int) -> None:
    assert listed(Node(RUNS), [TWO, ONE], limit) == RUNS[:count]


def test_there_may_be_none() -> None:
    assert listed(Node([]), [ONE]) == []


def test_nobody_who_lists_runs_is_an_error() -> None:
    with pytest.raises(SwarmUnreachableError, match="no node at the given addresses lists runs"):
        listed(Node(RUNS), [TWO])


@pytest.mark.parametrize("answered", [["no run id"], ["run1-" + "a" * 32 + "\x1b[31m"]])
def test_a_malformed_list_is_nobodys(answered: list[str]) -> None:
    with pytest.raises(SwarmUnreachableError, match="malformed"):
        listed(Node(answered), [ONE])


@pytest.mark.parametrize("payload", [b"", b"-1", b"x", b"1" * 7])
def test_a_malformed_question_is_refused(payload: bytes) -> None:
    with pytest.raises(RefusalError):
        asyncio.run(Node(RUNS).call(ONE.rpartition("/")[2], LIST_RUNS, payload, 1.0))
