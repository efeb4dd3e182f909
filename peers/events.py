"""What happens to the protocol (events), and what it wants done (effects). Plain values; drivers do the I/O."""

from __future__ import annotations

from dataclasses import dataclass

from peers.heartbeat import Heartbeat
from peers.leases import Lease
from peers.log import Header, Member
from peers.messages import Attempt, Message
from peers.workload import Progress, Trained


# Events ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class HeartbeatsSeen:
    heartbeats: tuple[Heartbeat, ...]


@dataclass(frozen=True)
class Received:
    sender: str
    message: Message


@dataclass(frozen=True)
class Undelivered:
    """A message or a push did not reach `peer`."""

    peer: str


@dataclass(frozen=True)
class TrainingProgress:
    progress: Progress


@dataclass(frozen=True)
class TrainingDone:
    trained: Trained


@dataclass(frozen=True)
class Quantized:
    """Our contribution to `attempt` is ready to be sent."""

    attempt: Attempt


@dataclass(frozen=True)
class ContributionArrived:
    """`sender`'s blocks of our part are here."""

    attempt: Attempt
    sender: str


@dataclass(frozen=True)
class BadBlocks:
    """`sender`'s blocks are not what an encoder makes; they were dropped."""

    attempt: Attempt
    sender: str
    reason: str


@dataclass(frozen=True)
class ReducedArrived:
    """The averaged blocks of `part` are here, from the peer that reduced it (ourselves included)."""

    attempt: Attempt
    part: int


@dataclass(frozen=True)
class Pushed:
    """`peer` confirmed that it has our push."""

    attempt: Attempt
    peer: str
    reduced: bool


@dataclass(frozen=True)
class PushFailed:
    """The push to `peer` failed; `refused` when the peer answered that it does not want it (yet)."""

    attempt: Attempt
    peer: str
    reduced: bool
    refused: bool


@dataclass(frozen=True)
class PayloadDigested:
    attempt: Attempt
    digest: bytes


@dataclass(frozen=True)
class Applied:
    """The outer step is done; theta and momentum now have this digest."""

    header: Header
    state_digest: bytes


@dataclass(frozen=True)
class SnapshotRestored:
    """theta and momentum are the donor's, at the position after `header` (None: before the first entry)."""

    donor: str
    header: Header | None
    state_digest: bytes


@dataclass(frozen=True)
class SnapshotFailed:
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
    | TrainingDone
    | Quantized
    | ContributionArrived
    | BadBlocks
    | ReducedArrived
    | Pushed
    | PushFailed
    | PayloadDigested
    | Applied
    | SnapshotRestored
    | SnapshotFailed
    | LeaveRequested
)


# Effects --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Send:
    to: str
    message: Message


@dataclass(frozen=True)
class Train:
    index: int
    lease: Lease
    steps: int


@dataclass(frozen=True)
class StopTraining:
    """Whatever the worker has done since theta was loaded is void."""


@dataclass(frozen=True)
class OpenRound:
    """Make room for an attempt: one part per owner, in order. Buffers of other attempts may go, the held payload stays.

    To average, quantize our contribution (ends in Quantized). With `adopted`, the payload of that digest is handed on
    whole by the only owner; if it is the one held, it has arrived already (ReducedArrived).
    """

    attempt: Attempt
    roster: tuple[Member, ...]
    owners: tuple[str, ...]
    adopted: bytes | None


@dataclass(frozen=True)
class PushContribution:
    """Our blocks of `part` to the peer that reduces it."""

    attempt: Attempt
    part: int
    to: str


@dataclass(frozen=True)
class ReducePart:
    """Average our part over the whole roster; ends in ReducedArrived."""

    attempt: Attempt
    part: int


@dataclass(frozen=True)
class PushReduced:
    """The averaged blocks of our part to a member."""

    attempt: Attempt
    part: int
    to: str


@dataclass(frozen=True)
class DigestPayload:
    """All parts are here: digest the payload and keep it as the one held."""

    attempt: Attempt


@dataclass(frozen=True)
class Apply:
    """Take the outer step with the held payload, whose digest is `header.payload`."""

    header: Header


@dataclass(frozen=True)
class FetchSnapshot:
    donor: str


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


Effect = (
    Send
    | Train
    | StopTraining
    | OpenRound
    | PushContribution
    | ReducePart
    | PushReduced
    | DigestPayload
    | Apply
    | FetchSnapshot
    | Stop
    | Note
    | Dropped
)
