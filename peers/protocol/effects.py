"""Effects: the protocol's requests to its driver, as plain values. The driver does the I/O."""

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
    """A request of the protocol to its driver."""


@dataclass(frozen=True)
class Send(Effect):
    to: str
    message: Message


class Train(InnerLoop, Effect):
    """A request to let the workers train a lease. Ends in TrainingDone."""


@dataclass(frozen=True)
class KeepVotes(Effect):
    """A request to write the voting record to the disk, in the order in which these effects are emitted. Ends in
    VotesKept or VotesNotKept."""

    record: VotingRecord


@dataclass(frozen=True)
class StopTraining(Effect):
    """A request to stop the workers. Their training since theta was loaded is discarded."""


@dataclass(frozen=True)
class OpenRound(Effect):
    """A request to allocate room for a round's chunks. Earlier rounds of the same fragment are over."""

    round: Round


@dataclass(frozen=True)
class SendChunk(Effect):
    """A request to send a chunk: an average (`reduced`), with the names of the members `absent` from it, or this peer's
    own blocks, with the `signature` of its commitment. Ends in ChunkSent or ChunksUnsent."""

    round_name: RoundName
    to: str
    chunk: int
    reduced: bool
    absent: tuple[str, ...] = ()
    origin: Origin | None = field(default=None, compare=False)
    signature: bytes | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ReduceChunk(Effect):
    """A request to average the blocks of these members, in this order and with these weights. The blocks of `clipped`
    members are multiplied by the given factors. Ends in ReducedArrived or BadBlocks."""

    round_name: RoundName
    chunk: int
    members: tuple[tuple[str, float], ...]
    absent: tuple[str, ...]
    clipped: Mapping[str, float] = field(default_factory=dict)

    @property
    def weights(self) -> list[tuple[str, float]]:
        """The factor for each member's blocks: its weight times its clipping factor."""
        return [
            (peer, weight * self.clipped[peer] if peer in self.clipped else weight) for peer, weight in self.members
        ]


@dataclass(frozen=True)
class AssemblePayload(Effect):
    """A request to assemble the round's averages into a payload, and keep it in memory and on the disk (R10). Ends in
    PayloadAssembled."""

    round_name: RoundName


@dataclass(frozen=True)
class FetchPayload(Effect):
    """A request to read a payload from this machine's log, or else fetch it from one of the donors, and keep it on the
    disk. Ends in PayloadFetched or PayloadNotFetched."""

    header: Header
    donors: tuple[str, ...]


@dataclass(frozen=True)
class Apply(Effect):
    """A request to take the outer step with the kept payload of the header, if it has one. Ends in Applied, then
    Digested.

    The certificate and the `proofs` of the header's faults are kept with the entry. With `keeps_work` the training
    under way is for a later entry, and goes on. `amendment` was in force in the header's cycle.
    """

    header: Header
    keeps_work: bool = False
    amendment: Amendment | None = None
    certificate: Certificate | None = field(default=None, compare=False)
    proofs: tuple[bytes, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class FetchLineage(Effect):
    """A request to fetch and check the donor's log up to `index`, where it differs from this peer's. `others` are peers
    that may serve its beginning. Replaces an earlier FetchLineage. Ends in LineageSeen or LineageNotSeen."""

    donor: str
    index: int
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class FetchSnapshot(Effect):
    """A request to load a state of the donor's lineage, at index `least` or later. `others` are peers that may have it,
    too. Ends in SnapshotRestored or SnapshotFailed."""

    donor: str
    others: tuple[str, ...] = ()
    least: int = 0


@dataclass(frozen=True)
class Stop(Effect):
    """A request to end the driver: the peer has left."""


@dataclass(frozen=True)
class Note(Effect):
    """A request to log a message for the volunteer. `level` is a level of logging, in lower case."""

    level: str
    text: str


@dataclass(frozen=True)
class Dropped(Effect):
    """A request to log and count, by the kind `what`, something that a peer sent and that breaks the rules."""

    peer: str
    what: str
    reason: str


@dataclass(frozen=True)
class TokensLost(Effect):
    """A request to log and count tokens of this peer that are in no entry of its log. `what` is the kind: "work" if an
    entry went on without them, "entries" if they were in entries of a lineage that the peer has left."""

    what: str
    tokens: int
    reason: str


@dataclass(frozen=True)
class Trouble(Effect):
    """A request to show the volunteer, and other peers through the heartbeat, why this peer's training does not count,
    and the remedy; "" clears it. `level` as in Note."""

    reason: str
    level: str = "warning"
