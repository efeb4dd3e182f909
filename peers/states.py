"""The states of a peer, and which may follow which: the table that docs/protocol.md draws."""

from __future__ import annotations

from enum import StrEnum

from peers.heartbeat import PeerState


class State(StrEnum):
    JOINING = "joining"
    FETCHING = "fetching"
    REPLAYING = "replaying"
    TRAINING = "training"
    READY = "ready"
    AVERAGING = "averaging"
    APPLYING = "applying"
    LEFT = "left"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.JOINING: frozenset({State.FETCHING, State.REPLAYING, State.TRAINING, State.LEFT}),
    State.FETCHING: frozenset({State.JOINING, State.LEFT}),
    State.REPLAYING: frozenset({State.APPLYING, State.JOINING, State.FETCHING, State.LEFT}),
    State.TRAINING: frozenset({State.READY, State.FETCHING, State.REPLAYING, State.LEFT}),
    State.READY: frozenset({State.AVERAGING, State.APPLYING, State.FETCHING, State.REPLAYING, State.LEFT}),
    State.AVERAGING: frozenset({State.READY, State.APPLYING, State.FETCHING, State.REPLAYING, State.LEFT}),
    State.APPLYING: frozenset({State.TRAINING, State.JOINING, State.LEFT}),
    State.LEFT: frozenset(),
}

SHOWN_AS: dict[State, PeerState] = {
    State.JOINING: PeerState.JOINING,
    State.FETCHING: PeerState.JOINING,
    State.REPLAYING: PeerState.JOINING,
    State.TRAINING: PeerState.TRAINING,
    State.READY: PeerState.READY,
    State.AVERAGING: PeerState.AVERAGING,
    State.APPLYING: PeerState.AVERAGING,
    State.LEFT: PeerState.LEAVING,
}
