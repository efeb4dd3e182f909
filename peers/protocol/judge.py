"""What a leader makes of an accusation: whether what is shown convinces everybody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from peers.log.header import Position
from peers.protocol.exchange import Exchange
from peers.protocol.messages import Accuse
from peers.protocol.rounds import Round
from peers.values.signing import Verify
from peers.values.workload import Inspect


@dataclass(frozen=True)
class Judge:
    """Of one position, where a payload has so many `chunks`. `exchange` is our own side of the round under way."""

    position: Position
    chunks: int
    verify: Verify
    inspect: Inspect
    exchange: Callable[[], Exchange | None]

    @property
    def marks(self) -> bytes:
        """What tells our averages from others'."""
        exchange = self.exchange()
        return exchange.averages.marks() if exchange else b""

    def is_bad_contribution(self, accuse: Accuse, round: Round) -> bool:
        """Return whether the accused has committed to what is none, or to another norm than it has."""
        how = self.position, self.chunks, self.verify, self.inspect
        accused = [member for member in round.contributors if member.peer == accuse.accused]
        return accuse.evidence is not None and any(accuse.evidence.convicts(member, *how) for member in accused)

    def is_two_averages(self, accuse: Accuse) -> bool:
        """Return whether the accused has given the accuser another average than us."""
        exchange = self.exchange()
        if exchange is None or accuse.average is None:
            return False
        return exchange.averages.convicts(accuse.accused, accuse.average)
