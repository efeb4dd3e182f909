"""A node's place in the DHT: when it greets whom, when it serves, and what a move to another network ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from peers.errors import LocalNetworkError
from peers.network import dht_node
from peers.network.daemon import HIVEMIND, to_peer_id
from peers.network.dht_node import DhtMembership, DhtNode
from peers.network.known_runs import Admissions
from peers.values.identity import Identity

DEADLINE = 120.0  # seconds
PEERS = [Identity.generate().peer_id for _ in range(2)]
ADDRESSES = [f"/ip4/11.0.0.{number}/tcp/1/p2p/{peer}" for number, peer in enumerate(PEERS, 1)]


@dataclass
class World:
    """Stands in for the node, its daemon and hivemind's protocol."""

    table: dict[Any, str] = field(default_factory=dict)
    connected: set[str] = field(default_factory=set)
    answering: set[str] = field(default_factory=lambda: set(PEERS))
    open: bool | None = None
    log: list[tuple[str, object]] = field(default_factory=list)
    node_info: Any = None
    client_mode: bool = True
    authorizer: None = None
    node_id: bytes = bytes(20)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def protocol(self) -> World:
        return self

    @property
    def routing_table(self) -> Any:
        return _Table(self.table)

    def say(self, what: str, whom: object = None) -> None:
        self.log.append((what, whom))
        self.news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not condition():
                self.news.clear()
                await self.news.wait()

    # hivemind's protocol
    async def call_ping(self, peer: Any) -> str | None:
        await asyncio.sleep(0)
        answers = str(peer) in self.connected & self.answering
        if answers:
            self.table[peer] = str(peer)
        self.say("ping", str(peer))
        return str(peer) if answers else None

    async def add_p2p_handlers(self, daemon: object, service: object) -> None:
        self.say("serve")

    async def remove_p2p_handlers(self, daemon: object) -> None:
        self.say("serve no more")

    # the transport
    @property
    def dht(self) -> Any:
        return SimpleNamespace(protocol=self)

    @property
    def links(self) -> Any:
        return SimpleNamespace(drop_all=self.on_move)

    @property
    def daemon(self) -> World:
        return self

    def on_move(self) -> None:
        self.say("moved")

    async def can_be_dialled(self) -> bool | None:
        self.say("can be dialled?")
        return self.open

    async def connect(self, peer: str, addresses: Sequence[str]) -> bool:
        self.say("connect", peer)
        self.connected.add(peer)
        return True

    async def drop_connection(self, peer: str) -> None:
        self.say("drop", peer)
        self.connected.discard(peer)

    # the daemon
    async def connections(self) -> dict[str, list[str]]:
        return {peer: [] for peer in self.connected}


class _Table:
    def __init__(self, peers: dict[Any, str]) -> None:
        self.uid_to_peer_id = self.peer_id_to_uid = peers

    def __contains__(self, peer: object) -> bool:
        return peer in self.uid_to_peer_id


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_node, "LOOK_INTERVAL", 0.0)


@asynccontextmanager
async def presence(
    world: World, monkeypatch: pytest.MonkeyPatch, may_serve: bool = True, remembered: Sequence[str] = ()
) -> AsyncIterator[DhtMembership]:
    async def which_answer(addresses: Sequence[str]) -> set[str]:
        await asyncio.sleep(0)
        for address in addresses:
            world.say("knock", address.rpartition("/")[2])
        return {address for address in addresses if address.rpartition("/")[2] in world.answering}

    monkeypatch.setattr(dht_node, "which_answer", which_answer)
    node: Any = world
    made = DhtMembership(node, ADDRESSES, lambda: remembered, may_serve)
    try:
        yield made
    finally:
        await made.close()


def count(world: World, what: str, whom: object = None) -> int:
    return world.log.count((what, whom))


