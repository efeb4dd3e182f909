"""Control messages between peers: what each says, and how bytes become one.

Every message names the position that it is about. An answer about a position that the receiver has left behind is
`Commit` with the header that followed, so a lost message is repaired by whichever comes next.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgpack
from pydantic import Field

from peers.leases import PIECE_LIMIT
from peers.log import MEMBER_LIMIT, Header, Member, Position
from peers.wire import (
    PROTOCOL_VERSION,
    Count,
    Digest,
    PeerId,
    Reason,
    Samples,
    Value,
    WireError,
    decode,
    from_plain,
    to_plain,
)


class Attempt(Value):
    """One attempt to produce the entry at `position`. Later attempts have higher numbers; the leader breaks ties."""

    position: Position
    number: Count
    leader: PeerId

    @property
    def order(self) -> tuple[int, str]:
        return self.number, self.leader

    def __str__(self) -> str:
        return f"{self.position.index}.{self.number}"


class Held(Value):
    """An entry whose whole payload a peer has, and the last attempt in which it said so."""

    attempt: Attempt
    header: Header


class LeaseRequest(Value):
    """Joiner → leader: I hold the state at `position`; give me samples to train on."""

    kind: ClassVar[Literal["lease-request"]] = "lease-request"
    position: Position
    state_digest: Digest


class LeaseGrant(Value):
    """Leader → joiner: train these samples, in at most `steps` inner steps, to finish together with the others."""

    kind: ClassVar[Literal["lease-grant"]] = "lease-grant"
    position: Position
    samples: Annotated[tuple[Samples, ...], Field(min_length=1, max_length=PIECE_LIMIT)]
    steps: Count


class Ready(Value):
    """Member → leader: my inner steps are done; I take part in your next attempt and in no earlier one.

    An `incumbent` has been in the run since before this position. A peer that started at it may have been here before
    and forgotten what it held, so it does not count towards the quorum that protects a committed entry.
    """

    kind: ClassVar[Literal["ready"]] = "ready"
    position: Position
    state_digest: Digest
    tokens: Count
    samples: Annotated[tuple[Samples, ...], Field(max_length=PIECE_LIMIT)]
    incumbent: Annotated[bool, Field(strict=True)]
    last_attempt: Count
    held: Held | None


class Begin(Value):
    """Leader → members: exchange now. With `adopted`, an earlier attempt's entry is handed on instead, by the first of
    the `holders` to those who are not among them."""

    kind: ClassVar[Literal["begin"]] = "begin"
    attempt: Attempt
    roster: Annotated[tuple[Member, ...], Field(min_length=1, max_length=MEMBER_LIMIT)]
    adopted: Held | None
    holders: Annotated[tuple[PeerId, ...], Field(max_length=MEMBER_LIMIT)]

    @property
    def position(self) -> Position:
        return self.attempt.position


class Waiting(Value):
    """Member → leader: I still need something from these peers."""

    kind: ClassVar[Literal["waiting"]] = "waiting"
    attempt: Attempt
    missing: Annotated[tuple[PeerId, ...], Field(max_length=MEMBER_LIMIT)]

    @property
    def position(self) -> Position:
        return self.attempt.position


class Accuse(Value):
    """Member → leader: this peer sent me blocks that no encoder makes."""

    kind: ClassVar[Literal["accuse"]] = "accuse"
    attempt: Attempt
    accused: PeerId
    reason: Reason

    @property
    def position(self) -> Position:
        return self.attempt.position


class Complete(Value):
    """Member → leader: I hold the whole payload, and this is its digest."""

    kind: ClassVar[Literal["complete"]] = "complete"
    attempt: Attempt
    payload: Digest

    @property
    def position(self) -> Position:
        return self.attempt.position


class Commit(Value):
    """The entry that follows `header.previous` is this one."""

    kind: ClassVar[Literal["commit"]] = "commit"
    header: Header

    @property
    def position(self) -> Position:
        return Position(index=self.header.index, head=self.header.previous)


class Abort(Value):
    """Leader → members: this attempt is over; say Ready again."""

    kind: ClassVar[Literal["abort"]] = "abort"
    attempt: Attempt
    reason: Reason

    @property
    def position(self) -> Position:
        return self.attempt.position


class Refuse(Value):
    """Leader → peer: what you have can't be used at this position; fetch the state from a peer and ask again."""

    kind: ClassVar[Literal["refuse"]] = "refuse"
    position: Position
    reason: Reason


class Inquire(Value):
    """What followed `position`? Asked of a peer whose heartbeat is further on."""

    kind: ClassVar[Literal["inquire"]] = "inquire"
    position: Position


class Elsewhere(Value):
    """The position you spoke of is not in my recent log; mine is `position`."""

    kind: ClassVar[Literal["elsewhere"]] = "elsewhere"
    position: Position


class Leaving(Value):
    """Deathrattle: do not wait for me any more.

    Who `holds` a payload may be needed to know whether an entry was committed, and goes on counting in the quorum.
    """

    kind: ClassVar[Literal["leaving"]] = "leaving"
    position: Position
    holds: Annotated[bool, Field(strict=True)]


Message = (
    LeaseRequest
    | LeaseGrant
    | Ready
    | Begin
    | Waiting
    | Accuse
    | Complete
    | Commit
    | Abort
    | Refuse
    | Inquire
    | Elsewhere
    | Leaving
)
KINDS: dict[str, type[Message]] = {
    kind.kind: kind
    for kind in (
        LeaseRequest,
        LeaseGrant,
        Ready,
        Begin,
        Waiting,
        Accuse,
        Complete,
        Commit,
        Abort,
        Refuse,
        Inquire,
        Elsewhere,
        Leaving,
    )
}


def pack_message(run: str, message: Message) -> bytes:
    """Envelope: [protocol version, run id, kind, body]."""
    packed: bytes = msgpack.packb([PROTOCOL_VERSION, run, message.kind, to_plain(message)], use_bin_type=True)
    return packed


def unpack_message(run: str, data: bytes) -> Message:
    """Raises: WireError when the bytes are no message of this protocol version and this run."""
    envelope = decode(data)
    if not isinstance(envelope, list) or len(envelope) != 4:
        raise WireError("not a message envelope")
    version, named_run, kind, body = envelope
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise WireError(f"protocol version {version!r:.20}; this is version {PROTOCOL_VERSION}")
    if named_run != run:
        raise WireError("a message of another run")
    if not isinstance(kind, str) or kind not in KINDS:
        raise WireError(f"unknown kind of message {str(kind)[:40]!r}")
    return from_plain(KINDS[kind], body)
