"""Who is in a run: when the DHT is asked and told, and what gossip does meanwhile. No network, and a clock of ours."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from peers.errors import LocalProtocolError
from peers.metrics import Health
from peers.network import discovery as module
from peers.network.channel import PeerUnreachableError
from peers.network.discovery import GOSSIP, PeerDiscovery
from peers.network.transport import HivemindTransport
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.meeting_place import SAMPLE, SEARCH_LAST
from peers.presence.news import Request
from peers.presence.voice import Voice
from peers.values.identity import Identity
from tests.peers.builders import LOG, beat

RUN = "tiny-" + "a" * 32


class World:
    """A clock, a DHT, and who answers whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.began = 1_800_000_000.0
        self.dht: dict[str, tuple[Heartbeat, bytes]] = {}
        self.nodes: dict[str, Node] = {}
        self.broken = False
        monkeypatch.setattr(module, "now", lambda: 1000.0 + self.seconds)
        monkeypatch.setattr("peers.network.discovery.time.time", lambda: self.wall)

    @property
    def wall(self) -> float:
        return self.began + self.seconds


class Node:
    """One peer's network: counts what it does with the DHT."""

    def __init__(self, world: World, identity: Identity | None = None) -> None:
        self.world = world
        self.identity = identity or Identity.generate()
        self.peer_id = self.identity.peer_id
        world.nodes[self.peer_id] = self
        self.links = SimpleNamespace(reach=dict, port=0)
        self.dht = self
        self.stored = self.searched = 0
        self.takes = True
        self.connected: list[str] = []
        self.discovery = PeerDiscovery(RUN, cast(HivemindTransport, self))
        self.voice = Voice(self.identity)

    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
        assert name == GOSSIP
        there = self.world.nodes.get(peer_id)
        if there is None or self.world.broken or not there.discovery.is_member:
            raise PeerUnreachableError(peer_id, "no answer in time")
        return there.discovery.answer(self.peer_id, Request.unpack(self.peer_id, payload))

    async def connect(self, peer_id: str, addresses: tuple[str, ...]) -> bool:
        self.connected.append(peer_id)
        return True

    async def store_heartbeat(self, heartbeat: Heartbeat, signed: bytes) -> bool:
        self.stored += 1
        if self.takes:
            self.world.dht[heartbeat.peer] = heartbeat, signed
        return self.takes

    async def find_heartbeats(self, run_id: str) -> list[bytes]:
        self.searched += 1
        return [signed for heartbeat, signed in self.world.dht.values() if heartbeat.expires > self.world.wall]

    async def says(self, state: PeerState = PeerState.TRAINING) -> set[str]:
        """A beat of its pulse. Returns the peers that it then knows."""
        heartbeat = beat(self.peer_id, LOG, state, int(self.world.wall * 1000), run=RUN, lifetime=20.0)
        signed, sign = self.voice.say(heartbeat, self.discovery.pace(), 1000.0 + self.world.seconds)
        await self.discovery.say(signed, sign)
        return await self.sees()

    async def sees(self) -> set[str]:
        found = {one.peer for one in await self.discovery.heartbeats() if one.state is not PeerState.LEAVING}
        for _ in range(20):  # exchanges that are under way come to their end
            await asyncio.sleep(0)
        return found

    async def looks_again(self) -> None:
        self.discovery._tell()
        await self.sees()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def beats(world: World, nodes: list[Node], count: int) -> list[set[str]]:
    """All say something, every two seconds. Returns what each knows in the end."""
    for _ in range(count):
        world.seconds += 2.0
        for node in nodes:
            await node.says()
        for node in nodes * 3:
            await node.looks_again()
    return [await node.sees() for node in nodes]


async def closed(*nodes: Node) -> None:
    for node in nodes:
        await node.discovery.close()


