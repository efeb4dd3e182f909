"""What happens to the protocol. Plain values; drivers do the I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from peers.log.header import NO_PAYLOAD, Header
from peers.log.lineage import Branch
from peers.log.state import LogState
from peers.presence.heartbeat import Heartbeat
from peers.protocol.commitment import Evidence
from peers.protocol.messages import Message, Unread
from peers.protocol.parts import Origin
from peers.protocol.rounds import RoundName
from peers.values.manifest import Amendment
from peers.values.signed_heads import SignedHeads
from peers.values.wire import Reach
from peers.values.workload import Progress, Trained


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class HeartbeatsSeen:
    """The newest heartbeat of each peer that is heard, and for how many seconds nothing newer had come of it (not
    named: it comes only now). `unheard` are peers that are not heard, though their records are fresh: in the DHT, or as
    others hand them out."""

    heartbeats: tuple[Heartbeat, ...]
    silences: Mapping[str, float] = field(default_factory=dict)
    unheard: frozenset[str] = frozenset()


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

    round_name: RoundName
    sender: str
    chunk: int


@dataclass(frozen=True)
class BadBlocks:
    """The blocks of `sender`, or an average that it has signed (`reduced`), are not what they ought to be, and were
    dropped. The `evidence` convinces others, too."""

    round_name: RoundName
    sender: str
    chunk: int
    reason: str
    evidence: Evidence | None = None
    reduced: bool = False


@dataclass(frozen=True)
class ReducedArrived:
    """An averaged chunk is here, from the peer that reduced it (ourselves included); blocks of `absent` are not in it.

    `sender` handed it to us; its `digest` is what the reducer has signed, as `origin` has it. What is ours is yet to be
    signed. `squares` is its squared norm.
    """

    round_name: RoundName
    sender: str
    chunk: int
    absent: tuple[str, ...]
    digest: bytes = field(default=NO_PAYLOAD, compare=False)
    origin: Origin | None = field(default=None, compare=False)
    squares: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class AverageRefuted:
    """Of all that the members of a round have committed to, another average of a chunk comes out than its reducer has
    signed."""

    round_name: RoundName
    reducer: str
    chunk: int


@dataclass(frozen=True)
class ChunkSent:
    """`peer` confirmed that it has our chunk."""

    round_name: RoundName
    peer: str
    chunk: int
    reduced: bool


@dataclass(frozen=True)
class ChunksUnsent:
    """The way to `peer` broke off before it had confirmed these chunks."""

    round_name: RoundName
    peer: str
    chunks: tuple[int, ...]
    reduced: bool


@dataclass(frozen=True)
class VotesKept:
    """The oldest voting record that was to be kept is on the disk."""


@dataclass(frozen=True)
class VotesNotKept:
    """The disk did not take the oldest voting record that was to be kept."""

    reason: str


@dataclass(frozen=True)
class PayloadAssembled:
    """All chunks of the round are here; the payload has this digest and is kept. `trouble` says why it is not on the
    disk; empty: it is."""

    round_name: RoundName
    digest: bytes
    trouble: str = ""


@dataclass(frozen=True)
class PayloadFetched:
    """The payload of `header` is here, as peers kept it. `trouble` says why it is not on the disk; empty: it is."""

    header: Header
    trouble: str = ""


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
class SignedHeadsSeen:
    """What is known of the heads that the run's archives have signed. `ours` are those of our log at their indices, as
    far as it has them."""

    signed: SignedHeads
    ours: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class AmendmentSeen:
    """An amendment that the run's organiser has given to this machine."""

    amendment: Amendment


@dataclass(frozen=True)
class HeadsSeen:
    """What named the log after consecutive cycles up to `index`, oldest first, as the log that is kept here has it: a
    peer that began with a state knows of the time before no more than that."""

    index: int
    heads: tuple[bytes, ...]


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
    | AverageRefuted
    | ChunkSent
    | ChunksUnsent
    | VotesKept
    | VotesNotKept
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
    | SignedHeadsSeen
    | AmendmentSeen
    | HeadsSeen
    | LeaveRequested
)
