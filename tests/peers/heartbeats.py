"""Heartbeats that tests are built from."""

from __future__ import annotations

from typing import Any

from peers.log.state import LogState
from peers.presence.heartbeat import Heartbeat, PeerState
from tests.peers.logs import RUN, STATE


def beat(peer: str, log: LogState, state: PeerState = PeerState.TRAINING, sequence: int = 1, **more: Any) -> Heartbeat:
    """Return what a peer at the end of this log says."""
    fields: dict[str, Any] = {
        "run": RUN,
        "peer": peer,
        "incarnation": 0,
        "sequence": sequence,
        "state": state,
        "index": log.position.index,
        "head": log.position.head,
        "state_digest": STATE,
        "lineage_tokens": log.lineage_tokens,
        "inner_step": 0,
        "tokens_per_second": 0.0,
        "speed": 0.0,
        "loss": None,
        "addresses": (),
        "roster_size": 0,
    }
    return Heartbeat(**(fields | more))
