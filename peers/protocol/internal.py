"""The news of one part of a peer for another, which `StepCycle` carries there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from peers.log.certificate import Certificate
from peers.log.header import Header, Position
from peers.log.state import LogState
from peers.messages.messages import Certified
from peers.values.leases import Lease
from peers.values.workload import Trained

if TYPE_CHECKING:
    from peers.protocol.round import EntryRound


# To the trainer -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Leased:
    """A lease to train, in at most `steps` inner steps, from the theta at the end of `log`."""

    log: LogState
    lease: Lease
    steps: int


@dataclass(frozen=True)
class WorkEnds:
    """The end of our work: it is in this entry, if that names us; else it is void."""

    position: Position
    entry: Header | None = None


# To the replica -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class EntryMade:
    """The log's next entry, whose payload is here; nothing else can follow. The certificate says why."""

    header: Header
    certificate: Certificate | None
    keeps_work: bool


@dataclass(frozen=True)
class Behind:
    """An entry that others have; the donors have its payload."""

    header: Header
    certificate: Certificate | None
    donors: tuple[str, ...]


@dataclass(frozen=True)
class FarBehind:
    """A donor whose state alone leads to where the others are: one at index `least` or later."""

    donor: str
    least: int = 0


@dataclass(frozen=True)
class NobodyAhead:
    """The end of catching up: what we were catching up with is gone."""


# To the round ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class WorkDone:
    """Our training for the round's entry."""

    trained: Trained


class Host(Protocol):
    """The rest of the peer, as a round needs it."""

    def entry_made(self, header: Header, certificate: Certificate | None) -> None:
        """Take the round's entry, which is committed and whose payload is here."""

    def others_made(self, certified: Certified, sender: str, round: EntryRound) -> None:
        """Others have an entry whose payload is not here, or one that a minority has made."""

    def leave_if_possible(self) -> None:
        """Leave, if that waits for an exchange: none is under way in the round."""

    def inquire(self, round: EntryRound) -> None:
        """As a leader, ask whether others have made the entry already."""
