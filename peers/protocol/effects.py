"""Effects: the things that the protocol wants done, as plain values. Drivers do the I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from peers.log.certificate import Certificate
from peers.log.header import Header
from peers.messages.averages import Origin
from peers.messages.messages import Message
from peers.messages.rounds import Round, RoundName
from peers.protocol.voting import VotingRecord
from peers.values.manifest import Amendment
from peers.values.workload import InnerLoop


class Effect:
    """One thing that the protocol wants done. A plain value; drivers do the I/O."""


@dataclass(frozen=True)
class Send(Effect):
    to: str
    message: Message


class Train(InnerLoop, Effect):
    """Have the workers train a lease. Ends in TrainingDone."""


@dataclass(frozen=True)
class KeepVotes(Effect):
    """Write the voting record to the disk, in the order of these effects. Ends in VotesKept or VotesNotKept."""

    record: VotingRecord


@dataclass(frozen=True)
class StopTraining(Effect):
    """Stop the workers. Their work since theta was loaded is void."""


@dataclass(frozen=True)
class OpenRound(Effect):
    """Make room for a round's chunks. Earlier rounds of its fragment are over."""

    round: Round


@dataclass(frozen=True)
class SendChunk(Effect):
    """Send a chunk: an average (`reduced`), with the names of the members `absent` from it; or our own blocks, with the
    `signature` of our commitment. Ends in ChunkSent or ChunksUnsent."""

    round_name: RoundName
    to: str
    chunk: int
    reduced: bool
    absent: tuple[str, ...] = ()
    origin: Origin | None = field(default=None, compare=False)
    signature: bytes | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ReduceChunk(Effect):
    """Average the blocks of these members, in this order, with these weights. Blocks of `clipped` members are scaled
    by the given factors. Ends in ReducedArrived or BadBlocks."""

    round_name: RoundName
    chunk: int
    members: tuple[tuple[str, float], ...]
    absent: tuple[str, ...]
    clipped: Mapping[str, float] = field(default_factory=dict)

    @property
    def weights(self) -> list[tuple[str, float]]:
        """What each member's blocks are multiplied with."""
        return [
            (peer, weight * self.clipped[peer] if peer in self.clipped else weight) for peer, weight in self.members
        ]


@dataclass(frozen=True)
class AssemblePayload(Effect):
    """Keep the round's averages as a payload, on the disk, too (R10). Ends in PayloadAssembled."""

    round_name: RoundName


@dataclass(frozen=True)
class FetchPayload(Effect):
    """Get a payload from this machine's log, or else from one of these peers, and keep it on the disk. Ends in
    PayloadFetched or PayloadNotFetched."""

    header: Header
    donors: tuple[str, ...]


@dataclass(frozen=True)
class Apply(Effect):
    """Take the outer step with the kept payload of the header, if it has one. Ends in Applied, then Digested.

    The certificate and the `proofs` of the header's faults are kept with the entry. With `keeps_work` the training in
    hand is for a later entry. `amendment` was in force in the header's cycle.
    """

    header: Header
    keeps_work: bool = False
    amendment: Amendment | None = None
    certificate: Certificate | None = field(default=None, compare=False)
    proofs: tuple[bytes, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class FetchLineage(Effect):
    """Get and check the donor's log up to `index`, where it is not ours; `others` may have its beginning. Replaces
    an earlier FetchLineage. Ends in LineageSeen or LineageNotSeen."""

    donor: str
    index: int
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class FetchSnapshot(Effect):
    """Take over a state of the donor's lineage, at index `least` or later; `others` may have it, too. Ends in
    SnapshotRestored or SnapshotFailed."""

    donor: str
    others: tuple[str, ...] = ()
    least: int = 0


@dataclass(frozen=True)
class Stop(Effect):
    """End: the peer has left."""


@dataclass(frozen=True)
class Note(Effect):
    """Tell a person. `level` as in logging."""

    level: str
    text: str


@dataclass(frozen=True)
class Dropped(Effect):
    """Log and count, by `what`, something that a peer sent and that breaks the rules."""

    peer: str
    what: str
    reason: str


@dataclass(frozen=True)
class TokensLost(Effect):
    """Log and count, by `what`, tokens of this peer that are in no entry of its log: "work" for an entry that went on
    without it; "entries" of a lineage that the peer has left."""

    what: str
    tokens: int
    reason: str


@dataclass(frozen=True)
class Trouble(Effect):
    """Show the volunteer, and others in heartbeats, why what this peer trains does not count, and the remedy; "": it
    does. `level` as in a Note."""

    reason: str
    level: str = "warning"
