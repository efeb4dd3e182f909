"""The nodes that introduce us: each address is asked by itself, and none can crowd out another for long."""

from __future__ import annotations

import asyncio
from typing import Any

from peers.errors import RemoteProtocolError
from peers.network.channel import PeerUnreachableError
from peers.network.data_port import LinkInfo
from peers.network.introductions import KNOWN, Arranging


class Nodes:
    """Answers for all nodes; keeps who was asked. None can be dialled."""

    me, port = "us", 0

    def __init__(self) -> None:
        self.ports: dict[str, int] = {}
        self.asked: list[str] = []
        self.error: Exception | None = None

    async def ask(self, peer: str, address: str) -> LinkInfo:
        self.asked.append(address)
        if self.error:
            raise self.error
        return LinkInfo(port=self.ports.get(peer, 7))

    def is_up(self, peer: str) -> bool:
        return False

    def way(self, peer: str) -> Nodes:
        return self

    async def dial_first(self, contact: object) -> None: ...


def arranging(nodes: Nodes) -> Arranging:
    links: Any = nodes
    return Arranging(links, nodes.ask)


def test_a_node_is_asked_once() -> None:
    async def scenario() -> None:
        nodes = Nodes()
        relays = arranging(nodes)
        for _ in range(3):
            relay = await relays._find("/ip4/1.2.3.4/tcp/5/p2p/node/")
            assert relay is not None
            assert (relay.peer, relay.endpoint) == ("node", "1.2.3.4:7")
        assert len(nodes.asked) == 1
        await relays._greet_node("/ip4/1.2.3.4/tcp/5/p2p/node/")
        await relays._find("/ip4/1.2.3.4/tcp/5/p2p/node/")
        assert len(nodes.asked) == 2, "it was not there"

    asyncio.run(scenario())


def test_a_node_that_does_not_answer_or_has_no_port_is_asked_again() -> None:
    async def scenario() -> None:
        nodes = Nodes()
        relays = arranging(nodes)
        for nodes.error in (PeerUnreachableError("node", "x"), RemoteProtocolError("node", "x")):
            assert await relays._find("/dns4/boot.example/tcp/5/p2p/node") is None
        nodes.error = None
        for port in (0, 65536):
            nodes.ports["node"] = port
            assert await relays._find("/dns4/boot.example/tcp/5/p2p/node") is None
        nodes.ports["node"] = 443
        relay = await relays._find("/dns4/boot.example/tcp/5/p2p/node")
        assert relay is not None
        assert relay.endpoint == "boot.example:443"
        assert await relays._find("/unix/socket/p2p/node") is None

    asyncio.run(scenario())


def test_junk_does_not_lock_our_own_nodes_out() -> None:
    """Regression: heartbeats full of junk filled the table, and a node that was away once was never found again."""

    async def scenario() -> None:
        relays = arranging(Nodes())
        await relays._greet_node("/ip4/1.2.3.4/tcp/5/p2p/node")
        for number in range(2 * KNOWN):
            assert await relays._find(f"/ip4/6.6.6.6/tcp/5/p2p/junk{number}")
            assert len(relays._known) <= KNOWN
        assert await relays._find("/ip4/1.2.3.4/tcp/5/p2p/node")

    asyncio.run(scenario())


def test_somebody_elses_address_for_a_node_does_not_replace_ours() -> None:
    async def scenario() -> None:
        relays = arranging(Nodes())
        wrong = await relays._find("/ip4/6.6.6.6/tcp/5/p2p/node")
        ours = await relays._find("/ip4/1.2.3.4/tcp/5/p2p/node")
        assert wrong is not None
        assert ours is not None
        assert (wrong.endpoint, ours.endpoint) == ("6.6.6.6:7", "1.2.3.4:7")

    asyncio.run(scenario())
