"""Who sends to whom, and how fast: what each peer says of the data that came to it in the last rounds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from peers.presence.heartbeat import TAIL, Heartbeat

SHOWN = 24
"""Peers that are shown: as many as fit across a phone. Heartbeats tell of those that come next in the order of ids."""
FASTEST = 1e12  # bytes a second: others may claim any rate


def matrix(heartbeats: Iterable[Heartbeat], me: str = "") -> dict[str, Any]:
    """Return peers, in the order of ids from this machine's on, and the rates between them, as plain values.

    `rates` are triples: the places of who sends and who receives among `peers`, and bytes a second as the latter says.
    `more` are the peers for which there is no room. Only peers are there that tell a rate, or are told of.
    """
    told = {beat.peer: dict(beat.rates) for beat in heartbeats if beat.rates}
    there = {beat.peer[-TAIL:]: beat.peer for beat in heartbeats}
    senders = {there[tail] for rates in told.values() for tail in rates if tail in there}
    peers = sorted(told.keys() | senders, key=lambda peer: (peer < me, peer))
    shown = peers[:SHOWN]
    rates = [
        (sender, receiver, min(1000.0 * told[to][peer[-TAIL:]], FASTEST))
        for receiver, to in enumerate(shown)
        if to in told
        for sender, peer in enumerate(shown)
        if peer != to and peer[-TAIL:] in told[to]
    ]
    return {"peers": shown, "rates": rates, "more": len(peers) - len(shown)}
