"""Effects: the requests that the protocol returns to its driver, as plain values. The driver does the I/O."""

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
    """A request to let the workers train a lease. The driver answers with TrainingDone."""


@dataclass(frozen=True)
class KeepVotes(Effect):
    """A request to write the voting record to the disk; records are written in the order of the requests. The driver
    answers with VotesKept or VotesNotKept."""

    record: VotingRecord


@dataclass(frozen=True)
class StopTraining(Effect):
    """A request to stop the workers, and to discard what they have trained since they loaded theta."""


@dataclass(frozen=True)
class OpenRound(Effect):
    """A request to allocate memory for a round's chunks, and to end earlier rounds of the same fragment."""

    round: Round


@dataclass(frozen=True)
class SendChunk(Effect):
    """A request to send a chunk: an average (if `reduced`) with the names of the members `absent` from it, or this
    peer's own blocks with the `signature` of its commitment. The driver answers with ChunkSent or ChunksUnsent."""

    round_name: RoundName
    to: str
    chunk: int
    reduced: bool
    absent: tuple[str, ...] = ()
    origin: Origin | None = field(default=None, compare=False)
    signature: bytes | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ReduceChunk(Effect):
    """A request to average the members' blocks of a chunk, in the order of `members` and with their weights. Blocks of
    `clipped` members are multiplied by their factors. The driver answers with ReducedArrived or BadBlocks."""

    round_name: RoundName
    chunk: int
    members: tuple[tuple[str, float], ...]
    absent: tuple[str, ...]
    clipped: Mapping[str, float] = field(default_factory=dict)

    @property
    def weights(self) -> list[tuple[str, float]]:
        """Each member with the factor for its blocks: its weight, times its clipping factor if it has one."""
        return [
            (peer, weight * self.clipped[peer] if peer in self.clipped else weight) for peer, weight in self.members
        ]


@dataclass(frozen=True)
class AssemblePayload(Effect):
    """A request to assemble the round's averages into a payload, and keep the payload in memory and on the disk (R10).
    The driver answers with PayloadAssembled."""

    round_name: RoundName


@dataclass(frozen=True)
class FetchPayload(Effect):
    """A request to read a payload from this machine's log, or else fetch it from a donor, and keep it on the disk. The
    driver answers with PayloadFetched or PayloadNotFetched."""

    header: Header
    donors: tuple[str, ...]


@dataclass(frozen=True)
class Apply(Effect):
    """A request to take the outer step with the header's payload; a skipped fragment has no payload. The driver answers
    with Applied, and after a cycle's last entry with Digested, too.

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
    """A request to fetch and check the part of the donor's log, up to `index`, that differs from this peer's log.
    `others` are asked for entries that the donor does not have. A later request replaces this one. The driver answers
    with LineageSeen or LineageNotSeen."""

    donor: str
    index: int
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class FetchSnapshot(Effect):
    """A request to load theta and momentum from a snapshot of the donor's lineage at index `least` or later, sent by
    the donor or one of the `others`. The driver answers with SnapshotRestored or SnapshotFailed."""

    donor: str
    others: tuple[str, ...] = ()
    least: int = 0


@dataclass(frozen=True)
class Stop(Effect):
    """A request to end the driver, because the peer has left the run."""


@dataclass(frozen=True)
class Note(Effect):
    """A request to log a message for the volunteer. `level` is a logging level in lower case, such as "warning"."""

    level: str
    text: str


@dataclass(frozen=True)
class Dropped(Effect):
    """A request to log and count a peer's message or data that breaks the rules. `what` is the kind under which it is
    counted."""

    peer: str
    what: str
    reason: str


@dataclass(frozen=True)
class TokensLost(Effect):
    """A request to log and count trained tokens of this peer that are in no entry of its log. `what` is "work" if an
    entry was made without them, "entries" if their entries are in a lineage that the peer has left."""

    what: str
    tokens: int
    reason: str


@dataclass(frozen=True)
class Trouble(Effect):
    """A request to show the volunteer, and other peers through the heartbeat, why this peer's training does not count,
    and the remedy. An empty `reason` clears the message. `level` is as in Note."""

    reason: str
    level: str = "warning"
