"""Messages between the parts of one peer, which `StepCycle` delivers."""

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
    """A lease to train, in at most `steps` inner steps, from theta at the end of `log`."""

    log: LogState
    lease: Lease
    steps: int


@dataclass(frozen=True)
class WorkEnds:
    """The end of this peer's work: it counts in `entry` if that names this peer; otherwise it is discarded."""

    position: Position
    entry: Header | None = None


# To the replica -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class EntryMade:
    """The log's next entry, whose payload is here. It is final: the certificate says why."""

    header: Header
    certificate: Certificate | None
    keeps_work: bool


@dataclass(frozen=True)
class Behind:
    """An entry that other peers have. The donors have its payload."""

    header: Header
    certificate: Certificate | None
    donors: tuple[str, ...]


@dataclass(frozen=True)
class FarBehind:
    """A donor to take a snapshot from, at index `least` or later, because replaying entries cannot reach the others."""

    donor: str
    least: int = 0


@dataclass(frozen=True)
class NoneAhead:
    """The end of catching up: no peer that was further on is left."""


# To the round ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class WorkDone:
    """This peer's training for the round's entry."""

    trained: Trained


class Host(Protocol):
    """The rest of the peer, as a round uses it."""

    def entry_made(self, header: Header, certificate: Certificate | None) -> None:
        """Take the round's entry, which is committed and whose payload is here."""

    def others_made(self, certified: Certified, sender: str, round: EntryRound) -> None:
        """Take an entry of other peers whose payload is not here, or that a minority has made."""

    def leave_if_possible(self) -> None:
        """Leave, if the peer was waiting for an exchange of the round that is now over."""

    def inquire(self, round: EntryRound) -> None:
        """Ask, as a leader, whether other peers have made the entry already."""
