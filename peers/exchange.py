"""A member's side of one attempt: which blocks have gone out and which have come in.

Every member streams to each owner the blocks of that owner's part; an owner that has everybody's averages its part
and streams the result to all. In an attempt that adopts an earlier entry there is one part, and its owner has it.
"""

from __future__ import annotations

from peers.events import (
    BadBlocks,
    ContributionArrived,
    DigestPayload,
    Effect,
    OpenRound,
    PayloadDigested,
    PushContribution,
    Pushed,
    PushFailed,
    PushReduced,
    Quantized,
    ReducedArrived,
    ReducePart,
)
from peers.messages import Begin

ExchangeEvent = Quantized | ContributionArrived | BadBlocks | ReducedArrived | Pushed | PushFailed | PayloadDigested


class Exchange:
    """Progress of one attempt at one member. `payload` is set when all of it is here."""

    def __init__(self, me: str, begin: Begin, now: float) -> None:
        self.begin = begin
        self.attempt = begin.attempt
        self.started_at = now
        self.payload: bytes | None = None
        self._me = me
        self._members = tuple(member.peer for member in begin.roster)
        self.owners = begin.holders[:1] if begin.adopted else self._members
        self._part = self.owners.index(me) if me in self.owners else None
        others = {peer for peer in self._members if peer != me}
        self._contributions_due = set() if begin.adopted else set(others)
        self._reduced_due = others - set(begin.holders) if self._part is not None else set()
        self._contributors: set[str] = set()
        self._parts: set[int] = set()
        self._in_flight: set[tuple[str, bool]] = set()
        self._quantized = False

    def open(self) -> list[Effect]:
        adopted = self.begin.adopted.header.payload if self.begin.adopted else None
        return [OpenRound(self.attempt, self.begin.roster, self.owners, adopted)]

    def handle(self, event: ExchangeEvent) -> list[Effect]:
        match event:
            case Quantized():
                self._quantized = True
                return self.push_what_is_due() + self._contributed(self._me)
            case ContributionArrived(sender=sender):
                return self._contributed(sender)
            case ReducedArrived(part=part):
                return self._reduced(part)
            case Pushed(peer=peer, reduced=reduced):
                self._in_flight.discard((peer, reduced))
                (self._reduced_due if reduced else self._contributions_due).discard(peer)
            case PushFailed(peer=peer, reduced=reduced):
                self._in_flight.discard((peer, reduced))
            case PayloadDigested(digest=digest):
                self.payload = digest
            case BadBlocks():
                pass
        return []

    def push_what_is_due(self) -> list[Effect]:
        """Pushes that have not been confirmed and are not under way; called again to repeat those that failed."""
        pushes: list[Effect] = []
        if self._quantized:
            for part, owner in enumerate(self.owners):
                if owner in self._contributions_due and (owner, False) not in self._in_flight:
                    self._in_flight.add((owner, False))
                    pushes.append(PushContribution(self.attempt, part, owner))
        if self._part is not None and self._part in self._parts:
            for peer in sorted(self._reduced_due):
                if (peer, True) not in self._in_flight:
                    self._in_flight.add((peer, True))
                    pushes.append(PushReduced(self.attempt, self._part, peer))
        return pushes

    def missing(self) -> tuple[str, ...]:
        """The peers that still owe us blocks; an owner that lacks contributions is held up itself, and says so."""
        owing: set[str] = set()
        if self._part is not None and not self.begin.adopted and self._part not in self._parts:
            owing |= set(self._members) - self._contributors
        owing |= {owner for part, owner in enumerate(self.owners) if part not in self._parts}
        return tuple(sorted(owing - {self._me}))

    def wants_contribution(self, sender: str, part: int) -> bool:
        return (
            self._part == part
            and not self.begin.adopted
            and sender in self._members
            and sender not in self._contributors
        )

    def wants_reduced(self, sender: str, part: int) -> bool:
        return part < len(self.owners) and self.owners[part] == sender and part not in self._parts

    def _contributed(self, sender: str) -> list[Effect]:
        if self._part is None or sender in self._contributors:
            return []
        self._contributors.add(sender)
        complete = self._contributors == set(self._members)
        return [ReducePart(self.attempt, self._part)] if complete else []

    def _reduced(self, part: int) -> list[Effect]:
        if part in self._parts:
            return []
        self._parts.add(part)
        effects = self.push_what_is_due()
        if len(self._parts) == len(self.owners):
            effects.append(DigestPayload(self.attempt))
        return effects
