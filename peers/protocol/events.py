"""Events: the reports of a driver to its peer's protocol, as plain values. The driver does the I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from peers.log.header import NO_PAYLOAD, Header
from peers.log.lineage import Branch
from peers.log.state import LogState
from peers.messages.averages import Origin
from peers.messages.commitment import CommittedChunk
from peers.messages.messages import Message, Unread
from peers.messages.rounds import RoundName
from peers.presence.heartbeat import Heartbeat
from peers.values.manifest import Amendment
from peers.values.signed_heads import SignedHeads
from peers.values.wire import Reach
from peers.values.workload import Progress, Trained


class Event:
    """A report of the driver to its peer's protocol."""


@dataclass(frozen=True)
class Tick(Event):
    """The passing of time: the driver sends a Tick at regular intervals."""


@dataclass(frozen=True)
class HeartbeatsSeen(Event):
    """The newest heartbeat of each peer that this peer hears. `silences` are the seconds since each peer was last heard
    (0 for a peer without a value). `unheard` are peers that this peer does not hear, but whose fresh heartbeats the
    DHT or other peers have."""

    heartbeats: tuple[Heartbeat, ...]
    silences: Mapping[str, float] = field(default_factory=dict)
    unheard: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Received(Event):
    sender: str
    message: Message | Unread


@dataclass(frozen=True)
class Undelivered(Event):
    """The failed delivery of a message to `peer`."""

    peer: str


@dataclass(frozen=True)
class ReachSeen(Event):
    """The reach of other peers, and the `rates`, in bytes a second, at which their data arrived in the last rounds.
    `sought` are the peers to which the driver still tries to open a link."""

    reach: Mapping[str, Reach]
    rates: Mapping[str, int]
    sought: frozenset[str] = frozenset()


@dataclass(frozen=True)
class TrainingProgress(Event):
    progress: Progress


@dataclass(frozen=True)
class Captured(Event):
    """The quantized result of one fragment, from a training that is still under way. `trained` names no samples,
    because only the closing entry of a cycle names samples."""

    fragment: int
    trained: Trained


@dataclass(frozen=True)
class TrainingDone(Event):
    """The end of the training of a lease, with the quantized result."""

    trained: Trained


@dataclass(frozen=True)
class ContributionArrived(Event):
    """The arrival of the blocks of `sender` for a chunk that this peer averages."""

    round_name: RoundName
    sender: str
    chunk: int


@dataclass(frozen=True)
class BadBlocks(Event):
    """The arrival of wrong data, which the driver dropped: blocks of `sender`, or, if `reduced` is true, an average
    that `sender` signed. `evidence` is a proof that other peers can check, if there is one."""

    round_name: RoundName
    sender: str
    chunk: int
    reason: str
    evidence: CommittedChunk | None = None
    reduced: bool = False


@dataclass(frozen=True)
class ReducedArrived(Event):
    """The arrival from `sender` of a chunk's average, without blocks of the `absent` members. `origin` is its reducer
    with a signature, `squares` its squared norm; None and 0 if this peer averaged the chunk and is the sender."""

    round_name: RoundName
    sender: str
    chunk: int
    absent: tuple[str, ...]
    digest: bytes = field(default=NO_PAYLOAD, compare=False)
    origin: Origin | None = field(default=None, compare=False)
    squares: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class AverageRefuted(Event):
    """The result of a spot check: the average of a chunk's blocks differs from the average that its reducer signed."""

    round_name: RoundName
    reducer: str
    chunk: int


@dataclass(frozen=True)
class ChunkSent(Event):
    """The confirmation by `peer` that it received a chunk: an average if `reduced`, else this peer's own blocks."""

    round_name: RoundName
    peer: str
    chunk: int
    reduced: bool


@dataclass(frozen=True)
class ChunksUnsent(Event):
    """The loss of the link to `peer` before `peer` confirmed these chunks."""

    round_name: RoundName
    peer: str
    chunks: tuple[int, ...]
    reduced: bool


@dataclass(frozen=True)
class NothingToTrain(Event):
    """The end of the run, after its last outer step: the workers rest, and this peer only sends the state to others."""


@dataclass(frozen=True)
class VotesKept(Event):
    """The confirmation that the oldest waiting voting record is on the disk."""


@dataclass(frozen=True)
class VotesNotKept(Event):
    """The failure to write the oldest waiting voting record to the disk."""

    reason: str


@dataclass(frozen=True)
class PayloadAssembled(Event):
    """The completion of a round's payload. `trouble` is the reason why it is not on the disk; empty if it is."""

    round_name: RoundName
    digest: bytes
    trouble: str = ""


@dataclass(frozen=True)
class PayloadFetched(Event):
    """The arrival of a payload from a donor or our log. `trouble` says why it is not on the disk; empty if it is."""

    header: Header
    trouble: str = ""


@dataclass(frozen=True)
class PayloadNotFetched(Event):
    header: Header
    reason: str


@dataclass(frozen=True)
class RateMeasured(Event):
    """The rate of this machine's link in each direction, in bytes a second, measured in a round or test; 0 if
    unknown."""

    rate: int


@dataclass(frozen=True)
class Applied(Event):
    """The completion of the header's outer step. After a cycle's last entry Digested follows."""

    header: Header


@dataclass(frozen=True)
class Digested(Event):
    """The digest of theta and momentum after the last applied entry, which closed a cycle."""

    header: Header
    state_digest: bytes


@dataclass(frozen=True)
class SnapshotRestored(Event):
    """The replacement of theta and momentum by the donor's, as they are after the cycle that `header` closed (None:
    before the first entry).

    `lineage` has the heads of the donor's newest cycles, oldest first. `ends` has the digests of the entries in the
    header's cycle, if it has several. `doubt` is the newest place in that lineage that was followed by an uncertified
    entry.
    """

    donor: str
    header: Header | None
    state_digest: bytes
    lineage: tuple[bytes, ...] = ()
    ends: tuple[bytes, ...] = ()
    doubt: LogState | None = None


@dataclass(frozen=True)
class SnapshotFailed(Event):
    donor: str
    reason: str


@dataclass(frozen=True)
class LineageSeen(Event):
    """The result of FetchLineage: the donor's log and this peer's own, each from the last place that both logs have."""

    donor: str
    theirs: Branch
    ours: Branch


@dataclass(frozen=True)
class LineageNotSeen(Event):
    donor: str
    reason: str


@dataclass(frozen=True)
class SignedHeadsSeen(Event):
    """The heads that the run's archives have signed, as far as this peer knows. `ours` are the heads of its own log at
    the same indices."""

    signed: SignedHeads
    ours: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class AmendmentSeen(Event):
    """An amendment of the run's organiser that the volunteer has given to this machine; other peers did not send it."""

    amendment: Amendment


@dataclass(frozen=True)
class HeadsSeen(Event):
    """The heads of consecutive cycles up to `index`, oldest first, from the log on this machine's disk. A peer that
    began with a snapshot does not have the heads before the snapshot in memory."""

    index: int
    heads: tuple[bytes, ...]


@dataclass(frozen=True)
class LeaveRequested(Event):
    """The volunteer's request to leave the run: after the round under way, or `at_once`."""

    at_once: bool = False
