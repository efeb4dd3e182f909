"""The states of a peer, and which may follow which.

joining ──► training ──► ready ──► averaging ──► applying ──► training …
   ▲  ▼         │          ▲ └── attempt failed ──┘
 fetching ◄─────┴── missed an entry, or met a heavier lineage (from ready and averaging too)
"""

from __future__ import annotations

from enum import StrEnum

from peers.heartbeat import PeerState


class State(StrEnum):
    JOINING = "joining"
    FETCHING = "fetching"
    TRAINING = "training"
    READY = "ready"
    AVERAGING = "averaging"
    APPLYING = "applying"
    LEFT = "left"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.JOINING: frozenset({State.FETCHING, State.TRAINING, State.LEFT}),
    State.FETCHING: frozenset({State.JOINING, State.LEFT}),
    State.TRAINING: frozenset({State.READY, State.FETCHING, State.LEFT}),
    State.READY: frozenset({State.AVERAGING, State.APPLYING, State.FETCHING, State.LEFT}),
    State.AVERAGING: frozenset({State.READY, State.APPLYING, State.FETCHING, State.LEFT}),
    State.APPLYING: frozenset({State.TRAINING, State.JOINING, State.LEFT}),
    State.LEFT: frozenset(),
}

SHOWN_AS: dict[State, PeerState] = {
    State.JOINING: PeerState.JOINING,
    State.FETCHING: PeerState.JOINING,
    State.TRAINING: PeerState.TRAINING,
    State.READY: PeerState.READY,
    State.AVERAGING: PeerState.AVERAGING,
    State.APPLYING: PeerState.AVERAGING,
    State.LEFT: PeerState.LEAVING,
}
