"""Peers that find each other in the local network: here that of this machine alone."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence

import psutil
import pytest
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from peers.network import neighbours
from peers.network.neighbours import MOST_ADDRESSES, _local_interfaces, announced
from peers.values.identity import Identity

LOOPBACK = ("127.0.0.1",)
RUN = "tiny-zhs4x2v4orm3g5qth6tbubsj4nnq5zcr"
FIRST, SECOND, HELPER = (Identity.generate().peer_id for _ in range(3))
DEADLINE = 30.0


def address_of(peer: str, port: int = 4001) -> str:
    return f"/ip4/192.168.1.7/tcp/{port}/p2p/{peer}"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speak of a service that nobody else does: other tests on this machine hear us, and we them."""
    monkeypatch.setattr(neighbours, "_local_interfaces", lambda: list(LOOPBACK))
    monkeypatch.setattr(neighbours, "SERVICE", f"_test-{os.urandom(4).hex()}._tcp.local.")
    if not carries_multicast(LOOPBACK[0]):
        pytest.skip("this machine's loopback interface carries no multicast")


def carries_multicast(interface: str) -> bool:
    """Whether what is said there is heard there."""
    group = "224.0.0.251"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind(("", 0))
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(interface))
            membership = socket.inet_aton(group) + socket.inet_aton(interface)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
            sock.sendto(b"is anybody here?", (group, sock.getsockname()[1]))
            sock.settimeout(1.0)
            return sock.recv(64) == b"is anybody here?"
        except OSError:
            return False


async def found_when(count: int, run: str = RUN) -> tuple[str, ...]:
    """Look until so many addresses are found: whoever announces itself says so more than once."""
    async with asyncio.timeout(DEADLINE):
        while len(found := await neighbours.neighbours(run)) != count:
            await asyncio.sleep(0)  # where nothing can be heard it has not waited
    return found


@pytest.mark.usefixtures("alone")
def test_those_in_the_run_are_found_before_those_who_help_any_and_nobody_else() -> None:
    async def scenario() -> None:
        async with (
            announced(HELPER, "", [address_of(HELPER)]),
            announced(FIRST, RUN, [address_of(FIRST)]),
            announced(SECOND, "another-run", [address_of(SECOND)]),
        ):
            assert await found_when(2) == (address_of(FIRST), address_of(HELPER))
            assert await found_when(1, "a-third-run") == (address_of(HELPER),)
        assert await found_when(0) == (), "they say goodbye"

    asyncio.run(scenario())


@pytest.mark.usefixtures("alone")
def test_only_a_few_addresses_are_told_and_only_such_as_can_be_dialled() -> None:
    many = [address_of(FIRST, port) for port in range(4001, 4001 + 2 * MOST_ADDRESSES)]

    async def scenario() -> None:
        wrong = [f"/dnsaddr/example.org/p2p/{FIRST}", f"{address_of(HELPER)}/p2p-circuit/p2p/{FIRST}"]
        async with announced(FIRST, RUN, [*wrong, *many]):
            assert await found_when(MOST_ADDRESSES) == tuple(many[:MOST_ADDRESSES])

    asyncio.run(scenario())


@pytest.mark.usefixtures("alone")
def test_what_a_liar_says_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    service = neighbours._service

    def lying(peer: str, run: str, addresses: Sequence[str]) -> object:
        info = service(peer, run, addresses)
        assert info is not None
        text = {"run": run, "a0": f"/ip4/999.1.1.1/tcp/1/p2p/{FIRST}", "a1": f"/ip4/8.8.8.8/tcp/1/p2p/{FIRST}"}
        text |= {"a2": f"/ip4/10.0.0.1/tcp/99999/p2p/{'x' * 52}", "a3": addresses[0]}
        return AsyncServiceInfo(
            info.type, info.name, addresses=info.addresses, port=info.port, properties=text, server=info.server
        )

    async def scenario() -> None:
        monkeypatch.setattr(neighbours, "_service", lying)
        async with announced(FIRST, RUN, [address_of(FIRST)]):
            assert await found_when(1) == (address_of(FIRST),)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("towards", "found"),
    [("8.8.8.8", []), ("192.168.1.7", ["192.168.1.7"]), (None, ["192.168.1.7"])],
    ids=["a public address", "a home", "no internet"],
)
def test_only_local_networks_hear_of_us(monkeypatch: pytest.MonkeyPatch, towards: str | None, found: list[str]) -> None:
    def interface(address: str, family: int = 2) -> object:
        return type("Address", (), {"address": address, "family": family})

    ours = {"lo": [interface("127.0.0.1")], "eth0": [interface("192.168.1.7"), interface("fe80::1", 10)]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: ours | {"wan": [interface("8.8.8.8")]})
    monkeypatch.setattr(neighbours, "address_towards", lambda target: towards)
    assert _local_interfaces() == found


def test_where_nothing_can_be_said_or_heard_all_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: AsyncZeroconf, **options: object) -> None:
        raise OSError("no multicast here")

    monkeypatch.setattr(AsyncZeroconf, "__init__", refuses)
    monkeypatch.setattr(neighbours, "_local_interfaces", lambda: list(LOOPBACK))

    async def scenario() -> None:
        async with announced(FIRST, RUN, [address_of(FIRST)]):
            await asyncio.sleep(0)
            assert await neighbours.neighbours(RUN) == ()

    asyncio.run(scenario())
