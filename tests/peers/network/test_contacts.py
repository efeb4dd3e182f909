"""What heartbeats say of where peers are, and what we say of ourselves."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from peers.network.contacts import Contact, contacts_of, host_of, is_local, own_endpoints, public_only
from peers.presence.heartbeat import Heartbeat, PeerState
from tests.peers.heartbeats import beat
from tests.peers.logs import first_log


def heartbeat_of(peer: str, **fields: Any) -> Heartbeat:
    return beat(peer, first_log(), **fields)


def test_contacts_are_of_those_who_stay_and_say_where_they_are() -> None:
    beats = [
        heartbeat_of("a", endpoints=("1.2.3.4:5",)),
        heartbeat_of("b", relays=("/ip4/1.2.3.4/tcp/5/p2p/x",)),
        heartbeat_of("c"),
        heartbeat_of("d", endpoints=("1.2.3.4:5",), state=PeerState.LEAVING),
    ]
    assert contacts_of(beats) == {
        "a": Contact("a", ("1.2.3.4:5",)),
        "b": Contact("b", (), ("/ip4/1.2.3.4/tcp/5/p2p/x",)),
    }


@pytest.mark.parametrize(
    "endpoint", ["999.1.1.1:5", "[:::]:5", "1.2.3.4:0", "1.2.3.4:65536", "1.2.3.4", "host:5", "1.2.3.4:99999999999"]
)
def test_a_heartbeat_whose_endpoints_are_none_is_refused_at_the_door(endpoint: str) -> None:
    """Regression: who had such a peer in view could not look at its other endpoints either."""
    with pytest.raises(ValidationError):
        heartbeat_of("a", endpoints=(endpoint,))


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("/ip4/1.2.3.4/tcp/5", "1.2.3.4"),
        ("/ip6/::1/tcp/5/p2p/x", "::1"),
        ("/dns4/boot.example/tcp/5", "boot.example"),
        ("/unix/tmp/x", None),
        ("nonsense", None),
    ],
)
def test_the_host_of_a_multiaddr(address: str, host: str | None) -> None:
    assert host_of(address) == host


def test_own_endpoints_have_the_data_port_and_what_others_saw_comes_first() -> None:
    addresses = ["/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.5/tcp/1", "/ip6/2001:db8::1/tcp/1", "/ip6/fe80::1/tcp/1"]
    relayed = "/ip4/8.8.8.8/tcp/1/p2p/x/p2p-circuit/p2p/y"
    assert own_endpoints([*addresses, relayed, "/dns4/me.example/tcp/1"], 7, ["8.8.4.4:7"]) == (
        "8.8.4.4:7",
        "192.168.1.5:7",
        "[2001:db8::1]:7",
    )
    assert own_endpoints(addresses[:1], 7) == ("127.0.0.1:7",)
    assert own_endpoints([], 7) == ()


def test_a_node_on_the_internet_sends_nobody_into_a_private_network() -> None:
    endpoints = ("192.168.1.1:80", "8.8.8.8:5", "[fd00::1]:5", "127.0.0.1:5")
    assert public_only(endpoints, "8.8.4.4:1") == public_only(endpoints, "boot.example:1") == ("8.8.8.8:5",)
    assert public_only(endpoints, "192.168.1.9:1") == endpoints


def test_what_is_on_this_machine() -> None:
    assert [is_local(one) for one in ("127.0.0.1:1", "[::1]:1", "localhost:1", "8.8.8.8:1", "boot.example:1")] == [
        True,
        True,
        True,
        False,
        False,
    ]
