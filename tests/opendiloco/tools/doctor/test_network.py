"""Checks of the network, on invented ones."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from opendiloco.tools.doctor import network
from opendiloco.tools.doctor.findings import Finding, Verdict
from opendiloco.tools.doctor.network import (
    Bandwidth,
    Node,
    _DialledBack,
    check_bandwidth,
    check_bootstrap,
    check_clock,
    check_ipv6,
    check_p2pd,
    check_peers,
    check_ports,
    check_reach,
)
from peers.errors import LocalNetworkError, SwarmUnreachableError
from peers.network.sockets import listen
from peers.values.wire import Reach

PASS, WARN, FAIL, SKIPPED = Verdict
SILENT = SwarmUnreachableError("no bootstrap node answered at /ip4/192.0.2.1.", "Check the address.")
NODE, OTHER = Node("/ip4/192.0.2.1", True, 0.04, 0.01), Node("/ip4/192.0.2.2", False)
OPEN = _DialledBack("198.51.100.7", 4000, 4000, keeps_ports=False)
CONE = _DialledBack("198.51.100.7", 4000, None, keeps_ports=True)
SYMMETRIC = _DialledBack("198.51.100.7", 4000, None, keeps_ports=False)


@pytest.mark.parametrize(
    ("finding", "verdict", "says"),
    [
        (check_bootstrap([NODE], None), PASS, "1 of 1 answer, in 40 ms"),
        (check_bootstrap([NODE, OTHER], None), WARN, "silent: /ip4/192.0.2.2"),
        (check_bootstrap([OTHER], SILENT), FAIL, "no bootstrap node answered"),
        (check_clock([OTHER]), SKIPPED, "has given its time"),
        (check_clock([NODE]), PASS, "0.01 s behind"),
        (check_clock([Node("", True, 0.1, 1.5), Node("", True, 0.02, -2.0)]), WARN, "2.00 s ahead of"),
        (check_clock([Node("", True, 3.0, 1.5)]), PASS, "± 1.50"),
        (check_peers({}, 0, 0), SKIPPED, "no live peer"),
        (check_peers({}, 0, 500), SKIPPED, "500 are live"),
        (check_peers({"a": Reach.OPEN, "b": Reach.RELAYED, "c": Reach.OPEN}, 0, 3), PASS, "2 open, 1 relayed"),
        (check_peers({"a": Reach.PUNCHED, "b": Reach.NONE}, 1, 3), WARN, "1 punched; no path to 2"),
        (check_peers({"a": Reach.NONE}, 1, 2), FAIL, "2 live, and no path"),
        (check_bandwidth(None), SKIPPED, "no peer or bootstrap node is free"),
        (check_bandwidth(Bandwidth(1e8, 2e7, "a peer")), PASS, "100 Mbit/s up, 20 Mbit/s down, measured with a peer"),
        (check_bandwidth(Bandwidth(1e6, 2e7, "a bootstrap node")), WARN, "slow"),
    ],
)
def test_what_a_check_finds(finding: Finding, verdict: Verdict, says: str) -> None:
    assert finding.verdict is verdict, finding
    assert says in f"{finding.found}\n{finding.remedy}"
    assert bool(finding.remedy) == (verdict in (WARN, FAIL)), "a remedy where there is something to do"


@pytest.mark.parametrize(
    ("ipv4", "ipv6", "verdict", "says"),
    [
        (None, None, WARN, "no route to the internet"),
        ("192.168.1.5", None, PASS, "behind a router"),
        ("8.8.4.4", None, PASS, "public IPv4 address"),
        ("192.168.1.5", "2600::1", PASS, "public IPv6 address; over IPv4 it is behind"),
        ("8.8.4.4", "2600::1", PASS, "and a public IPv4 address"),
    ],
)
def test_addresses(
    ipv4: str | None, ipv6: str | None, verdict: Verdict, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = iter((ipv4, ipv6))
    monkeypatch.setattr(network, "address_towards", lambda somewhere: next(addresses))
    found = check_ipv6()
    assert found.verdict is verdict
    assert says in found.found


@pytest.mark.parametrize(
    ("seen", "node", "verdict", "says", "reach"),
    [
        ([], OTHER, SKIPPED, "no bootstrap node", None),
        ([], NODE, WARN, "no bootstrap node's data port answers: 192.0.2.1:31338", None),
        ([SYMMETRIC, CONE, OPEN], NODE, PASS, "open: a bootstrap node has dialled 198.51.100.7, port 4000", "open"),
        ([SYMMETRIC, CONE], NODE, PASS, "punched", "punched"),
        ([SYMMETRIC], NODE, WARN, "relayed", "relayed"),
    ],
)
def test_how_others_reach_this_machine(
    seen: list[_DialledBack],
    node: Node,
    verdict: Verdict,
    says: str,
    reach: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def dialled_back(transport: object, addresses: Sequence[str], places: Sequence[str]) -> list[_DialledBack]:
        return seen

    async def data_place(transport: object, address: str) -> str:
        return "192.0.2.1:31338"

    monkeypatch.setattr(network, "_data_place", data_place)
    monkeypatch.setattr(network, "_dialled_back", dialled_back)
    transport: Any = None
    found = asyncio.run(check_reach(transport, [node]))
    assert found.verdict is verdict
    assert says in f"{found.found}\n{found.remedy}"
    assert found.values.get("reach") == reach


def test_a_daemon_that_starts_and_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def connected(*args: object, **options: object) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def broken(*args: object, **options: object) -> AsyncIterator[None]:
        raise LocalNetworkError("libp2p's daemon cannot be run: Exec format error.", "Reinstall hivemind.")
        yield

    monkeypatch.setattr(network, "connected", connected)
    assert asyncio.run(check_p2pd()).found.startswith("libp2p's daemon started in ")
    monkeypatch.setattr(network, "connected", broken)
    found = asyncio.run(check_p2pd())
    assert (found.verdict, found.remedy) == (FAIL, "Reinstall hivemind.")


def test_a_clock_that_is_ahead_has_a_positive_offset() -> None:
    assert check_clock([Node("", True, 0.1, -2.0)]).values["offset_seconds"] == 2.0


def test_ports_that_are_chosen_and_in_use() -> None:
    assert check_ports(("/ip4/127.0.0.1/tcp/0",), 0, has_volunteer=False).found.startswith("no port is chosen")
    [listener] = listen(["127.0.0.1"], 0)
    port = listener.getsockname()[1]
    with listener:
        for addresses, data_port in ((f"/ip4/127.0.0.1/tcp/{port}", 0), ("/ip4/127.0.0.1/tcp/0", port)):
            taken = check_ports((addresses,), data_port, has_volunteer=False)
            assert taken.verdict is FAIL
            assert f"port {port}" in taken.found
    both = ("/ip4/127.0.0.1/tcp/0", f"/ip4/127.0.0.1/tcp/{port}", f"/ip4/127.0.0.1/tcp/{port}")
    assert check_ports(both, 0, has_volunteer=False).found == f"free: {port}"


def test_a_port_that_this_machines_volunteer_may_have_is_told_from_one_that_cannot_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        for address, data_port in ((f"/ip4/127.0.0.1/tcp/{port}", 0), ("/ip4/127.0.0.1/tcp/0", port)):
            taken = check_ports([address], data_port, has_volunteer=True)
            assert taken.verdict is WARN
            assert "by the volunteer" in taken.found
    elsewhere = check_ports(["/ip4/192.0.2.1/tcp/31338"], 0, has_volunteer=True)
    assert elsewhere.verdict is FAIL
