"""Of many addresses those are begun with at which a libp2p node answers, and dead ones cost no time."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from peers.errors import SwarmUnreachableError
from peers.network import first_contact
from peers.network.first_contact import (
    CONTACT_LIMIT,
    GREETING,
    TLS,
    _why_silent,
    endpoint,
    first_contacts,
    reach,
    which_answer,
)
from peers.values.identity import Identity

PEERS = [Identity.generate().peer_id for _ in range(12)]


@asynccontextmanager
async def node(peer: str, greeting: bytes = GREETING) -> AsyncIterator[str]:
    """Something that listens, greets, and has no TLS; yields its multiaddr."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await reader.read(1)
        writer.write(b"\x03na\n".ljust(len(TLS)))
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


async def no_route(host: str, port: int) -> None:
    raise OSError(errno.ENETUNREACH, "Network is unreachable")


async def no_such_name(host: str, port: int) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


async def no_answer(host: str, port: int) -> None:
    raise TimeoutError


@pytest.mark.parametrize(
    ("connect", "reason"),
    [
        (None, "nothing listens on port"),
        (no_such_name, "no machine has the name 127.0.0.1"),
        (no_answer, "no answer from 127.0.0.1: the machine is off, or a firewall"),
        (no_route, "no way to 127.0.0.1 (Network is unreachable): check this machine's network"),
    ],
)
def test_the_error_says_of_each_node_why_it_was_not_reached(
    connect: Callable[[str, int], Awaitable[None]] | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a wrong name, a closed port and another key were told in the same words."""
    if connect is not None:
        monkeypatch.setattr(asyncio, "open_connection", connect)
    contacts = [dead(PEERS[0]), dead(PEERS[1])]

    async def start() -> None:
        raise SwarmUnreachableError("no bootstrap node answered.", "Try another.")

    with pytest.raises(SwarmUnreachableError) as raised:
        asyncio.run(reach(start, contacts))
    assert all(f"{address}: {reason}" in raised.value.message for address in contacts)
    assert raised.value.remedy == "Try another."


def test_another_program_in_the_place_of_a_node_is_told() -> None:
    async def scenario() -> None:
        async with node(PEERS[0], b"SSH-2.0-OpenSSH_9.2\r\n") as address:
            assert "another program than a bootstrap node answers" in await _why_silent(address)

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
