"""What facts of the network mean, each check with invented ones."""

from __future__ import annotations

import socket

import pytest

from opendiloco.doctor.facts import Addresses, Bandwidth, DialledBack, Node
from opendiloco.doctor.findings import Finding, Verdict
from opendiloco.doctor.network import chosen_ports, is_in_use, try_ports
from opendiloco.doctor.network_checks import (
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
from peers.links.sockets import listen
from peers.values.reach import Reach

PASS, WARN, FAIL, SKIPPED = Verdict
BROKEN = LocalNetworkError("libp2p's daemon cannot be run: Exec format error.", "Reinstall hivemind.")
SILENT = SwarmUnreachableError("no bootstrap node answered at /ip4/192.0.2.1.", "Check the address.")
NODE, OTHER = Node("/ip4/192.0.2.1", True, 0.04, 0.01), Node("/ip4/192.0.2.2", False)
OPEN = DialledBack("198.51.100.7", 4000, 4000, keeps_ports=False)
CONE = DialledBack("198.51.100.7", 4000, None, keeps_ports=True)
SYMMETRIC = DialledBack("198.51.100.7", 4000, None, keeps_ports=False)


@pytest.mark.parametrize(
    ("finding", "verdict", "says"),
    [
        (check_p2pd(0.4, None), PASS, "0.4 s"),
        (check_p2pd(None, BROKEN), FAIL, "Exec format error"),
        (check_ports([], None), PASS, "any free"),
        (check_ports([31338], None), PASS, "31338"),
        (check_ports([31338], LocalNetworkError("data port 31338 is in use.", "Choose another.")), FAIL, "in use"),
        (
            check_ports([31338], LocalNetworkError("data port 31338 is in use.", "Choose."), True),
            WARN,
            "by the volunteer",
        ),
        (check_ipv6(Addresses(None, None)), WARN, "no way to the internet"),
        (check_ipv6(Addresses("192.168.1.5", None)), PASS, "behind a router"),
        (check_ipv6(Addresses("8.8.4.4", None)), PASS, "own of IPv4"),
        (check_ipv6(Addresses("192.168.1.5", "2600::1")), PASS, "own of IPv6; over IPv4 it is behind"),
        (check_ipv6(Addresses("8.8.4.4", "2600::1")), PASS, "and one of IPv4"),
        (check_bootstrap([NODE], None), PASS, "1 of 1 answer, in 40 ms"),
        (check_bootstrap([NODE, OTHER], None), WARN, "silent: /ip4/192.0.2.2"),
        (check_bootstrap([OTHER], SILENT), FAIL, "no bootstrap node answered"),
        (check_clock([OTHER]), SKIPPED, "what time it is"),
        (check_clock([NODE]), PASS, "0.01 s behind"),
        (check_clock([Node("", True, 0.1, 1.5), Node("", True, 0.02, -2.0)]), WARN, "2.00 s ahead of"),
        (check_clock([Node("", True, 3.0, 1.5)]), PASS, "± 1.50"),
        (check_reach([], 0), SKIPPED, "no bootstrap node"),
        (check_reach([], 1), WARN, "443 and 80"),
        (check_reach([SYMMETRIC, CONE, OPEN], 3), PASS, "open: a bootstrap node has dialled 198.51.100.7, port 4000"),
        (check_reach([SYMMETRIC, CONE], 2), PASS, "punched"),
        (check_reach([SYMMETRIC], 1), WARN, "relayed"),
        (check_peers({}, 0, 0), SKIPPED, "nobody is there"),
        (check_peers({}, 0, 500), SKIPPED, "500 are there"),
        (check_peers({"a": Reach.OPEN, "b": Reach.RELAYED, "c": Reach.OPEN}, 0, 3), PASS, "2 open, 1 relayed"),
        (check_peers({"a": Reach.PUNCHED, "b": Reach.NONE}, 1, 3), WARN, "1 punched; no way to 2"),
        (check_peers({"a": Reach.NONE}, 1, 2), FAIL, "2 there, and no way"),
        (check_bandwidth(None, "busy"), SKIPPED, "busy"),
        (check_bandwidth(Bandwidth(1e8, 2e7, "a peer")), PASS, "100 Mbit/s up, 20 Mbit/s down, measured with a peer"),
        (check_bandwidth(Bandwidth(1e6, 2e7, "a bootstrap node")), WARN, "slow"),
    ],
)
def test_what_facts_mean(finding: Finding, verdict: Verdict, says: str) -> None:
    assert finding.verdict is verdict, finding
    assert says in f"{finding.found}\n{finding.remedy}"
    assert bool(finding.remedy) == (verdict in (WARN, FAIL)), "a remedy where there is something to do"


def test_programs_hear_the_reach_in_one_word() -> None:
    said = [check_reach([one], 1).values["reach"] for one in (OPEN, CONE, SYMMETRIC)]
    assert said == ["open", "punched", "relayed"]


def test_a_clock_that_is_ahead_has_a_positive_offset() -> None:
    assert check_clock([Node("", True, 0.1, -2.0)]).values["offset_seconds"] == 2.0


def test_ports_that_are_chosen_and_in_use() -> None:
    assert chosen_ports(("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/31337", "/ip4/0.0.0.0/tcp/31337"), 31338) == [31337, 31338]
    assert chosen_ports(("/ip4/0.0.0.0/tcp/0",), 0) == []
    [listener] = listen(["127.0.0.1"], 0)
    with listener:
        port = listener.getsockname()[1]
        for addresses, data_port in ((f"/ip4/127.0.0.1/tcp/{port}", 0), ("/ip4/127.0.0.1/tcp/0", port)):
            error = try_ports((addresses,), data_port)
            assert error is not None
            assert f"port {port}" in error.message
    assert try_ports(("/ip4/127.0.0.1/tcp/0",), 0) is None


def test_a_port_that_another_program_has_is_told_from_one_that_cannot_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        for taken in (try_ports([f"/ip4/127.0.0.1/tcp/{port}"], 0), try_ports(["/ip4/127.0.0.1/tcp/0"], port)):
            assert taken is not None
            assert is_in_use(taken)
    elsewhere = try_ports(["/ip4/192.0.2.1/tcp/31338"], 0)
    assert elsewhere is not None
    assert not is_in_use(elsewhere)
