"""Events: the things that happen to a peer, as plain values. Drivers do the I/O."""

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
    """One thing that has happened to a peer. A plain value; drivers do the I/O."""


@dataclass(frozen=True)
class Tick(Event):
    """Time has passed."""


@dataclass(frozen=True)
class HeartbeatsSeen(Event):
    """The newest heartbeat of each peer that is heard, and the seconds for which nothing newer has come from it (0 if
    not named). `unheard` are peers with fresh records, in the DHT or from others, that are not heard."""

    heartbeats: tuple[Heartbeat, ...]
    silences: Mapping[str, float] = field(default_factory=dict)
    unheard: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Received(Event):
    sender: str
    message: Message | Unread


@dataclass(frozen=True)
class Undelivered(Event):
    """A message or a push did not reach `peer`."""

    peer: str


@dataclass(frozen=True)
class ReachSeen(Event):
    """How other peers are reached now, and the bytes a second at which their data came in the last rounds. Ways to
    the peers `sought` are still looked for."""

    reach: Mapping[str, Reach]
    rates: Mapping[str, int]
    sought: frozenset[str] = frozenset()


@dataclass(frozen=True)
class TrainingProgress(Event):
    progress: Progress


@dataclass(frozen=True)
class Captured(Event):
    """One fragment of a training that goes on, quantized. `trained` names no samples: the closing entry does."""

    fragment: int
    trained: Trained


@dataclass(frozen=True)
class TrainingDone(Event):
    """The training of a lease, quantized."""

    trained: Trained


@dataclass(frozen=True)
class ContributionArrived(Event):
    """A sender's own blocks of a chunk that this peer reduces are here."""

    round_name: RoundName
    sender: str
    chunk: int


@dataclass(frozen=True)
class BadBlocks(Event):
    """Blocks of `sender`, or an average that it has signed (`reduced`), were wrong and dropped. The `evidence`
    convinces other peers, too."""

    round_name: RoundName
    sender: str
    chunk: int
    reason: str
    evidence: CommittedChunk | None = None
    reduced: bool = False


@dataclass(frozen=True)
class ReducedArrived(Event):
    """An averaged chunk is here, without the blocks of `absent`. `sender` gave it; `digest` and `origin` are as its
    reducer has signed them, or none if that is this peer, which has yet to sign. `squares` is the squared norm."""

    round_name: RoundName
    sender: str
    chunk: int
    absent: tuple[str, ...]
    digest: bytes = field(default=NO_PAYLOAD, compare=False)
    origin: Origin | None = field(default=None, compare=False)
    squares: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class AverageRefuted(Event):
    """The members' blocks of a chunk average to something else than its reducer has signed."""

    round_name: RoundName
    reducer: str
    chunk: int


@dataclass(frozen=True)
class ChunkSent(Event):
    """A peer has confirmed that it has our chunk."""

    round_name: RoundName
    peer: str
    chunk: int
    reduced: bool


@dataclass(frozen=True)
class ChunksUnsent(Event):
    """The link to a peer broke before it confirmed these chunks."""

    round_name: RoundName
    peer: str
    chunks: tuple[int, ...]
    reduced: bool


@dataclass(frozen=True)
class NothingToTrain(Event):
    """The run has had its last outer step: the worker rests, and this peer hands the state out."""


@dataclass(frozen=True)
class VotesKept(Event):
    """The oldest voting record that waited is on the disk."""


@dataclass(frozen=True)
class VotesNotKept(Event):
    """The disk did not take the oldest voting record that waited."""

    reason: str


@dataclass(frozen=True)
class PayloadAssembled(Event):
    """The round's payload is whole and kept. `trouble` says why it is not on the disk; empty: it is."""

    round_name: RoundName
    digest: bytes
    trouble: str = ""


@dataclass(frozen=True)
class PayloadFetched(Event):
    """A payload was fetched and kept. `trouble` says why it is not on the disk; empty: it is."""

    header: Header
    trouble: str = ""


@dataclass(frozen=True)
class PayloadNotFetched(Event):
    header: Header
    reason: str


@dataclass(frozen=True)
class RateMeasured(Event):
    """The bytes a second that this machine's link has carried each way, in a round or a test before. 0: unknown."""

    rate: int


@dataclass(frozen=True)
class Applied(Event):
    """The outer step is taken, and theta may be trained. The state's digest follows, in Digested."""

    header: Header


@dataclass(frozen=True)
class Digested(Event):
    """The digest of theta and momentum, as the last applied entry left them."""

    header: Header
    state_digest: bytes


@dataclass(frozen=True)
class SnapshotRestored(Event):
    """theta and momentum are the donor's, after the cycle that `header` closed (None: before the first entry).

    `lineage` has the heads of the donor's newest cycles, oldest first; `ends` the digests of the header's cycle, where
    it has several entries; `doubt` is the newest place in that lineage from which too few went on.
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
    """The donor's log and ours, from the last place on that both have."""

    donor: str
    theirs: Branch
    ours: Branch


@dataclass(frozen=True)
class LineageNotSeen(Event):
    donor: str
    reason: str


@dataclass(frozen=True)
class SignedHeadsSeen(Event):
    """The heads that the run's archives have signed, as far as known, and those of our log at their indices."""

    signed: SignedHeads
    ours: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class AmendmentSeen(Event):
    """An amendment that the run's organiser has given to this machine."""

    amendment: Amendment


@dataclass(frozen=True)
class HeadsSeen(Event):
    """The heads of consecutive cycles up to `index`, oldest first, from the log that is kept here: a peer that began
    with a snapshot knows no earlier ones."""

    index: int
    heads: tuple[bytes, ...]


@dataclass(frozen=True)
class LeaveRequested(Event):
    """The volunteer wants the machine back, after a round under way, or `at_once`."""

    at_once: bool = False
