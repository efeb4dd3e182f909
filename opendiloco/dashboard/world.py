"""Where in the world peers are, of those whose owners want it known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from peers.presence.heartbeat import Heartbeat
from peers.values.places import Place

SHOWN_PLACES, SHOWN_NAMES = 200, 3


def world(heartbeats: Iterable[Heartbeat]) -> dict[str, Any]:
    """Return places with how many peers say that they are there, most first, as plain values; and of how many peers
    nobody knows where they are."""
    there: dict[Place, list[str]] = {}
    silent = 0
    for beat in heartbeats:
        if beat.place is None:
            silent += 1
        else:
            there.setdefault(beat.place, []).append(beat.peer)
    ordered = sorted(there.items(), key=lambda one: (-len(one[1]), one[0]))
    places = [
        {"north": north, "east": east, "peers": len(peers), "names": sorted(peers)[:SHOWN_NAMES]}
        for (north, east), peers in ordered[:SHOWN_PLACES]
    ]
    return {"places": places, "more": len(ordered) - len(places), "silent": silent}
