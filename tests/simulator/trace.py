"""A message on one line, for people who read what a simulated swarm did."""

from __future__ import annotations

from peers.protocol.chunk_sets import chunks_in
from peers.protocol.messages import (
    Abort,
    Adopt,
    Begin,
    Commit,
    Complete,
    Holding,
    Message,
    Ready,
    Refuse,
    Waiting,
    Want,
)
from peers.protocol.rounds import Held


def brief(message: Message) -> str:
    """Its kind, what it is about, and what matters of the rest."""
    about = getattr(message, "attempt", message.position.index)
    return f"{message.kind} {about} {_details(message)}".rstrip()


def _details(message: Message) -> str:
    match message:
        case Ready(last_attempt=last, held=held, round=round):
            return f"last {last}, holds {_held(held)}, in round {round.name if round else None}"
        case Begin(round=round):
            return f"round {round.name}, lost {round.lost}"
        case Adopt(header=header, donors=donors):
            return f"{header.digest.hex()[:8]} from {donors}"
        case Waiting(missing=missing):
            return f"for {missing}"
        case Holding(chunks=mask):
            return str(chunks_in(mask))
        case Want(reduced=reduced, own=own):
            return f"reduced {chunks_in(reduced)}, own {chunks_in(own)}"
        case Complete(payload=payload, missed=missed):
            return f"{payload.hex()[:8]}, missed {missed}"
        case Commit(header=header):
            return header.digest.hex()[:8]
        case Abort(reason=reason) | Refuse(reason=reason):
            return reason
        case _:
            return ""


def _held(held: Held | None) -> str:
    return f"{held.attempt}/{held.attempt.leader}:{held.header.digest.hex()[:8]}" if held else "nothing"
