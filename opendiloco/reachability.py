"""How a run's peers reach each other, in words for people, from heartbeats alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import ip_address

from peers.heartbeat import NAMED_PEERS, Heartbeat
from peers.links.contacts import host_of
from peers.links.sockets import parse_endpoint

OPEN, BEHIND_NAT, UNKNOWN = "open", "NAT", "-"


def reachability(beat: Heartbeat) -> str:
    """Return whether others can dial a peer: "open"; "NAT" where only nodes that introduce it can be; "-": unknown."""
    hosts = [parse_endpoint(endpoint)[0] for endpoint in beat.endpoints]
    if any(map(_is_public, hosts)) or (hosts and not any(_is_public(host_of(relay)) for relay in beat.relays)):
        return OPEN
    return BEHIND_NAT if beat.relays else UNKNOWN


def reach_lines(heartbeats: Iterable[Heartbeat]) -> list[str]:
    """Return a line for each peer that reaches others only through relays, or not at all, or whose work is in vain."""
    lines = []
    for beat in heartbeats:
        said = [f"relayed to {_count(beat.relayed)}"] if beat.relayed else []
        said += [f"cannot reach {_count(beat.unreached)} ({', '.join(beat.unreached)})"] if beat.unreached else []
        said += [beat.trouble] if beat.trouble else []
        if said:
            lines.append(f"…{beat.peer[-8:]}: {'; '.join(said)}")
    return lines


def _count(tails: Sequence[str]) -> str:
    """A heartbeat names only so many."""
    return f"{len(tails)}{' or more' if len(tails) == NAMED_PEERS else ''}"


def _is_public(host: str | None) -> bool:
    """A name is a public node's: nobody else has one."""
    try:
        return host is not None and ip_address(host).is_global
    except ValueError:
        return True
