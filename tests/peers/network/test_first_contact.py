"""Of many addresses those are begun with at which a libp2p node answers, and dead ones cost no time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from peers.errors import SwarmUnreachableError
from peers.network import first_contact
from peers.network.first_contact import CONTACT_LIMIT, GREETING, endpoint, first_contacts, reach, which_answer
from peers.values.identity import Identity

PEERS = [Identity.generate().peer_id for _ in range(12)]


@asynccontextmanager
async def node(peer: str, greeting: bytes = GREETING) -> AsyncIterator[str]:
    """Something that listens and greets; yields its multiaddr."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        yield f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}/p2p/{peer}"


def dead(peer: str) -> str:
    """An address at which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"/ip4/127.0.0.1/tcp/{unused.getsockname()[1]}/p2p/{peer}"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("/ip4/192.0.2.1/tcp/31337/p2p/X", ("192.0.2.1", 31337)),
        ("/ip6/2001:db8::1/tcp/31337/p2p/X/", ("2001:db8::1", 31337)),
        ("/dns4/node.example/tcp/443/p2p/X", ("node.example", 443)),
        ("/ip4/192.0.2.1/tcp/99999/p2p/X", None),
        ("/ip4/192.0.2.1/udp/31337/quic-v1/p2p/X", None),
        ("/ip4/192.0.2.1/tcp/31337/p2p/X/p2p-circuit/p2p/Y", None),
        ("", None),
    ],
)
def test_plain_tcp_can_be_tried(address: str, expected: tuple[str, int] | None) -> None:
    assert endpoint(address) == expected


def test_a_single_address_is_left_to_libp2p() -> None:
    only = [dead(PEERS[0])]
    assert asyncio.run(first_contacts(only)) == only
    assert asyncio.run(first_contacts(())) == []


def test_those_that_answer_are_begun_with_given_ones_first() -> None:
    async def scenario() -> None:
        async with node(PEERS[0]) as given, node(PEERS[1]) as remembered, node(PEERS[2], b"SSH-2.0-x\r\n") as other:
            wanted = [dead(PEERS[3]), given, other]
            assert await first_contacts(wanted, [remembered, dead(PEERS[4]), given]) == [given, remembered]

    asyncio.run(scenario())


def test_where_none_answers_libp2p_says_so() -> None:
    given = [dead(PEERS[0]), dead(PEERS[1])]
    assert asyncio.run(first_contacts(given, [dead(PEERS[2])])) == given


def test_what_cannot_be_tried_is_kept() -> None:
    over_quic = f"/ip4/192.0.2.1/udp/31337/quic-v1/p2p/{PEERS[0]}"

    async def scenario() -> None:
        async with node(PEERS[1]) as alive:
            assert await first_contacts([over_quic, alive], [f"{over_quic}x"]) == [over_quic, alive]

    asyncio.run(scenario())


def test_a_few_are_enough() -> None:
    async def scenario() -> None:
        async with node(PEERS[0]) as alive:
            aliases = [alive.replace(PEERS[0], peer) for peer in PEERS]
            assert await first_contacts(aliases) == aliases[:CONTACT_LIMIT]

    asyncio.run(scenario())


def test_silent_ones_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour's wait for the first answer ends soon after it."""
    monkeypatch.setattr(first_contact, "ANSWER_SECONDS", 3600.0)
    monkeypatch.setattr(first_contact, "MORE_SECONDS", 0.05)

    async def scenario() -> None:
        async with node(PEERS[0], b"") as silent, node(PEERS[1]) as alive, asyncio.timeout(240):
            assert await which_answer([silent, alive]) == {alive}

    asyncio.run(scenario())


def test_silence_of_all_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_contact, "ANSWER_SECONDS", 0.05)

    async def scenario() -> None:
        async with node(PEERS[0], b"") as silent:
            assert await which_answer([silent, "/dns4/no such host\udc80/tcp/1/p2p/X"]) == set()

    asyncio.run(scenario())


@pytest.mark.parametrize(("failures", "answers", "tries"), [(0, True, 1), (1, True, 2), (2, True, 2), (1, False, 1)])
def test_who_does_not_reach_a_node_that_answers_tries_once_more(failures: int, answers: bool, tries: int) -> None:
    async def scenario() -> None:
        tried = 0

        async def start() -> str:
            nonlocal tried
            tried += 1
            if tried <= failures:
                raise SwarmUnreachableError("no bootstrap node answered", "Check the address.")
            return "started"

        async with node(PEERS[0]) as address:
            contacts = [address if answers else dead(PEERS[0])]
            if tries > failures:
                assert await reach(start, contacts) == "started"
            else:
                with pytest.raises(SwarmUnreachableError):
                    await reach(start, contacts)
        assert tried == tries

    asyncio.run(scenario())
