"""What happens to the protocol (events), and what it wants done (effects). Plain values; drivers do the I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from peers.log.branch import Branch
from peers.log.certificate import Certificate
from peers.log.header import NO_PAYLOAD, Header
from peers.log.state import LogState
from peers.presence.heartbeat import Heartbeat
from peers.protocol.commitment import Evidence
from peers.protocol.messages import Attempt, Message, Round, Unread
from peers.protocol.signed_averages import Origin
from peers.values.reach import Reach
from peers.values.workload import InnerLoop, Progress, Trained


# Events ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class HeartbeatsSeen:
    """The newest heartbeat of each peer, and for how many seconds nothing newer had come of it (not named: it comes
    only now)."""

    heartbeats: tuple[Heartbeat, ...]
    silences: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Received:
    sender: str
    message: Message | Unread


@dataclass(frozen=True)
class Undelivered:
    """A message or a push did not reach `peer`."""

    peer: str


@dataclass(frozen=True)
class ReachSeen:
    """How we reach other peers now, and the bytes a second at which their data came to us in the last rounds.

    `sought` are peers to which a way is still looked for.
    """

    reach: Mapping[str, Reach]
    rates: Mapping[str, int]
    sought: frozenset[str] = frozenset()


@dataclass(frozen=True)
class TrainingProgress:
    progress: Progress


@dataclass(frozen=True)
class Captured:
    """In the midst of training, what it came to for one fragment, which is quantized, too. `trained` names no samples:
    that is for the entry that closes the cycle."""

    fragment: int
    trained: Trained


@dataclass(frozen=True)
class TrainingDone:
    """What we trained is quantized, too: no round waits for it."""

    trained: Trained


@dataclass(frozen=True)
class ContributionArrived:
    """`sender`'s own blocks of a chunk that we reduce are here."""

    round_name: Attempt
    sender: str
    chunk: int


@dataclass(frozen=True)
class BadBlocks:
    """What `sender` gave of a chunk is not what it ought to be, and was dropped.

    The `evidence` convinces others, too. Without it nobody else can know who of the two is to blame.
    """

    round_name: Attempt
    sender: str
    chunk: int
    reason: str
    evidence: Evidence | None = None


@dataclass(frozen=True)
class ReducedArrived:
    """An averaged chunk is here, from the peer that reduced it (ourselves included); blocks of `absent` are not in it.

    `sender` handed it to us; its `digest` is what the reducer has signed, as `origin` has it. What is ours is yet to be
    signed.
    """

    round_name: Attempt
    sender: str
    chunk: int
    absent: tuple[str, ...]
    digest: bytes = field(default=NO_PAYLOAD, compare=False)
    origin: Origin | None = field(default=None, compare=False)


@dataclass(frozen=True)
class AverageTooEarly:
    """`sender` gave an averaged chunk without blocks of a member that is not lost, as far as we know. It was not taken:
    we may hear of the loss yet, and the chunk comes again; or the sender leaves out whom it likes."""

    round_name: Attempt
    sender: str
    chunk: int


@dataclass(frozen=True)
class ChunkSent:
    """`peer` confirmed that it has our chunk."""

    round_name: Attempt
    peer: str
    chunk: int
    reduced: bool


@dataclass(frozen=True)
class ChunksUnsent:
    """The way to `peer` broke off before it had confirmed these chunks."""

    round_name: Attempt
    peer: str
    chunks: tuple[int, ...]
    reduced: bool


@dataclass(frozen=True)
class PayloadAssembled:
    """All chunks of the round are here; the payload has this digest and is kept."""

    round_name: Attempt
    digest: bytes


@dataclass(frozen=True)
class PayloadFetched:
    """The payload of `header` is here, as peers kept it."""

    header: Header


@dataclass(frozen=True)
class PayloadNotFetched:
    header: Header
    reason: str


@dataclass(frozen=True)
class RateMeasured:
    """What this machine's link was seen to carry each way, in bytes a second: in a round, complete or not, or in a
    short measurement before the first. 0: not known."""

    rate: int


@dataclass(frozen=True)
class Applied:
    """The outer step is done: one can train from theta. The digest of the state follows, in Digested."""

    header: Header


