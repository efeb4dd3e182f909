"""What a machine knows of its own network."""

from __future__ import annotations

import errno
import socket

import pytest

from peers.network import own_network
from peers.network.own_network import everywhere, is_behind_nat, network_at, network_of


@pytest.mark.parametrize(
    ("addresses", "behind"),
    [
        ([], True),
        (["192.168.1.4"], True),
        (["100.64.0.7", "fd00::1"], True),
        (["11.0.0.1"], False),
        (["192.168.1.4", "2a0e::5"], False),
    ],
)
def test_private_addresses_are_behind_a_nat(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], behind: bool
) -> None:
    monkeypatch.setattr(own_network, "SOMEWHERE", addresses)
    monkeypatch.setattr(own_network, "address_towards", lambda target: target)
    assert is_behind_nat() is behind


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("/ip4/203.0.113.77/tcp/31337", "203.0.113.0/24"),
        ("/ip4/203.0.113.1/udp/1/quic-v1/p2p/12D3KooW", "203.0.113.0/24"),
        ("/ip6/2001:db8:1:2::3/tcp/4", "2001:db8:1::/48"),
        ("/ip6/::ffff:203.0.113.9/tcp/4", "203.0.113.0/24"),
        ("/ip4/203.0.113.77/tcp/1/p2p/12D3KooW/p2p-circuit", None),
        ("/p2p/12D3KooW/p2p-circuit", None),
        ("/dns4/example.org/tcp/1", None),
    ],
)
def test_an_address_says_which_network_it_is_in_unless_it_is_a_relays(address: str, network: str | None) -> None:
    assert network_at(address) == network


def test_links_are_counted_by_the_networks_that_runs_are_counted_by() -> None:
    """Regression: with one IPv6 /48 a stranger brought 65,536 times the made-up peers of a network."""
    assert network_of("192.0.2.1") == network_of("192.0.2.254") != network_of("192.0.3.1")
    assert network_of("2001:db8:0:1::1") == network_of("2001:db8:0:ffff::2") != network_of("2001:db8:1::1")
    assert network_of("127.0.0.1") == network_of("127.8.0.9") == network_of("::1")


def test_a_machine_looks_at_itself() -> None:
    assert isinstance(is_behind_nat(), bool)


@pytest.mark.parametrize("has_ipv6", [True, False])
def test_everywhere_is_what_the_machine_has(monkeypatch: pytest.MonkeyPatch, has_ipv6: bool) -> None:
    def bind(sock: socket.socket, where: object) -> None:
        if not has_ipv6:
            raise OSError(errno.EADDRNOTAVAIL, "no IPv6")

    monkeypatch.setattr(socket.socket, "bind", bind)
    expected = ["/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/7"] if has_ipv6 else ["/ip4/0.0.0.0/tcp/7"]
    assert everywhere(7) == tuple(expected)
