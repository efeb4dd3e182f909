"""The state of a peer in one word. It sums up the states of the peer's parts."""

from __future__ import annotations

from enum import StrEnum

from peers.presence.heartbeat import PeerState


class State(StrEnum):
    JOINING = "joining"
    FETCHING = "fetching"
    REPLAYING = "replaying"
    TRAINING = "training"
    READY = "ready"
    AVERAGING = "averaging"
    APPLYING = "applying"
    LEFT = "left"


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
