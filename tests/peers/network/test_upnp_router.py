"""A UPnP router on the loopback interface: found, asked, and left alone when it talks nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

import pytest

from peers.network.gateway import Mapping
from peers.network.upnp import HTTP_LIMIT, Upnp
from tests.peers.network.fake_routers import EXTERNAL, UpnpRouter, datagram_router

Result = TypeVar("Result")
PORT = 31338
BRIEFLY = 0.2  # seconds: for searches that find nothing


def within_a_minute(work: Coroutine[None, None, Result]) -> Result:
    async def scenario() -> Result:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(scenario())


async def mapping_of(router: UpnpRouter, seconds: float = 60.0) -> Mapping | None:
    async with router.running() as where:
        return await Upnp(where, seconds).open(PORT, 3600)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_port_is_mapped_and_the_mapping_ended(chunked: bool) -> None:
    router = UpnpRouter()
    router.chunked = chunked

    async def scenario() -> None:
        async with router.running() as where:
            client = Upnp(where)
            assert await client.open(PORT, 3600) == Mapping(EXTERNAL, PORT, 3600)
            assert router.mappings == {PORT: ("127.0.0.1", PORT, 3600)}
            await client.close(PORT)
            assert router.mappings == {}

    within_a_minute(scenario())


def test_renewing_asks_the_same_router_without_a_search() -> None:
    router = UpnpRouter()

    async def scenario() -> None:
        async with router.running() as where:
            client = Upnp(where)
            first = await client.open(PORT, 3600)
            router.mappings.clear()  # it has restarted
            router.search_reply = lambda data: []  # type: ignore[method-assign]
            assert await client.open(PORT, 3600) == first
            assert PORT in router.mappings

    within_a_minute(scenario())


def test_a_router_that_is_gone_is_looked_for_again() -> None:
    async def scenario() -> None:
        old, new = UpnpRouter(), UpnpRouter()
        now = old

        async with datagram_router(lambda data: now.search_reply(data)) as where:
            client = Upnp(where)
            async with old.running():
                await client.open(PORT, 3600)
            async with new.running():
                now = new
                assert await client.open(PORT, 3600) is not None
                assert PORT in new.mappings

    within_a_minute(scenario())


def test_a_port_that_is_taken_is_not_insisted_on() -> None:
    router = UpnpRouter()
    router.taken = {PORT}
    mapping = within_a_minute(mapping_of(router))
    assert mapping is not None
    assert mapping.port != PORT
    assert router.mappings == {mapping.port: ("127.0.0.1", PORT, 3600)}


def test_a_router_may_know_only_permanent_mappings() -> None:
    router = UpnpRouter()
    router.only_permanent = True
    assert within_a_minute(mapping_of(router)) is not None
    assert router.mappings == {PORT: ("127.0.0.1", PORT, 0)}


@pytest.mark.parametrize(
    "description",
    ["", "<root/>", "x" * (HTTP_LIMIT + 1), "<!DOCTYPE x><root/>"],
    ids=["empty", "other", "long", "type"],
)
def test_a_description_that_is_nonsense_is_no_router(description: str) -> None:
    router = UpnpRouter()
    router.description = description
    assert within_a_minute(mapping_of(router, BRIEFLY)) is None


@pytest.mark.parametrize("text", ["", "the internet", "1.2.3", "::1", "1.2.3.4.5", "999.1.1.1"])
def test_an_address_that_is_nonsense_is_no_mapping(text: str) -> None:
    router = UpnpRouter(external=text)
    assert within_a_minute(mapping_of(router, BRIEFLY)) is None
    assert router.mappings == {}


def test_who_does_not_speak_http_is_no_router() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(babble, "127.0.0.1", 0)
        router = UpnpRouter()
        router._where = server.sockets[0].getsockname()
        async with server, datagram_router(router.search_reply) as where:
            assert await Upnp(where, BRIEFLY).open(PORT, 3600) is None

    within_a_minute(scenario())


def test_silence_is_no_router() -> None:
    async def scenario() -> None:
        async with datagram_router(lambda data: []) as where:
            client = Upnp(where, BRIEFLY)
            assert await client.open(PORT, 3600) is None
            await client.close(PORT)

    within_a_minute(scenario())
