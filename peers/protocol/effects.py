"""What the protocol wants done. Plain values; drivers do the I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from peers.log.certificate import Certificate
from peers.log.header import Header
from peers.protocol.messages import Message
from peers.protocol.parts import Origin
from peers.protocol.rounds import Round, RoundName
from peers.protocol.voting import VotingRecord
from peers.values.manifest import Amendment
from peers.values.workload import InnerLoop


@dataclass(frozen=True)
class Send:
    to: str
    message: Message


class Train(InnerLoop):
    """Have the worker do this; ends in TrainingDone."""


@dataclass(frozen=True)
class KeepVotes:
    """Write the voting record to the disk, in the order in which records come. Ends in VotesKept or VotesNotKept."""

    record: VotingRecord


@dataclass(frozen=True)
class StopTraining:
    """Whatever the worker has done since theta was loaded is void."""


@dataclass(frozen=True)
class OpenRound:
    """Make room for a round. Other rounds are over."""

    round: Round


@dataclass(frozen=True)
class SendChunk:
    """A chunk to a peer: as it was averaged (`reduced`), with the names of those whose blocks are `absent`; or our own
    blocks of it, with our `signature` of all that we contribute. Ends in ChunkSent or ChunksUnsent."""

    round_name: RoundName
    to: str
    chunk: int
    reduced: bool
    absent: tuple[str, ...] = ()
    origin: Origin | None = field(default=None, compare=False)
    signature: bytes | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ReduceChunk:
    """Average the blocks of these members, in this order, with these weights; ends in ReducedArrived or BadBlocks.

    Of those that are `clipped` the blocks count times the factor that is given, and no less is divided by."""

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
class AssemblePayload:
    """All chunks are here: keep them as a payload, on the disk, too (R10). Ends in PayloadAssembled."""

    round_name: RoundName


@dataclass(frozen=True)
class FetchPayload:
    """Get the payload of `header` from this machine's log, or from any of these peers, and keep it on the disk, too.

    Ends in PayloadFetched or PayloadNotFetched.
    """

    header: Header
    donors: tuple[str, ...]


@dataclass(frozen=True)
class Apply:
    """Take the outer step with the kept payload whose digest is `header.payload`; none where that is NO_PAYLOAD.

    The certificate is kept with the entry, and so are the `proofs` of its annex that are known here. With `keeps_work`,
    what is being trained, or has been, is for a later entry. `amendment` is the one that was in force in its cycle.
    """

    header: Header
    keeps_work: bool = False
    amendment: Amendment | None = None
    certificate: Certificate | None = field(default=None, compare=False)
    proofs: tuple[bytes, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class FetchLineage:
    """Get the donor's log up to `index`, as far as it is not ours, and check it; `others` may know its beginning.

    Another look, at whomever, ends. Ends in LineageSeen or LineageNotSeen.
    """

    donor: str
    index: int
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class FetchSnapshot:
    """Take over a state of the donor's lineage, at index `least` or later; `others` may have it, too."""

    donor: str
    others: tuple[str, ...] = ()
    least: int = 0


@dataclass(frozen=True)
class Stop:
    """The protocol has ended: the peer has left."""


@dataclass(frozen=True)
class Note:
    """Something a person may want to know. `level` as in logging: "debug", "info" or "warning"."""

    level: str
    text: str


@dataclass(frozen=True)
class Dropped:
    """What a peer sent breaks the rules and was dropped: to be logged, with the peer's name, and counted by `what`."""

    peer: str
    what: str
    reason: str


@dataclass(frozen=True)
class TokensLost:
    """Tokens that this peer trained are in no entry of its log: to be logged and counted by `what`.

    "work" was for an entry that went on without it; "entries" are of a lineage that the peer has left.
    """

    what: str
    tokens: int
    reason: str


@dataclass(frozen=True)
class Trouble:
    """Why what this peer trains does not count at present, and what to do about it; "": it does again. To be shown to
    the volunteer, and to everybody in heartbeats. `level` as in a Note."""

    reason: str
    level: str = "warning"


Effect = (
    Send
    | KeepVotes
    | Train
    | StopTraining
    | OpenRound
    | SendChunk
    | ReduceChunk
    | AssemblePayload
    | FetchPayload
    | Apply
    | FetchLineage
    | FetchSnapshot
    | Stop
    | Note
    | Dropped
    | TokensLost
    | Trouble
)
