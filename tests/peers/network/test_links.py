"""Several peers' links on the loopback interface: how they come about, end, and are made again."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from peers.network import data_port, introductions, link, links
from peers.network.channel import Channel, PeerRefusedError, PeerUnreachableError, RefusalError
from peers.network.connection import Connection, Credentials, greet
from peers.network.contacts import Contact
from peers.network.data_port import LinkInfo, ProbeAnswer, probe
from peers.network.introductions import INTRODUCE, MEET, Arranging
from peers.network.link import CONNECTIONS, Link
from peers.network.links import LINK_TIMEOUT, MORE, UNKNOWN, Links, LinkSettings, _Way
from peers.network.sockets import dial, listen
from peers.network.throttle import UNLIMITED
from peers.values.identity import Identity
from peers.values.wire import Reach, pack, unpack
from tests.peers.network.pairs import open_files, opened_by_them, sorted_identities

DEADLINE = 240.0  # seconds
REFUSING = "127.0.0.1:1"  # where nobody listens


class Node:
    """One peer. `log` has the messages that it was asked."""

    def __init__(self, swarm: dict[str, Node], identity: Identity) -> None:
        self.swarm = swarm
        self.peer = identity.peer_id
        self.identity = identity
        self.log: list[tuple[str, str, bytes]] = []
        self.served: list[tuple[str, str]] = []
        self.detour = False
        self.detours = 0
        self.answers: dict[str, Callable[[str, bytes], Awaitable[bytes]]] = {}
        self.links = Links(
            identity, self.serve, self.answer, self.ask_info, self.is_there, lambda: (UNLIMITED, UNLIMITED)
        )
        self.answers |= self.links.handlers
        swarm[self.peer] = self

    @property
    def address(self) -> str:
        return f"/ip4/127.0.0.1/tcp/1/p2p/{self.peer}"

    def contact(self, endpoints: tuple[str, ...] | None = None, relays: tuple[str, ...] = ()) -> Contact:
        return Contact(self.peer, self.links.endpoints([self.address]) if endpoints is None else endpoints, relays)

    def know(self, *contacts: Contact, eagerly: bool = True) -> None:
        self.links.observe({contact.peer: contact for contact in contacts}, eagerly)

    async def serve(self, protocol: str, channel: Channel) -> None:
        await channel.read_prelude()
        self.served.append((channel.peer, protocol))
        await channel.accept()

    async def answer(self, sender: str, name: str, payload: bytes) -> bytes:
        self.log.append((sender, name, payload))
        if name not in self.answers:
            return name.encode() + payload
        return await self.answers[name](sender, payload)

    async def ask_info(self, peer: str, address: str) -> LinkInfo:
        if peer not in self.swarm:
            raise PeerUnreachableError(peer, "not there")
        return LinkInfo(port=self.swarm[peer].links.port)

    async def is_there(self, peer: str) -> bool:
        self.detours += 1
        return self.detour

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # each look after all else has had its turn
            await asyncio.sleep(0)

    async def until_up(self, other: Node) -> Link:
        await self.until(lambda: self.links.is_up(other.peer))
        return self.links.link(other.peer)


async def talk(link: Link, protocol: str = "hello") -> None:
    async with link.conversation(protocol) as channel:
        await channel.send_prelude(b"", 0)
        await channel.read_verdict()


@asynccontextmanager
async def nodes(count: int, relay_limit: float | None = None, listening: bool = True) -> AsyncIterator[list[Node]]:
    """So many, the smallest peer id first; the last one relays if there is a limit."""
    swarm: dict[str, Node] = {}
    made = [Node(swarm, identity) for identity in sorted_identities(count)]
    try:
        for node in made if listening else ():
            node.links.listen(["127.0.0.1"], LinkSettings(relay_limit=relay_limit if node is made[-1] else None))
        async with asyncio.timeout(DEADLINE):
            yield made
    finally:
        for node in made:
            await node.links.close()
        for _ in range(5):  # whatever was aborted is told so
            await asyncio.sleep(0)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    before = open_files()
    asyncio.run(scenario)
    assert open_files() == before


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for others who will not come."""
    monkeypatch.setattr(links, "HEAD_START", 0.01)
    monkeypatch.setattr(introductions, "MEETING_TIMEOUT", 0.01)
    monkeypatch.setattr(introductions, "PUNCH_TIMEOUT", 0.0)  # on one machine there is nothing to punch through