def test_a_peer_whose_heartbeats_no_node_takes_is_ill_until_one_does(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = Health()
    monkeypatch.setattr(module, "HEALTH", health)

    async def scenario() -> None:
        node = Node(world)
        node.takes = False
        await node.says()
        assert health.reasons == [module.NO_NODE]
        node.takes = True
        await beats(world, [node], 10)
        assert health.reasons == []
        await closed(node)

    asyncio.run(scenario())


def test_a_newcomer_is_known_to_all_at_its_first_beat(world: World) -> None:
    async def scenario() -> None:
        nodes = [Node(world) for _ in range(4)]
        await beats(world, nodes, 3)
        new = Node(world)
        world.seconds += 2.0
        await new.says()
        await new.looks_again()
        for node in nodes:
            await node.looks_again()
            assert new.peer_id in {one.peer for one in node.discovery.gossip.heartbeats(1000.0 + world.seconds)}
        await closed(*nodes, new)

    asyncio.run(scenario())


def test_alone_the_dht_is_told_and_asked_at_each_beat(world: World) -> None:
    async def scenario() -> None:
        node = Node(world)
        await beats(world, [node], 5)
        assert node.stored == 5
        assert node.searched >= 5
        await closed(node)

    asyncio.run(scenario())


def test_while_gossip_works_the_dht_is_told_and_asked_now_and_then(world: World) -> None:
    async def scenario() -> None:
        nodes = [Node(world) for _ in range(3)]
        everybody = {node.peer_id for node in nodes}
        assert await beats(world, nodes, 5) == [everybody] * 3
        before = [(node.stored, node.searched) for node in nodes]
        assert await beats(world, nodes, 40) == [everybody] * 3
        for node, (stored, searched) in zip(nodes, before, strict=True):
            assert 9 <= node.stored - stored <= 11, "every 8 of 80 seconds"
            assert 12 <= node.searched - searched <= 17, "every 5 to 6"
        await closed(*nodes)

    asyncio.run(scenario())


def test_whoever_is_only_in_the_dht_is_looked_for_each_time(world: World) -> None:
    """Two that cannot reach each other know of each other all the same."""

    async def scenario() -> None:
        nodes = [Node(world) for _ in range(2)]
        world.broken = True
        everybody = {node.peer_id for node in nodes}
        assert await beats(world, nodes, 10) == [everybody] * 2
        assert all(node.stored == 10 and node.searched >= 10 for node in nodes)
        await closed(*nodes)

    asyncio.run(scenario())


def test_a_farewell_is_everywhere_when_it_has_been_said(world: World) -> None:
    async def scenario() -> None:
        nodes = [Node(world) for _ in range(3)]
        await beats(world, nodes, 5)
        world.seconds += 0.5
        await nodes[0].says(PeerState.LEAVING)
        for node in nodes[1:]:
            assert nodes[0].peer_id not in await node.sees()
        assert world.dht[nodes[0].peer_id][0].state is PeerState.LEAVING
        await closed(*nodes)

    asyncio.run(scenario())


def test_the_dht_has_a_sample_of_a_large_run(world: World) -> None:
    async def scenario() -> None:
        node, crowd = Node(world), [Identity.generate() for _ in range(300)]
        chosen = 0
        for minute in range(40):
            world.seconds = 60.0 * minute
            node.discovery.gossip.answered_at = -float("inf")
            sequence = int(world.wall * 1000)
            for identity in crowd:
                signed = beat(identity.peer_id, LOG, sequence=sequence, run=RUN, lifetime=30.0).sign(identity)
                node.discovery.gossip.found(signed, 1000.0 + world.seconds, world.wall)
            chosen += node.discovery.pace().is_whole
        assert chosen < 40 * 4 * SAMPLE / 300, "each is in it as often as any other"

    asyncio.run(scenario())


def test_a_large_run_is_searched_for_rarely(world: World) -> None:
    node = Node(world)
    node.discovery.gossip.others = lambda now: ["x"] * 5000  # type: ignore[method-assign]
    node.discovery.meeting_place.searched(1000.0)
    world.seconds = SEARCH_LAST - 100.0
    assert not node.discovery.meeting_place.is_search_due(1000.0 + world.seconds)
    world.seconds = SEARCH_LAST
    assert node.discovery.meeting_place.is_search_due(1000.0 + world.seconds)


def test_a_stranger_asks_until_it_is_told_of_all(world: World) -> None:
    async def scenario() -> None:
        nodes = [Node(world) for _ in range(12)]
        await beats(world, nodes, 3)
        for peer in list(world.dht)[1:]:
            del world.dht[peer]
        stranger = Node(world)
        assert await stranger.sees() == {node.peer_id for node in nodes}
        assert not stranger.discovery.is_member
        assert stranger.stored == 0
        world.seconds += 2.0
        for node in nodes:
            await node.says()
            assert stranger.peer_id not in await node.sees()
        assert await stranger.sees() == {node.peer_id for node in nodes}
        await closed(*nodes)

    asyncio.run(scenario())


def test_a_stranger_is_content_with_the_dht_when_nobody_answers(world: World) -> None:
    async def scenario() -> None:
        node = Node(world)
        await beats(world, [node], 1)
        world.broken = True
        stranger = Node(world)
        assert await stranger.sees() == {node.peer_id}
        await closed(node)

    asyncio.run(scenario())


def test_whoever_only_looks_asks_again_after_it_was_interrupted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: an exchange that was cut off at the end of a look seemed to be under way for ever."""

    async def scenario() -> None:
        nodes = [Node(world) for _ in range(2)]
        await beats(world, nodes, 3)
        stranger = Node(world)
        call = stranger.call

        async def never(peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
            await asyncio.get_running_loop().create_future()
            return b""

        monkeypatch.setattr(module, "LOOK_LIMIT", 0.0)
        stranger.call = never  # type: ignore[method-assign]
        await stranger.sees()
        monkeypatch.setattr(module, "LOOK_LIMIT", 5.0)
        stranger.call = call  # type: ignore[method-assign]
        world.seconds += 2.0
        world.dht.clear()
        await stranger.sees()
        assert stranger.discovery.gossip.answered_at == 1000.0 + world.seconds
        await closed(*nodes)

    asyncio.run(scenario())


def test_nothing_goes_backwards(world: World) -> None:
    async def scenario() -> None:
        node = Node(world)
        heartbeat = beat(node.peer_id, LOG, sequence=int(world.wall * 1000), run=RUN)
        signed = heartbeat.sign(node.identity)
        await node.discovery.say(signed, None)
        with pytest.raises(LocalProtocolError):
            await node.discovery.say(signed, None)
        await closed(node)

    asyncio.run(scenario())
