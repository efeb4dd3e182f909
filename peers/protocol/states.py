"""The states of a peer, which may follow which, and why. `python -m peers.protocol.states` draws the table."""

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


TRANSITIONS: dict[State, dict[State, str]] = {
    State.JOINING: {
        State.TRAINING: "has a lease",
        State.REPLAYING: "others are a few entries ahead",
        State.FETCHING: "others are far ahead",
        State.LEFT: "asked to leave",
    },
    State.FETCHING: {
        State.JOINING: "has the donor's state, or not",
        State.LEFT: "asked to leave",
    },
    State.REPLAYING: {
        State.APPLYING: "has the entry's payload",
        State.FETCHING: "nobody has it any more",
        State.JOINING: "nobody is ahead any more",
        State.LEFT: "asked to leave",
    },
    State.TRAINING: {
        State.READY: "inner steps are done",
        State.JOINING: "its work could not count",
        State.REPLAYING: "an entry was made without us",
        State.FETCHING: "others are far ahead",
        State.LEFT: "asked to leave",
    },
    State.READY: {
        State.AVERAGING: "the leader begins",
        State.JOINING: "left out",
        State.APPLYING: "what we hold was committed",
        State.REPLAYING: "an entry was made without us",
        State.FETCHING: "refused, or others are far ahead",
        State.LEFT: "asked to leave",
    },
    State.AVERAGING: {
        State.APPLYING: "the leader commits",
        State.READY: "the attempt is over",
        State.REPLAYING: "an entry was made without us",
        State.FETCHING: "refused, or others are far ahead",
        State.LEFT: "asked to leave, and time is up",
    },
    State.APPLYING: {
        State.TRAINING: "has the next lease, or goes on with the old",
        State.READY: "what we had trained is for the next entry",
        State.JOINING: "has no lease, or others are ahead",
        State.LEFT: "was asked to leave",
    },
    State.LEFT: {},
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


def diagram() -> str:
    """The table as a Mermaid state diagram. Leaving is left out: it is possible from everywhere."""
    lines = ["stateDiagram-v2", "    [*] --> joining"]
    for state, following in TRANSITIONS.items():
        lines += [f"    {state} --> {other}: {why}" for other, why in following.items() if other is not State.LEFT]
    return "\n".join(lines)


if __name__ == "__main__":
    print(diagram())