@dataclass(frozen=True)
class Digested:
    """theta and momentum, as the entry that was applied last left them, have this digest."""

    header: Header
    state_digest: bytes


@dataclass(frozen=True)
class SnapshotRestored:
    """theta and momentum are the donor's, at the position after `header` (None: before the first entry).

    `lineage`: what names the donor's lineage after its newest cycles, oldest first, those after that one included.
    `ends`: digests of all entries of the cycle that the header closes, where it has more than one. `doubt`: the newest
    place in that lineage from which too few went on.
    """

    donor: str
    header: Header | None
    state_digest: bytes
    lineage: tuple[bytes, ...] = ()
    ends: tuple[bytes, ...] = ()
    doubt: LogState | None = None


@dataclass(frozen=True)
class SnapshotFailed:
    donor: str
    reason: str


@dataclass(frozen=True)
class LineageSeen:
    """What follows in the donor's log and in ours, from the last place on that both have."""

    donor: str
    theirs: Branch
    ours: Branch


@dataclass(frozen=True)
class LineageNotSeen:
    donor: str
    reason: str


@dataclass(frozen=True)
class LeaveRequested:
    """The volunteer wants the machine back: a round under way is finished first, unless it must be `at_once`."""

    at_once: bool = False


Event = (
    Tick
    | HeartbeatsSeen
    | Received
    | Undelivered
    | TrainingProgress
    | Captured
    | TrainingDone
    | ContributionArrived
    | BadBlocks
    | ReducedArrived
    | AverageTooEarly
    | ChunkSent
    | ChunksUnsent
    | PayloadAssembled
    | PayloadFetched
    | PayloadNotFetched
    | RateMeasured
    | ReachSeen
    | Applied
    | Digested
    | SnapshotRestored
    | SnapshotFailed
    | LineageSeen
    | LineageNotSeen
    | LeaveRequested
)


# Effects --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Send:
    to: str
    message: Message


class Train(InnerLoop):
    """Have the worker do this; ends in TrainingDone."""


@dataclass(frozen=True)
class StopTraining:
    """Whatever the worker has done since theta was loaded is void."""


@dataclass(frozen=True)
class OpenRound:
    """Make room for a round. Other rounds are over."""

    round: Round


@dataclass(frozen=True)
class SendChunk:
    """A chunk to a peer: as it was averaged (`reduced`), with the names of those whose blocks are `absent`, or our own
    blocks of it. Ends in ChunkSent or ChunksUnsent."""

    round_name: Attempt
    to: str
    chunk: int
    reduced: bool
    absent: tuple[str, ...] = ()
    origin: Origin | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ReduceChunk:
    """Average the blocks of these members, in this order, with these tokens; ends in ReducedArrived or BadBlocks.

    Of those that are `clipped` the blocks count times the factor that is given, and no less is divided by."""

    round_name: Attempt
    chunk: int
    members: tuple[tuple[str, int], ...]
    absent: tuple[str, ...]
    clipped: Mapping[str, float] = field(default_factory=dict)

    @property
    def weights(self) -> list[tuple[str, float]]:
        """What each member's blocks are multiplied with."""
        return [
            (peer, tokens * self.clipped[peer] if peer in self.clipped else tokens) for peer, tokens in self.members
        ]


@dataclass(frozen=True)
class AssemblePayload:
    """All chunks are here: keep them as a payload. Ends in PayloadAssembled."""

    round_name: Attempt


@dataclass(frozen=True)
class FetchPayload:
    """Get the payload of `header` from any of these peers, which have it.

    Ends in PayloadFetched or PayloadNotFetched.
    """

    header: Header
    donors: tuple[str, ...]


@dataclass(frozen=True)
class Apply:
    """Take the outer step with the kept payload whose digest is `header.payload`; none where that is NO_PAYLOAD.

    The certificate is kept with the entry. With `keeps_work`, what is being trained, or has been, is for a later entry.
    """

    header: Header
    keeps_work: bool = False
    certificate: Certificate | None = field(default=None, compare=False)


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
    the volunteer, and to everybody in heartbeats."""

    reason: str


Effect = (
    Send
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
