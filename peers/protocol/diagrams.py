"""State diagrams of a peer's parts, drawn from their state tables: `python -m peers.protocol.diagrams`."""

from __future__ import annotations

from peers.protocol.replica import Replica
from peers.protocol.round import EntryRound
from peers.protocol.state_machine import StateMachine
from peers.protocol.trainer import Trainer

PARTS: tuple[type[StateMachine], ...] = (Trainer, Replica, EntryRound)


def diagram(part: type[StateMachine]) -> str:
    """Return the state table of a peer's part as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(part.TABLE))}"]
    for state, rows in part.TABLE.items():
        ways: dict[str, list[str]] = {}
        for row in rows.values():
            for other, why in row.leads_to.items():
                reasons = ways.setdefault(other, [])
                if why not in reasons:
                    reasons.append(why)
        lines += [f"    {state} --> {other}: {', or '.join(reasons)}" for other, reasons in ways.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print("\n\n".join(diagram(part) for part in PARTS))
