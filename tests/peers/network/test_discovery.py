"""The peers of a run: when the DHT is asked and told, and what beats do meanwhile. No network, and a clock of ours."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest

from peers.errors import LocalProtocolError
from peers.metrics import Health
from peers.network import discovery as module
from peers.network.channel import PeerUnreachableError
from peers.network.discovery import PeerDiscovery
from peers.network.transport import HivemindTransport
from peers.presence.calls import BEAT, HEARTBEAT, SHORT, WHO, Beat, Request
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.meeting_place import SAMPLE, SEARCH_LAST
from peers.values.identity import Identity
from peers.values.wire import unpack
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG

RUN = "tiny-" + "a" * 32


class World:
    """A clock, a DHT, and who answers whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.began = 1_800_000_000.0
        self.dht: dict[str, tuple[Heartbeat, bytes]] = {}
        self.nodes: dict[str, Node] = {}
        self.broken = False
        self.calls = Counter[str]()
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
        self.links = SimpleNamespace(port=0)
        self.dht = self
        self.stored = self.searched = 0
        self.takes = True
        self.connected: list[str] = []
        self.discovery = PeerDiscovery(RUN, cast(HivemindTransport, self))

    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
        there = self.world.nodes.get(peer_id)
        self.world.calls[name] += 1
        if there is None or self.world.broken or not there.discovery.is_member:
            raise PeerUnreachableError(peer_id, "no answer in time")
        beats, moment = there.discovery.beats, (vars(module)["now"](), self.world.wall)
        if name == BEAT:
            return beats.hear_beat(self.peer_id, unpack(Beat, payload), *moment)
        if name == HEARTBEAT:
            return beats.hear_heartbeat(self.peer_id, payload[SHORT:], *moment)
        assert name == WHO
        return beats.hand_out(self.peer_id, Request.unpack(self.peer_id, payload), *moment)

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
        """Do what its pulse does. Returns the peers that it then knows."""
        heartbeat = beat(self.peer_id, LOG, state, int(self.world.wall * 1000), run=RUN, lifetime=20.0)
        if self.discovery.is_news(heartbeat):
            await self.discovery.publish(heartbeat.sign(self.identity))
        else:
            self.discovery.beat(heartbeat)
        return await self.sees()

    async def sees(self) -> set[str]:
        """Return the peers that it knows, when all calls that are under way have come to their end."""
        await self.discovery.heartbeats()
        for _ in range(20):
            await asyncio.sleep(0)
        found = await self.discovery.heartbeats()
        return {one.peer for one in found if one.state is not PeerState.LEAVING}

    def hears(self) -> set[str]:
        """Return the other peers that it has heard within the expiry."""
        return {peer for peer, seconds in self.discovery.silences().items() if seconds <= 10.0}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def beats(world: World, nodes: list[Node], count: int) -> list[set[str]]:
    """Have all say something, every two seconds. Returns what each knows in the end."""
    for _ in range(count):
        world.seconds += 2.0
        for node in nodes:
            await node.says()
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


def test_a_newcomer_hears_all_at_its_first_beat_and_is_heard(world: World) -> None:
    async def scenario() -> None:
        nodes = [Node(world) for _ in range(4)]
        await beats(world, nodes, 3)
        for peer in list(world.dht)[1:]:
            del world.dht[peer]
        new = Node(world)
        world.seconds += 1.0
        await new.says()
        assert new.hears() == {node.peer_id for node in nodes}
        assert all(new.peer_id in node.hears() for node in nodes)
        await closed(*nodes, new)

    asyncio.run(scenario())


def test_a_volunteer_that_has_listened_first_hears_all_at_its_first_beat(world: World) -> None:
    """It listens whether another machine has its key, and knows the others by then, but has heard none."""

    async def scenario() -> None:
        nodes = [Node(world) for _ in range(4)]
        await beats(world, nodes, 3)
        for peer in list(world.dht)[1:]:
            del world.dht[peer]
        new = Node(world)
        assert await new.sees() == {node.peer_id for node in nodes}
        assert new.hears() == {next(iter(world.dht))}
        world.seconds += 1.0
        await new.says()
        assert new.hears() == {node.peer_id for node in nodes}
        await closed(*nodes, new)

    asyncio.run(scenario())


