"""How a run's peers reach each other, in words for people, from heartbeats alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from peers.links.contacts import host_of, is_numeric, is_public
from peers.links.sockets import parse_endpoint
from peers.presence.heartbeat import NAMED_PEERS, Heartbeat

OPEN, BEHIND_NAT, UNKNOWN = "open", "NAT", "-"


def reachability(beat: Heartbeat) -> str:
    """Return whether others can dial a peer: "open"; "NAT" where only nodes that introduce it can be; "-": unknown."""
    hosts = [parse_endpoint(endpoint)[0] for endpoint in beat.endpoints]
    if any(map(_is_on_the_internet, hosts)) or (
        hosts and not any(_is_on_the_internet(host_of(relay)) for relay in beat.relays)
    ):
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


def _is_on_the_internet(host: str | None) -> bool:
    """Whether it is a public address, or a name: nobody else has one."""
    return host is not None and (is_public(host) or not is_numeric(host))
