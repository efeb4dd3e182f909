"""Messages between the parts of one peer, delivered by `StepCycle`."""

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
    """The order to train a lease from theta at the end of `log`, in at most `steps` inner steps."""

    log: LogState
    lease: Lease
    steps: int


@dataclass(frozen=True)
class WorkEnds:
    """The end of this peer's training for a position. The training counts if `entry` has tokens of this peer; otherwise
    it is discarded."""

    position: Position
    entry: Header | None = None


# To the replica -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class EntryMade:
    """The log's next entry, which is final. This peer has its payload. `certificate` has the votes for it, if any."""

    header: Header
    certificate: Certificate | None
    keeps_work: bool


@dataclass(frozen=True)
class Behind:
    """An entry that other peers made without this peer. The `donors` may have its payload."""

    header: Header
    certificate: Certificate | None
    donors: tuple[str, ...]


@dataclass(frozen=True)
class FarBehind:
    """The order to fetch a snapshot at index `least` or later from `donor`, because this peer cannot catch up by
    fetching single entries."""

    donor: str
    least: int = 0


@dataclass(frozen=True)
class NoneAhead:
    """The order to end catching up, because no peer is ahead of this peer any more."""


# To the round ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class WorkDone:
    """The finished training of this peer for the round's entry."""

    trained: Trained


class Host(Protocol):
    """The interface through which a round calls the other parts of its peer."""

    def entry_made(self, header: Header, certificate: Certificate | None) -> None:
        """Append the round's committed entry to the log, and take its outer step with the payload that this peer
        has."""

    def others_made(self, certified: Certified, sender: str, round: EntryRound) -> None:
        """Fetch the payload of an entry from other peers, and apply it, because this peer does not have the payload, or
        because a minority of other peers has made the entry."""

    def leave_if_possible(self) -> None:
        """Leave the run if the volunteer has asked for it and no exchange is under way any more."""

    def inquire(self, round: EntryRound) -> None:
        """Ask another member whether it already has the round's entry. Only the round's leader does so."""
