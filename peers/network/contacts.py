"""Contacts of other peers, read from heartbeats: their endpoints, and the nodes that introduce them to others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from peers.network.sockets import endpoint_of, parse_endpoint
from peers.presence.heartbeat import Heartbeat, PeerState

INTRODUCING_VOLUNTEERS = 2  # volunteers, besides the invite's nodes, that each peer links with to be introduced by them


@dataclass(frozen=True)
class Contact:
    """The contact of one peer: `endpoints` at which the peer accepts connections, and `relays`, the multiaddrs of nodes
    that introduce the peer."""

    peer: str
    endpoints: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()


def contacts_of(heartbeats: Iterable[Heartbeat]) -> dict[str, Contact]:
    """Return a contact for each peer that is not leaving and names endpoints or relays, by peer id."""
    return {
        beat.peer: Contact(beat.peer, beat.endpoints, beat.relays)
        for beat in heartbeats
        if beat.state is not PeerState.LEAVING and (beat.endpoints or beat.relays)
    }


def open_volunteers(heartbeats: Iterable[Heartbeat], me: str) -> tuple[str, ...]:
    """Return multiaddrs of a few volunteers that all peers can dial. They introduce peers if no bootstrap node does.

    They are the same few for every peer, so that any two peers have one in common.
    """
    chosen = []
    for beat in sorted(heartbeats, key=lambda beat: beat.peer):
        is_open = any(map(_is_outside, beat.endpoints))
        public = [
            one for one in beat.addresses if "/p2p-circuit" not in one and (host := host_of(one)) and is_public(host)
        ]
        if is_open and public and beat.peer != me and beat.state is not PeerState.LEAVING:
            chosen.append(public[0])
    return tuple(chosen[:INTRODUCING_VOLUNTEERS])


def may_be_dialled(contact: Contact) -> bool:
    """Return True if the contact names an endpoint outside private networks, so that any peer may dial it."""
    return any(map(_is_outside, contact.endpoints))


def host_of(address: str) -> str | None:
    """Return the host (IP address or DNS name) in a multiaddr; None if the multiaddr has no host."""
    parts = address.split("/")
    return parts[2] if len(parts) > 2 and parts[1] in ("ip4", "ip6", "dns", "dns4", "dns6") else None


def own_endpoints(addresses: Sequence[str], port: int, seen: Sequence[str] = ()) -> tuple[str, ...]:
    """Return at most eight endpoints at which other peers may dial our data port, the most useful first.

    `addresses` are our multiaddrs, `seen` endpoints at which a peer outside has reached the port. Loopback addresses
    are included only if there are no others.
    """
    hosts = [host for address in addresses if "/p2p-circuit" not in address and (host := host_of(address))]
    numeric = [host for host in dict.fromkeys(hosts) if is_numeric(host)]
    outside = [host for host in numeric if not (ip_address(host).is_loopback or ip_address(host).is_link_local)]
    return tuple(dict.fromkeys([*seen, *(endpoint_of(host, port) for host in outside or numeric)]))[:8]


def public_only(endpoints: Sequence[str], node: str) -> tuple[str, ...]:
    """Return the endpoints sent by `node`. If the node is on the internet, omit endpoints in private networks.

    A node on the internet must not make us dial machines of our own network.
    """
    return tuple(filter(_is_outside, endpoints)) if _is_outside(node) else tuple(endpoints)


def is_local(endpoint: str) -> bool:
    """Return True if an endpoint's host is this machine itself."""
    return is_loopback(parse_endpoint(endpoint)[0])


def is_loopback(host: str | None) -> bool:
    """Return True if a host is localhost or a loopback address."""
    ip = _ip(host)
    return host == "localhost" or (ip is not None and ip.is_loopback)


def is_public(host: str) -> bool:
    """Return True if a host is a public IP address."""
    ip = _ip(host)
    return ip is not None and ip.is_global


def is_numeric(host: str) -> bool:
    """Return True if a host is an IP address, False if the host is a name."""
    return _ip(host) is not None


def _is_outside(endpoint: str) -> bool:
    """Return True if an endpoint's host is a public IP address or a name."""
    ip = _ip(parse_endpoint(endpoint)[0])
    return ip is None or ip.is_global


def _ip(host: str | None) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host or "")
    except ValueError:
        return None