@pytest.mark.parametrize("dialler", [0, 1])
def test_one_dials_and_both_can_talk(dialler: int) -> None:
    async def scenario() -> None:
        async with nodes(2) as both:
            one, other = both[dialler], both[1 - dialler]
            assert one.links.reach_of(other.peer) is None
            one.know(other.contact())
            here, there = await one.until_up(other), await other.until_up(one)
            await asyncio.gather(talk(here), talk(there))
            assert await there.call("name", b"payload", 5.0) == b"namepayload"
            assert (one.served, other.served) == ([(other.peer, "hello")], [(one.peer, "hello")])
            assert one.links.reach() == {other.peer: Reach.OPEN}
            assert other.links.reach_of(one.peer) is Reach.OPEN

    run(scenario())


def test_both_dial_at_once() -> None:
    async def scenario() -> None:
        async with nodes(2) as (one, other):
            one.know(other.contact())
            other.know(one.contact())
            here, there = await asyncio.gather(one.links.link_with(other.peer), other.links.link_with(one.peer))
            assert here is not None
            assert there is not None
            await asyncio.gather(*(talk(link) for link in (here, there) for _ in range(10)))

    run(scenario())


def test_in_a_crowd_links_are_made_with_some_of_those_that_are_told_things(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partners of gossip change for ever; links stay."""
    monkeypatch.setattr(links, "EAGER", 1)

    async def scenario() -> None:
        async with nodes(3) as (one, other, third):
            one.know(other.contact(), third.contact())
            assert not any(way.is_busy for way in one.links._ways.values())
            one.links.prepare(other.peer)
            await one.until_up(other)
            one.links.prepare(third.peer)
            assert not one.links.way(third.peer).is_busy

    run(scenario())


def test_who_cannot_dial_asks_for_more_connections() -> None:
    """Its many conversations at once need as many, and the other side dials them."""

    async def scenario() -> None:
        async with nodes(2) as (dialler, other):
            dialler.know(other.contact())
            await dialler.until_up(other)
            link = await other.until_up(dialler)
            async with AsyncExitStack() as stack:
                await asyncio.gather(*(stack.enter_async_context(link.conversation("hello")) for _ in range(5)))
                assert link.ours >= 5
            assert MORE in {name for _, name, _ in dialler.log}

    run(scenario())


def test_where_nothing_can_be_dialled_for_a_moment_more_connections_are_had_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the dialler forgot the endpoint, and neither side got any more connections while the link was up."""

    async def no_network(endpoint: str, timeout: float) -> socket.socket:
        raise OSError("no route to host")

    async def scenario() -> None:
        async with nodes(2) as (dialler, other):
            dialler.know(other.contact())
            await dialler.until_up(other)
            link = await other.until_up(dialler)
            await other.until(lambda: bool(link.ours))
            with monkeypatch.context() as patch:
                patch.setattr(links, "dial", no_network)
                with pytest.raises(PeerRefusedError, match="no endpoint of yours"):  # the other side can't dial either
                    await dialler.links.way(other.peer).dial_more(1)
            async with AsyncExitStack() as stack:
                await asyncio.gather(*(stack.enter_async_context(link.conversation("hello")) for _ in range(5)))

    run(scenario())


def test_more_than_there_may_be_is_not_dialled() -> None:
    async def scenario() -> None:
        async with nodes(2) as (dialler, other):
            on_more = dialler.links.handlers[MORE]
            with pytest.raises(RefusalError, match="no endpoint"):
                await on_more(other.peer, pack(links._More(connections=1)))
            assert dialler.links._ways == {}, "nothing is kept of a stranger that asks"
            dialler.know(other.contact())
            link = await dialler.until_up(other)
            await dialler.links.link_with(other.peer)
            dialler.links.way(other.peer)._is_dialling_for_peer = True
            with pytest.raises(RefusalError, match="being dialled already"):
                await on_more(other.peer, pack(links._More(connections=1)))
            dialler.links.way(other.peer)._is_dialling_for_peer = False
            with pytest.raises(RefusalError):
                await on_more(other.peer, pack(links._More(connections=0)))
            other.know(dialler.contact(), eagerly=False)
            await on_more(other.peer, pack(links._More(connections=1 << 60)))
            assert opened_by_them(link) <= CONNECTIONS

    run(scenario())


def test_who_lost_its_only_connection_is_given_another() -> None:
    """Regression: the link stayed up for the dialler, and the other side could open nothing on it."""

    async def scenario() -> None:
        async with nodes(2) as (dialler, other):
            dialler.know(other.contact())
            here, there = await dialler.until_up(other), await other.until_up(dialler)
            await other.until(lambda: there.ours > 0)
            lost = next(one for one in there.connections if one.is_ours)
            lost.close()
            await dialler.until(lambda: opened_by_them(here) == 0)
            with pytest.raises(PeerUnreachableError):
                await other.links.way(dialler.peer).dial_more(1)
            dialler.know(other.contact())
            await other.until(lambda: there.ours > 0)
            await talk(there)

    run(scenario())


def test_where_nothing_answers_there_is_no_way_and_the_pauses_grow() -> None:
    async def scenario() -> None:
        now = [100.0]
        async with nodes(2) as (one, other):
            one.links.clock = lambda: now[0]
            for pause in (5.0, 10.0, 20.0, 40.0, 60.0, 60.0):
                tried = one.detours
                assert await look(one, other) is None
                assert one.links.reach() == {other.peer: Reach.NONE}
                assert one.detours == tried + 1
                now[0] += pause - 0.1
                assert await look(one, other) is None
                assert one.detours == tried + 1, "it is too early"
                now[0] += 0.2
            one.detour = True
            await look(one, other)
            assert one.links.reach() == {other.peer: Reach.RELAYED}, "there is a way without a link"
            one.know(other.contact())
            assert await one.links.link_with(other.peer), "it says that it is somewhere else: try at once"

    async def look(one: Node, other: Node) -> Link | None:
        one.know(other.contact((REFUSING, "[::1]:1")), eagerly=False)
        return await one.links.link_with(other.peer)

    run(scenario())


def test_whoever_is_at_an_endpoint_in_a_peers_place_is_not_that_peer() -> None:
    async def scenario() -> None:
        async with nodes(3) as (one, other, somebody):
            endpoints = somebody.contact().endpoints
            one.know(other.contact(endpoints))
            await one.until(lambda: one.links.reach_of(other.peer) is Reach.NONE)
            assert not somebody.links.is_up(one.peer)
            one.know(other.contact((*endpoints, *other.contact().endpoints)))
            await one.until_up(other)

    run(scenario())


def test_a_link_that_breaks_is_made_again() -> None:
    async def scenario() -> None:
        async with nodes(2) as (one, other):
            for _ in range(3):
                one.know(other.contact())
                await one.until_up(other)
                await other.until_up(one)
                other.links.link(one.peer).close()
                await one.until(lambda: not one.links.is_up(other.peer))
            one.know(other.contact())
            await talk(await one.until_up(other))
            one.links.drop_all()
            assert not one.links.is_up(other.peer), "at once"
            assert one.links.reach() == {}
            one.know(other.contact())
            await talk(await one.until_up(other))

    run(scenario())


def test_who_is_not_there_any_more_is_forgotten() -> None:
    async def scenario() -> None:
        async with nodes(2) as (one, other):
            one.know(other.contact())
            await one.until_up(other)
            await other.until_up(one)
            await asyncio.wait([one.links.way(other.peer).make()])
            one.know()
            assert one.links.reach() == {}
            assert one.links.is_up(other.peer), "until it breaks"
            other.links.link(one.peer).close()
            await one.until(lambda: not one.links.is_up(other.peer))
            await other.until(lambda: not other.links.is_up(one.peer))
            assert one.links._ways == other.links._ways == {}
            one.know(other.contact((REFUSING,)))
            await one.links.link_with(other.peer)
            one.know()
            assert one.links._ways == {}

    run(scenario())


def test_a_link_is_waited_for_no_longer_than_there_is_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a stream waited for all ways to a peer, one after the other, for minutes."""
    assert LINK_TIMEOUT == 15.0
    monkeypatch.setattr(links, "LINK_TIMEOUT", 0.01)

    async def scenario() -> None:
        async with nodes(2) as (one, other):
            forever = asyncio.Event()
            monkeypatch.setattr(_Way, "dial_first", lambda way, contact: forever.wait())
            one.know(other.contact(), eagerly=False)
            assert await one.links.link_with(other.peer) is None
            assert await one.links.link_with("nobody") is None

    run(scenario())


# Strangers ------------------------------------------------------------------------------------------------------
def test_a_peer_that_nobody_knows_gets_few_connections() -> None:
    async def scenario() -> None:
        async with nodes(1) as (node,):
            stranger = Credentials(Identity.generate())
            endpoint = node.contact().endpoints[0]
            connections = []
            for _ in range(UNKNOWN + 3):
                sock = await dial(endpoint, DEADLINE)
                connections.append(await greet(sock, stranger, node.peer, True, Reach.OPEN))
            for extra in connections[UNKNOWN:]:
                with pytest.raises((asyncio.IncompleteReadError, OSError)):
                    await extra.reads.read(1, None)
            assert len(node.links.link(stranger.peer_id).connections) == UNKNOWN
            node.know(Contact(stranger.peer_id, (REFUSING,)), eagerly=False)
            sock = await dial(endpoint, DEADLINE)
            connections.append(await greet(sock, stranger, node.peer, True, Reach.OPEN))
            await node.until(lambda: len(node.links.link(stranger.peer_id).connections) == UNKNOWN + 1)
            for one in connections:
                one.close()

    run(scenario())


async def made_up(node: Node) -> tuple[str, Connection]:
    """Return a peer that exists nowhere else, and its end of a connection."""
    identity = Identity.generate()
    sock = await dial(node.contact().endpoints[0], DEADLINE)
    return identity.peer_id, await greet(sock, Credentials(identity), node.peer, True, Reach.OPEN)


async def is_ended(connection: Connection) -> None:
    with pytest.raises((asyncio.IncompleteReadError, OSError)):
        await connection.reads.read(1, None)


def test_made_up_peers_are_few_and_drive_out_none_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: 400 links of made-up peers were accepted in six seconds."""
    monkeypatch.setattr(data_port, "UNKNOWN_OF_ONE_NETWORK", 10)

    async def scenario() -> None:
        async with nodes(3) as (member, late, node):
            node.links.clock = lambda: 0.0
            node.know(member.contact(), late.contact(), eagerly=False)
            member.know(node.contact())
            link = await member.until_up(node)
            flood = [await made_up(node) for _ in range(40)]
            for _, connection in flood[10:]:
                await is_ended(connection)
            up = {peer for peer in node.links._ways if node.links.is_up(peer)}
            assert up == {member.peer, *(peer for peer, _ in flood[:10])}
            await talk(link)
            late.know(node.contact())
            await talk(await late.until_up(node))

            node.links.clock = lambda: 60.0
            flood += [await made_up(node) for _ in range(10)]
            for _, connection in flood[:10]:
                await is_ended(connection)
            assert node.links.is_up(member.peer)
            for _, connection in flood:
                connection.close()

    run(scenario())


@pytest.mark.parametrize(
    "sent",
    [b"\xff" * 300, b"\x05calls" + b"\xff" * 17, b"GET / HTTP/1.1\r\n\r\n" * 50, b"\x05hel"],
    ids=["binary", "no prelude", "http", "half of one"],
)
def test_a_malformed_opening_ends_the_connection_and_harms_nobody(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    async def scenario() -> None:
        async with nodes(2) as (other, node):
            with monkeypatch.context() as patch:
                patch.setattr(link, "OPEN_TIMEOUT", 0.2)
                peer, connection = await made_up(node)
                connection.writer.write(sent)
                async with asyncio.timeout(4.0):
                    await is_ended(connection)
            await node.until(lambda: not node.links.is_up(peer))
            other.know(node.contact())
            await talk(await other.until_up(node))
            connection.close()

    run(scenario())


def test_all_connections_together_are_bounded() -> None:
    async def scenario() -> None:
        async with nodes(3) as (one, two, node):
            node.links._room = 4
            one.know(node.contact())
            await one.until_up(node)
            await node.until(lambda: len(node.links.link(one.peer).connections) == 2)
            _, connection = await made_up(node)
            await is_ended(connection)  # half of the room is for those that we know
            node.know(two.contact(), eagerly=False)
            two.know(node.contact())
            await node.until(lambda: len(node.links.link(two.peer).connections) == 2)
            two.links.link(node.peer).close()

    run(scenario())


def test_a_probe_says_where_it_came_from_and_which_ports_answer_there() -> None:
    async def scenario() -> None:
        async with nodes(1) as (node,):
            (listener,) = listen(["127.0.0.1"], 0)
            port = listener.getsockname()[1]
            seen = await probe(node.contact().endpoints[0], (port, 1, port))
            assert seen.open == (port,)
            assert seen.endpoint.startswith("127.0.0.1:")
            listener.close()
            assert (await probe(node.contact().endpoints[0], (port,))).open == ()

    run(scenario())


# Introductions --------------------------------------------------------------------------------------------------
@asynccontextmanager
async def around_a_relay(limit: float | None = 1e9) -> AsyncIterator[tuple[Node, Node, Node]]:
    """Two that can't be dialled, and a node that introduces them."""
    async with nodes(3, relay_limit=limit) as made:
        one, other, relay = made
        for node in (one, other):
            node.links.start(node.links.arranging.keep([relay.address]))
            await node.until(lambda node=node: node.links.arranging.addresses == (relay.address,))  # type: ignore[misc]
            await relay.until(lambda node=node: relay.links.link(node.peer).ours > 0)  # type: ignore[misc]
        yield one, other, relay


def test_two_that_cannot_be_dialled_are_joined_by_a_relay() -> None:
    async def scenario() -> None:
        async with around_a_relay() as (one, other, relay):
            one.know(other.contact((REFUSING,), (relay.address,)))
            here, there = await one.until_up(other), await other.until_up(one)
            assert here.reach is there.reach is Reach.RELAYED
            await asyncio.gather(*(talk(link) for link in (here, there) for _ in range(3)))
            assert one.served[0] == (other.peer, "hello")

    run(scenario())


def test_a_link_over_a_relay_gets_more_connections_by_meeting_again() -> None:
    async def scenario() -> None:
        async with around_a_relay() as (one, other, relay):
            one.know(other.contact((REFUSING,), (relay.address,)))
            link = await one.until_up(other)
            async with AsyncExitStack() as stack:
                await asyncio.gather(*(stack.enter_async_context(link.conversation("hello")) for _ in range(4)))
                assert link.ours >= 4

    run(scenario())


def test_a_link_over_a_relay_is_widened_without_dialling_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it failed before, and cost every widening seconds."""
    tries: list[object] = []
    dial_at_once = Arranging._dial_at_once

    async def count(*arguments: Any) -> bool:
        tries.append(arguments)
        return await dial_at_once(*arguments)

    async def scenario() -> None:
        async with around_a_relay() as (one, other, relay):
            monkeypatch.setattr(Arranging, "_dial_at_once", count)
            one.know(other.contact((REFUSING,), (relay.address,)))
            link = await one.until_up(other)
            tries.clear()
            async with AsyncExitStack() as stack:
                await asyncio.gather(*(stack.enter_async_context(link.conversation("hello")) for _ in range(8)))
            assert not tries

    run(scenario())


def test_where_there_is_no_route_nobody_dials_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a machine without IPv6 dialled a peer that has nothing else for seconds."""

    async def scenario() -> None:
        async with nodes(1, listening=False) as (node,):
            dialled: list[str] = []

            async def dial(endpoint: str, timeout: float, local_port: int) -> socket.socket:
                dialled.append(endpoint)
                raise OSError(errno.ENETUNREACH, "Network is unreachable")

            monkeypatch.setattr(introductions, "PUNCH_TIMEOUT", DEADLINE)
            monkeypatch.setattr(introductions, "dial", dial)
            await node.links.arranging._connect_both("a" * 20, (0,), ("[2a0e::1]:5",), REFUSING, None, 1)
            assert dialled == ["[2a0e::1]:5"]

    run(scenario())


@pytest.mark.parametrize("dialler", [0, 1])
def test_a_relayed_link_takes_the_direct_way_once_there_is_one(monkeypatch: pytest.MonkeyPatch, dialler: int) -> None:
    """Regression: two that met through a relay before one of them could dial the other stayed there for ever."""
    monkeypatch.setattr(links, "may_be_dialled", lambda contact: contact.endpoints != (REFUSING,))

    async def scenario() -> None:
        async with around_a_relay() as (one, other, relay):
            one.know(other.contact((REFUSING,), (relay.address,)))
            here, there = await one.until_up(other), await other.until_up(one)
            assert here.reach is there.reach is Reach.RELAYED
            near, far = (one, other) if dialler == 0 else (other, one)
            near.know(far.contact())
            await one.until(lambda: here.reach is Reach.OPEN)
            await other.until(lambda: there.reach is Reach.OPEN)
            await near.until(
                lambda: any(
                    not one.is_ours and one.reach is Reach.OPEN for one in near.links.link(far.peer).connections
                )
            )
            await asyncio.gather(*(talk(link) for link in (here, there) for _ in range(3)))
            assert all(idle.reach is Reach.OPEN for link in (here, there) for idle in link._idle)

    run(scenario())


def test_who_is_in_another_network_begins_to_meet_those_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the peer with the larger id waited for the other one, which did not know."""

    async def scenario() -> None:
        async with around_a_relay() as (one, other, relay):
            one.know(other.contact((REFUSING,), (relay.address,)))
            await asyncio.gather(one.until_up(other), other.until_up(one))
            monkeypatch.setattr(introductions, "MEETING_TIMEOUT", DEADLINE)
            one.know(eagerly=False)
            other.links.drop_all()
            assert not other.links.is_up(one.peer)
            other.know(one.contact((REFUSING,), (relay.address,)))
            assert (await other.until_up(one)).reach is Reach.RELAYED
            await talk(other.links.link(one.peer))

    run(scenario())


def test_an_address_of_a_node_that_is_out_of_reach_is_not_used() -> None:
    """Regression: its link was up by another of its addresses, such as an IPv4 one."""

    async def scenario() -> None:
        async with around_a_relay() as (one, other, relay):
            out_of_reach = relay.address.replace("127.0.0.1", "127.0.0.2")
            one.links.start(one.links.arranging.keep([out_of_reach]))
            node = await one.links.arranging._find(out_of_reach)
            assert node is not None
            one.know(other.contact((REFUSING,), (out_of_reach, relay.address)))
            assert (await one.until_up(other)).reach is Reach.RELAYED
            assert not node.is_reached
            assert one.links.arranging.addresses == (relay.address,)
            assert len(one.links.arranging.introducers) == 1

    run(scenario())


def test_a_node_relays_for_nobody_unless_told_at_how_many_megabits() -> None:
    async def scenario() -> None:
        async with nodes(2, relay_limit=8.0) as (one, relay):
            assert LinkSettings().relay_limit is None
            assert one.links.arranging.splicer is None
            assert relay.links.arranging.splicer is not None
            assert relay.links.arranging.splicer._throttle._rate == 1e6  # bytes

    run(scenario())


def test_a_node_that_does_not_relay_still_introduces() -> None:
    async def scenario() -> None:
        async with around_a_relay(limit=None) as (one, other, relay):
            one.know(other.contact((REFUSING,), (relay.address,)))
            await one.until(lambda: one.links.reach_of(other.peer) is Reach.NONE)
            meetings = [
                unpack(introductions._MeetingRequest, payload) for _, name, payload in other.log if name == MEET
            ]
            assert [meeting.token for meeting in meetings] == [None]

    run(scenario())


def test_a_node_sees_us_and_we_announce_what_it_saw() -> None:
    async def scenario() -> None:
        async with around_a_relay() as (one, _, _):
            port = one.links.port
            await one.until(lambda: bool(one.links.arranging.seen))
            assert one.links.endpoints([]) == (f"127.0.0.1:{port}",)
            one.links.arranging.look_again()
            assert one.links.endpoints([]) == ()
            await one.until(lambda: bool(one.links.arranging.seen))

    run(scenario())


def introduce(to: Node, *endpoints: str) -> bytes:
    return pack(introductions._Introduce(to=to.peer, endpoints=endpoints, connections=4))


def test_only_those_who_are_connected_are_introduced() -> None:
    """Regression: anybody could have a peer dial whomever they liked."""

    async def scenario() -> None:
        async with around_a_relay() as (one, other, relay), nodes(1) as (stranger,):
            ask = relay.links.arranging.on_introduce
            for asker, to in ((stranger, one), (one, stranger), (one, one)):
                with pytest.raises(RefusalError, match="not connected here"):
                    await ask(asker.peer, introduce(to))
            assert relay.links.arranging.splicer is not None
            assert not relay.links.arranging.splicer._meetings
            assert [name for _, name, _ in other.log if name == MEET] == []

    run(scenario())


def test_nobody_is_sent_to_where_the_other_one_was_not_seen() -> None:
    async def scenario() -> None:
        async with around_a_relay() as (one, other, relay):

            async def come(sender: str, payload: bytes) -> bytes:
                return pack(introductions._Introduced(endpoints=("127.0.0.1:7", "8.8.8.8:53", "[::1]:5")))

            other.answers[MEET] = come
            answer = await one.links.link(relay.peer).call(
                INTRODUCE, introduce(other, "127.0.0.1:9", "8.8.4.4:53"), 5.0
            )
            (meeting,) = (
                unpack(introductions._MeetingRequest, payload) for _, name, payload in other.log if name == MEET
            )
            assert (meeting.peer, meeting.endpoints) == (one.peer, ("127.0.0.1:9",))
            assert unpack(introductions._Introduced, answer).endpoints == ("127.0.0.1:7",)

    run(scenario())


def test_a_meeting_that_the_other_one_refuses_costs_the_relay_nothing() -> None:
    async def scenario() -> None:
        async with around_a_relay() as (one, other, relay):

            async def stay(sender: str, payload: bytes) -> bytes:
                raise RefusalError("we are busy")

            other.answers[MEET] = stay
            with pytest.raises(PeerUnreachableError, match="busy"):
                await one.links.link(relay.peer).call(INTRODUCE, introduce(other), 5.0)
            assert relay.links.arranging.splicer is not None
            assert not relay.links.arranging.splicer._meetings

    run(scenario())


def test_only_our_own_nodes_bring_us_together_with_others() -> None:
    async def scenario() -> None:
        async with around_a_relay() as (one, other, relay):
            meeting = pack(
                introductions._MeetingRequest(peer="a" * 20, endpoints=(REFUSING,), connections=1, token=None)
            )
            with pytest.raises(RefusalError, match="did not ask"):
                await one.links.arranging.on_meet(other.peer, meeting)
            seats = await one.links.arranging.on_meet(relay.peer, meeting)
            assert len(unpack(introductions._Introduced, seats).endpoints) == 1

    run(scenario())


def test_a_look_at_a_relay_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: one error that nobody had thought of, and no node introduced us any more."""

    async def scenario() -> None:
        async with nodes(2, relay_limit=1e9) as (one, relay):
            monkeypatch.setattr(introductions, "LOOK_INTERVAL", 0.01)
            errors = [ZeroDivisionError(), ValueError()]
            find = one.links.arranging._find

            async def find_later(address: str) -> Any:
                if errors:
                    raise errors.pop()
                return await find(address)

            monkeypatch.setattr(one.links.arranging, "_find", find_later)
            one.links.start(one.links.arranging.keep([relay.address.replace("/ip4/127.0.0.1", "/dns4/localhost")]))
            await one.until(lambda: bool(one.links.arranging.addresses))
            assert isinstance(await probe(relay.contact().endpoints[0]), ProbeAnswer)

    run(scenario())


def test_closing_in_the_middle_of_anything_leaves_nothing_open() -> None:
    async def scenario() -> None:
        for turns in range(0, 60, 3):
            async with nodes(2) as (one, other):
                one.know(other.contact())
                other.know(one.contact())
                for _ in range(turns):
                    await asyncio.sleep(0)

    run(scenario())