def test_beats_are_most_of_what_is_said(world: World) -> None:
    async def scenario() -> None:
        nodes = [Node(world) for _ in range(3)]
        await beats(world, nodes, 3)
        world.calls.clear()
        await beats(world, nodes, 40)
        assert sum(world.calls[name] for name in (BEAT, HEARTBEAT)) == 40 * 6
        assert world.calls[HEARTBEAT] == 40 * 6 // 4, "every eight seconds"
        assert world.calls[WHO] <= 3 * 9, "every ten"
        assert all(node.hears() == set(world.nodes) - {node.peer_id} for node in nodes)
        await closed(*nodes)

    asyncio.run(scenario())


def test_newcomers_that_the_dht_does_not_have_hear_of_each_other(world: World) -> None:
    """As in a large swarm, of which it has a sample: each of them knows another peer."""

    async def scenario() -> None:
        old = Node(world)
        await beats(world, [old], 1)
        new = [Node(world) for _ in range(2)]
        for node in new:
            node.takes = False
        await beats(world, [old, *new], 8)
        assert len(world.dht) == 1
        assert all(node.hears() == {old.peer_id, *(one.peer_id for one in new)} - {node.peer_id} for node in new)
        await closed(old, *new)

    asyncio.run(scenario())


def test_a_peer_that_dies_is_not_heard_any_more_and_one_that_is_back_is(world: World) -> None:
    async def scenario() -> None:
        nodes = [Node(world) for _ in range(3)]
        await beats(world, nodes, 3)
        dead = world.nodes.pop(nodes[2].peer_id)
        await beats(world, nodes[:2], 5)
        assert nodes[0].hears() == {nodes[1].peer_id, dead.peer_id}
        await beats(world, nodes[:2], 1)
        assert nodes[0].hears() == {nodes[1].peer_id}
        await beats(world, nodes[:2], 30)
        world.nodes[dead.peer_id] = dead
        await beats(world, nodes, 2)
        assert nodes[0].hears() == {nodes[1].peer_id, dead.peer_id}
        await closed(*nodes)

    asyncio.run(scenario())


def test_halves_that_were_parted_meet_again_by_the_dht(world: World) -> None:
    async def scenario() -> None:
        halves = [[Node(world) for _ in range(2)] for _ in range(2)]
        left, right = (dict(world.dht) for _ in halves)
        for half, dht in ((halves[0], left), (halves[1], right)):
            world.dht = dht
            await beats(world, half, 30)
        world.dht = left | right
        everybody = [*halves[0], *halves[1]]
        await beats(world, everybody, 5)
        assert all(node.hears() == {one.peer_id for one in everybody} - {node.peer_id} for node in everybody)
        await closed(*everybody)

    asyncio.run(scenario())


def test_alone_the_dht_is_told_and_asked_at_each_beat(world: World) -> None:
    async def scenario() -> None:
        node = Node(world)
        await beats(world, [node], 5)
        assert node.stored == 5
        assert node.searched >= 5
        await closed(node)

    asyncio.run(scenario())


def test_while_others_are_heard_the_dht_is_told_and_asked_now_and_then(world: World) -> None:
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
        assert all(node.hears() == everybody - {node.peer_id} for node in nodes)
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
            sequence = int(world.wall * 1000)
            for identity in crowd:
                signed = beat(identity.peer_id, LOG, sequence=sequence, run=RUN, lifetime=30.0).sign(identity)
                node.discovery.beats.found(signed, 1000.0 + world.seconds, world.wall)
            chosen += node.discovery.meeting_place.is_to_be_stored(1000.0 + world.seconds, world.wall)
        assert chosen < 40 * 4 * SAMPLE / 300, "each is in it as often as any other"

    asyncio.run(scenario())


def test_a_large_run_is_searched_for_rarely(world: World) -> None:
    node = Node(world)
    node.discovery.beats.others = lambda now: ["x"] * 5000  # type: ignore[method-assign]
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
    """Regression: a question that was cut off at the end of a look seemed to be under way for ever."""

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
        assert stranger.discovery._asked_at == 1000.0 + world.seconds
        await closed(*nodes)

    asyncio.run(scenario())


def test_nothing_goes_backwards(world: World) -> None:
    async def scenario() -> None:
        node = Node(world)
        heartbeat = beat(node.peer_id, LOG, sequence=int(world.wall * 1000), run=RUN)
        signed = heartbeat.sign(node.identity)
        await node.discovery.publish(signed)
        with pytest.raises(LocalProtocolError):
            await node.discovery.publish(signed)
        await closed(node)

    asyncio.run(scenario())
