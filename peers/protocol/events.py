"""Events: what happens to a peer, as plain values. Drivers do the I/O and create them."""

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
    """Something that has happened to a peer."""


@dataclass(frozen=True)
class Tick(Event):
    """Time has passed: sent at regular intervals."""


@dataclass(frozen=True)
class HeartbeatsSeen(Event):
    """The newest heartbeat of each peer that this peer hears. `silences` are the seconds since the last news of each
    peer (0 if not named). `unheard` are peers with fresh records, in the DHT or from other peers, that this peer does
    not hear."""

    heartbeats: tuple[Heartbeat, ...]
    silences: Mapping[str, float] = field(default_factory=dict)
    unheard: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Received(Event):
    sender: str
    message: Message | Unread


@dataclass(frozen=True)
class Undelivered(Event):
    """A message or a push to `peer` was not delivered."""

    peer: str


@dataclass(frozen=True)
class ReachSeen(Event):
    """The reach of other peers, and the bytes a second at which their data arrived in the last rounds. For the peers
    `sought` the driver still looks for a link."""

    reach: Mapping[str, Reach]
    rates: Mapping[str, int]
    sought: frozenset[str] = frozenset()


@dataclass(frozen=True)
class TrainingProgress(Event):
    progress: Progress


@dataclass(frozen=True)
class Captured(Event):
    """One fragment of a training that goes on, quantized. `trained` names no samples, because only the closing entry of
    a cycle names samples."""

    fragment: int
    trained: Trained


@dataclass(frozen=True)
class TrainingDone(Event):
    """The workers have trained a lease, and its result is quantized."""

    trained: Trained


@dataclass(frozen=True)
class ContributionArrived(Event):
    """The blocks of `sender` for a chunk that this peer reduces have arrived."""

    round_name: RoundName
    sender: str
    chunk: int


@dataclass(frozen=True)
class BadBlocks(Event):
    """Wrong blocks of `sender` were dropped, or a wrong average that `sender` signed (`reduced`). `evidence` is a proof
    that other peers can check."""

    round_name: RoundName
    sender: str
    chunk: int
    reason: str
    evidence: CommittedChunk | None = None
    reduced: bool = False


@dataclass(frozen=True)
class ReducedArrived(Event):
    """An averaged chunk is complete; it has no blocks of the `absent` members. `sender` delivered it. `digest` and
    `origin` are those that its reducer signed; they are empty if this peer is the reducer and has not signed yet.
    `squares` is the squared norm."""

    round_name: RoundName
    sender: str
    chunk: int
    absent: tuple[str, ...]
    digest: bytes = field(default=NO_PAYLOAD, compare=False)
    origin: Origin | None = field(default=None, compare=False)
    squares: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class AverageRefuted(Event):
    """The members' blocks of a chunk have another average than the one that its reducer signed."""

    round_name: RoundName
    reducer: str
    chunk: int


@dataclass(frozen=True)
class ChunkSent(Event):
    """A confirmation by `peer` that it received this peer's chunk."""

    round_name: RoundName
    peer: str
    chunk: int
    reduced: bool


@dataclass(frozen=True)
class ChunksUnsent(Event):
    """The link to `peer` broke before `peer` confirmed these chunks."""

    round_name: RoundName
    peer: str
    chunks: tuple[int, ...]
    reduced: bool


@dataclass(frozen=True)
class NothingToTrain(Event):
    """The run has reached its last outer step: the workers rest, and this peer serves the state to others."""


@dataclass(frozen=True)
class VotesKept(Event):
    """The oldest voting record that was waiting is on the disk."""


@dataclass(frozen=True)
class VotesNotKept(Event):
    """The oldest voting record that was waiting could not be written to the disk."""

    reason: str


@dataclass(frozen=True)
class PayloadAssembled(Event):
    """The round's payload is complete and kept. `trouble` says why it is not on the disk; empty if it is."""

    round_name: RoundName
    digest: bytes
    trouble: str = ""


@dataclass(frozen=True)
class PayloadFetched(Event):
    """A payload was fetched and kept. `trouble` says why it is not on the disk; empty if it is."""

    header: Header
    trouble: str = ""


@dataclass(frozen=True)
class PayloadNotFetched(Event):
    header: Header
    reason: str


@dataclass(frozen=True)
class RateMeasured(Event):
    """The bytes a second that this machine's link carried each way, in a round or in an earlier test; 0 if unknown."""

    rate: int


@dataclass(frozen=True)
class Applied(Event):
    """The outer step is done and theta may be trained. Digested follows with the state's digest."""

    header: Header


@dataclass(frozen=True)
class Digested(Event):
    """The digest of theta and momentum after the last applied entry."""

    header: Header
    state_digest: bytes


@dataclass(frozen=True)
class SnapshotRestored(Event):
    """theta and momentum are now the donor's, after the cycle that `header` closed (None: before the first entry).

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
    """The donor's log and this peer's own, each from the last place that both have."""

    donor: str
    theirs: Branch
    ours: Branch


@dataclass(frozen=True)
class LineageNotSeen(Event):
    donor: str
    reason: str


@dataclass(frozen=True)
class SignedHeadsSeen(Event):
    """The heads that the run's archives have signed, as far as this peer knows, and the heads of its own log at their
    indices."""

    signed: SignedHeads
    ours: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class AmendmentSeen(Event):
    """An amendment that the run's organiser has given to this machine."""

    amendment: Amendment


@dataclass(frozen=True)
class HeadsSeen(Event):
    """The heads of consecutive cycles up to `index`, oldest first, from the log on this machine's disk. A peer that
    began with a snapshot does not know the heads before it."""

    index: int
    heads: tuple[bytes, ...]


@dataclass(frozen=True)
class LeaveRequested(Event):
    """The volunteer wants the machine back: after the round under way, or `at_once`."""

    at_once: bool = False
