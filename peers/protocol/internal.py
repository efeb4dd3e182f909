"""What one part of a peer tells another. `Course` carries it there; nothing of this leaves the peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from peers.log.certificate import Certificate
from peers.log.header import Header, Position
from peers.log.state import LogState
from peers.values.leases import Lease
from peers.values.workload import Trained

if TYPE_CHECKING:
    from peers.protocol.slot import Slot


# To the trainer -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Leased:
    """Train this lease, in at most `steps` inner steps, from the theta at the end of `log`."""

    log: LogState
    lease: Lease
    steps: int


@dataclass(frozen=True)
class WorkEnds:
    """What we have trained is in this entry, if it names us; else it is void."""

    position: Position
    entry: Header | None = None


# To the replica -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class EntryMade:
    """The payload of the log's next entry is here, and nothing else can follow. The certificate says why."""

    header: Header
    certificate: Certificate | None
    keeps_work: bool


@dataclass(frozen=True)
class Behind:
    """The others have this entry; the donors have its payload."""

    header: Header
    certificate: Certificate | None
    donors: tuple[str, ...]


@dataclass(frozen=True)
class FarBehind:
    """Only the state of a donor leads to where the others are: one at index `least` or later."""

    donor: str
    least: int = 0


@dataclass(frozen=True)
class NobodyAhead:
    """What we were catching up with is gone."""


# To the slot ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class WorkDone:
    """We have trained this for the slot's entry."""

    trained: Trained


class Owner(Protocol):
    """Whoever decides what a slot's news means for the rest of the peer."""

    def entry_made(self, header: Header, certificate: Certificate | None) -> None:
        """The slot's entry is committed, and its payload is here."""

    def attempt_over(self, slot: Slot) -> None:
        """Nothing is under way in the slot: whoever wants to leave may do so."""
