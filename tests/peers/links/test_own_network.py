"""What a machine knows of its own network."""

from __future__ import annotations

import pytest

from peers.links import own_network
from peers.links.own_network import everywhere, is_behind_nat


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
    monkeypatch.setattr(own_network, "_own_addresses", lambda: addresses)
    assert is_behind_nat() is behind


def test_a_machine_looks_at_itself() -> None:
    assert isinstance(is_behind_nat(), bool)


@pytest.mark.parametrize("has_ipv6", [True, False])
def test_everywhere_is_what_the_machine_has(monkeypatch: pytest.MonkeyPatch, has_ipv6: bool) -> None:
    monkeypatch.setattr(own_network, "_has_ipv6", lambda: has_ipv6)
    expected = ["/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/7"] if has_ipv6 else ["/ip4/0.0.0.0/tcp/7"]
    assert everywhere(7) == tuple(expected)