def test_every_lost_bootstrap_node_is_greeted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        world = World()
        async with presence(world, monkeypatch, may_serve=False):
            await world.until(lambda: len(world.table) == 2)
            world.answering.discard(PEERS[0])
            world.connected.discard(PEERS[0])
            del world.table[to_peer_id(PEERS[0])]
            connects, knocks = count(world, "connect", PEERS[0]), count(world, "knock", PEERS[0])
            await world.until(lambda: count(world, "knock", PEERS[0]) > knocks + 2)
            assert count(world, "connect", PEERS[0]) == connects, "the daemon dials where nobody answers"
            world.answering.add(PEERS[0])
            await world.until(lambda: len(world.table) == 2)
            assert count(world, "connect", PEERS[1]) == 1, "who is there is left alone"

    asyncio.run(story())


def test_a_connection_that_still_works_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        world = World(connected=set(PEERS))
        async with presence(world, monkeypatch, may_serve=False):
            await world.until(lambda: len(world.table) == 2)
        assert {what for what, _ in world.log} == {"ping"}

    asyncio.run(story())


def test_a_connection_without_an_answer_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        world = World(connected={PEERS[0]}, answering={PEERS[1]})
        async with presence(world, monkeypatch, may_serve=False):
            await world.until(lambda: count(world, "drop", PEERS[0]) > 0)
            world.answering.add(PEERS[0])
            await world.until(lambda: len(world.table) == 2)

    asyncio.run(story())


def test_others_are_greeted_by_who_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = Identity.generate().peer_id

    async def story() -> None:
        world = World(answering={stranger})
        async with presence(world, monkeypatch, False, [f"/ip4/11.0.0.9/tcp/1/p2p/{stranger}"]):
            await world.until(lambda: to_peer_id(stranger) in world.table)

    asyncio.run(story())


@pytest.mark.parametrize("is_open", [True, False])
def test_only_who_can_be_dialled_serves(monkeypatch: pytest.MonkeyPatch, is_open: bool) -> None:
    async def story() -> None:
        world = World()
        async with presence(world, monkeypatch):
            await world.until(lambda: count(world, "can be dialled?") > 2)
            assert world.client_mode, "nobody has tried yet"
            world.open = is_open
            asked = count(world, "can be dialled?")
            await world.until(lambda: count(world, "can be dialled?") > asked)
            if is_open:
                await world.until(lambda: count(world, "serve") == 1)
        assert world.client_mode is not is_open
        assert count(world, "serve") == is_open

    asyncio.run(story())


def test_who_moves_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        world = World(open=True)
        async with presence(world, monkeypatch) as made:
            await world.until(lambda: count(world, "serve") == 1)
            world.open, world.connected = None, set(PEERS)
            made.network_changed()
            assert count(world, "moved") == 1, "at once, whatever is being waited for"
            await world.until(lambda: count(world, "serve no more") == 1)
            await world.until(lambda: all(count(world, "connect", peer) for peer in PEERS))
            assert all(count(world, "drop", peer) for peer in PEERS)
            assert world.client_mode
            world.open = True
            await world.until(lambda: count(world, "serve") == 2)

    asyncio.run(story())


def test_who_only_asks_never_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        world = World(open=True)
        async with presence(world, monkeypatch, may_serve=False) as made:
            await world.until(lambda: len(world.table) == 2)
            made.network_changed()
            await world.until(lambda: count(world, "drop", PEERS[0]) > 0)
        assert count(world, "can be dialled?") == count(world, "serve") == 0

    asyncio.run(story())


def test_a_wrong_clock_may_be_the_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: where a bootstrap node's clock was wrong, each volunteer was told that its own was."""

    async def create(**settings: object) -> None:
        raise HIVEMIND.protocol.ValidationError("local time must be within 3 seconds  of others(local: 9, peer: 1)")

    monkeypatch.setattr(HIVEMIND.node.DHTNode, "create", create)
    with pytest.raises(LocalNetworkError, match=r"of this machine and of another node .*tell that node's operator"):
        asyncio.run(DhtNode.create(None, ADDRESSES, True, Admissions()))  # type: ignore[arg-type]
