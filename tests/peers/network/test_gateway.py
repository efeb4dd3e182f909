"""The default gateway: found in the kernel's table, asked by PCP and NAT-PMP, not believed when it talks nonsense."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from ipaddress import IPv4Address
from typing import TypeVar

from hypothesis import given
from hypothesis import strategies as st

from peers.network.gateway import Gateway, Mapping, Where, _read_default_gateway, default_gateway
from tests.peers.network.fake_routers import EXTERNAL, NatPmpRouter, PcpRouter, Respond, datagram_router

Result = TypeVar("Result")
PORT = 31338
BRIEFLY = (0.01, 0.01)  # seconds: for routers that are not to answer

ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
wlan0\t00000000\t0103A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0
eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0
down0\t00000000\t0100000B\t0002\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0000000A\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0
tun0\t00000000\t00000000\t0001\t0\t0\t50\t00000000\t0\t0\t0
"""


def within_a_minute(work: Coroutine[None, None, Result]) -> Result:
    async def scenario() -> Result:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(scenario())


def test_the_gateway_of_the_best_route_is_asked() -> None:
    assert _read_default_gateway(ROUTES) == IPv4Address("10.0.0.1")


@given(st.text(max_size=200) | st.text(alphabet="\t 0123456789ABCDEF\n", max_size=400))
def test_a_table_that_cannot_be_read_has_no_gateway(text: str) -> None:
    assert _read_default_gateway(f"Iface\n{text}") is None


def test_this_machine_has_a_gateway_or_none() -> None:
    assert default_gateway() is None or default_gateway()[1] == 5351  # type: ignore[index]


def test_pcp_maps_a_port_and_ends_the_mapping() -> None:
    router = PcpRouter()

    async def scenario() -> None:
        async with datagram_router(router.respond) as where:
            client = Gateway(lambda: where)
            assert await client.open(PORT, 3600) == Mapping(EXTERNAL, PORT + 1000, 120)
            assert router.mappings == {PORT: (PORT + 1000, 3600)}
            await client.close(PORT)
            assert router.mappings == {}

    within_a_minute(scenario())


def test_nat_pmp_maps_a_port_and_ends_the_mapping() -> None:
    router = NatPmpRouter()

    async def scenario() -> None:
        async with datagram_router(router.respond) as where:
            client = Gateway(lambda: where)
            assert await client.open(PORT, 3600) == Mapping(EXTERNAL, PORT, 3600)
            assert router.mappings == {PORT: PORT}
            await client.close(PORT)
            assert router.mappings == {}

    within_a_minute(scenario())


def mapping_of(respond: Respond) -> Mapping | None:
    async def scenario() -> Mapping | None:
        async with datagram_router(respond) as where:
            return await Gateway(lambda: where, BRIEFLY).open(PORT, 3600)

    return within_a_minute(scenario())


def test_a_router_that_does_not_answer_pcp_is_asked_by_nat_pmp() -> None:
    router = NatPmpRouter()
    assert mapping_of(lambda data: router.respond(data) if data[0] == 0 else []) == Mapping(EXTERNAL, PORT, 3600)


def test_nonsense_before_the_answer_is_passed_over() -> None:
    router = PcpRouter()
    assert mapping_of(lambda data: [b"", b"\x02", bytes(60), bytes(2000), *router.respond(data)]) is not None


def test_nonsense_alone_is_no_mapping() -> None:
    assert mapping_of(lambda data: [b"", data, bytes(60), bytes(2000)] * 100) is None


def test_a_request_that_was_lost_is_sent_again() -> None:
    router, asked = PcpRouter(), list[bytes]()

    def respond(data: bytes) -> list[bytes]:
        asked.append(data)
        return router.respond(data) if len(asked) == 3 else []

    async def scenario() -> None:
        async with datagram_router(respond) as where:
            assert await Gateway(lambda: where, (0.01, 0.01, 60.0)).open(PORT, 3600) is not None

    within_a_minute(scenario())
    assert asked == asked[:1] * 3


def test_where_nobody_listens_nothing_is_waited_for() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unused:
        unused.bind(("127.0.0.1", 0))
        where = unused.getsockname()
    assert within_a_minute(Gateway(lambda: where, (3600.0,)).open(PORT, 3600)) is None


def test_without_a_gateway_nobody_is_asked() -> None:
    def nowhere() -> Where | None:
        return None

    client = Gateway(nowhere)
    assert within_a_minute(client.open(PORT, 3600)) is None
    within_a_minute(client.close(PORT))
