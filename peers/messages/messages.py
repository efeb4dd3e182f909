"""The messages between peers: their fields and meaning. packing.py turns messages into bytes.

Every message names the position that it is about. A message about a position that the receiver has left is answered
with `Certified` and the header that followed there, so the next message repairs a lost one.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from peers.log.certificate import Ballot, Certificate, Choice, Group, Phase, digest_of_group, position_of
from peers.log.header import MEMBER_LIMIT, Header, Kind, Position
from peers.messages.averages import Averaged, Marks
from peers.messages.chunk_sets import ChunkSet
from peers.messages.commitment import Commitment, Contribution, Norms
from peers.messages.rounds import Round, RoundName
from peers.presence.reachability import SEEN_LIMIT
from peers.values.identity import SIGNATURE_BYTES, Signature
from peers.values.leases import PIECE_LIMIT
from peers.values.wire import DIGEST_BYTES, MESSAGE_LIMIT, Count, Digest, PeerId, Reason, Samples, Seconds, Value

PROOF_LIMIT = MESSAGE_LIMIT - (1 << 13)
"""Maximum bytes of a proof, so that it fits into a message with the envelope."""
Peers = Annotated[tuple[PeerId, ...], Field(max_length=MEMBER_LIMIT)]
Rates = Annotated[tuple[tuple[PeerId, Count], ...], Field(max_length=SEEN_LIMIT)]
"""Peers, each with a data rate in bytes a second."""
Heirs = Annotated[tuple[tuple[PeerId, PeerId], ...], Field(max_length=MEMBER_LIMIT)]
"""Reducers that gave no Part, each with the member that averages its chunks instead."""
Signed = Annotated[tuple[Averaged, ...], Field(max_length=MESSAGE_LIMIT // (DIGEST_BYTES + SIGNATURE_BYTES))]


class LeaseRequest(Value):
    """Joiner → leader: I hold the state at `position`; give me samples to train."""

    kind: ClassVar[Literal["lease-request"]] = "lease-request"
    position: Position
    state_digest: Digest


class LeaseGrant(Value):
    """Leader → joiner: train these samples, in at most `steps` inner steps, to finish together with the others."""

    kind: ClassVar[Literal["lease-grant"]] = "lease-grant"
    position: Position
    samples: Annotated[tuple[Samples, ...], Field(min_length=1, max_length=PIECE_LIMIT)]
    steps: Count


class Refuse(Value):
    """Leader → peer: your state or your samples cannot be used at this position (R14).

    `state_digest` is the leader's. A receiver with another state fetches the leader's, unless most voters name its own;
    one with the same state asks for other samples. A voter's *refusal* of a proposal is something else, and is in its
    Ready.
    """

    kind: ClassVar[Literal["refuse"]] = "refuse"
    position: Position
    state_digest: Digest
    reason: Reason


class Certified(Value):
    """Leader → all: this header is prepared (phase 1: a lock) or committed (phase 2: an entry), as the certificate
    proves. `certificate` is None if the sender knows none. Then the receiver believes the entry only if no voter of the
    position is live, or all of them have sent farewells (R21)."""

    kind: ClassVar[Literal["certified"]] = "certified"
    header: Header
    certificate: Certificate | None

    @property
    def position(self) -> Position:
        return position_of(self.header)


class Ready(Value):
    """Member → leader of its view, each second: my inner steps are done, and I take part in the round at `position`.

    Its work: `commitment` is to its blocks, None if it has trained nothing. `wants` is the number of samples of its
    next lease; 0 is a whole one.

    Its link: `rate` is the bytes a second that it was seen to carry each way; 0 if not measured. `seen` are the bytes a
    second at which data of some other peers arrived in recent rounds. `relayed` and `unreached` are the peers that it
    reaches only through a relay, or not at all.

    Its round and votes: `round` names the exchange that it is in, and `terms` is the digest of the facts about it that
    its members must agree on. `lock` is the header that it is locked on, with the prepare certificate. `refused` is the
    ballot of the last proposal that it did not vote for, and `reason` is a Refusal (R5). The other fields depend on the
    reason:

    - `named`: the voters that it hears and the header calls gone (R5.7); or the newcomers that it does not hear (R5.7);
      or the peers that are here and not in a minority's group (R5.11). Otherwise, the voters that it hears and that are
      not in its round, or outside a round not in the last entry, because the leader may not hear them (R12).
    - `lacking`: the reducers whose proposed averages it misses (R5.5).
    - `unproven`: the digests of proofs that it misses (R5.8).
    """

    kind: ClassVar[Literal["ready"]] = "ready"
    position: Position
    view: Count
    incarnation: Count
    state_digest: Digest
    tokens: Count
    samples: Annotated[tuple[Samples, ...], Field(max_length=PIECE_LIMIT)]
    wants: Count
    commitment: Commitment | None
    round: RoundName | None
    terms: Digest | None = None
    rate: Count
    seen: Rates
    relayed: Peers
    unreached: Peers
    lock: Certified | None
    refused: Ballot | None = None
    reason: Reason = ""
    named: Peers = ()
    lacking: Peers = ()
    unproven: Annotated[tuple[Digest, ...], Field(max_length=16)] = ()


class Begin(Value):
    """Leader → members: exchange your blocks in this round; or continue it, with heirs for reducers that sent no Part.

    `seconds` is the time limit of the exchange; after six tenths of it a reducer averages the blocks that it has. The
    message to members that average has the `commitments` of all contributors, in roster order; the one to other voters
    has at least their `norms`.
    """

    kind: ClassVar[Literal["begin"]] = "begin"
    ballot: Ballot
    round: Round
    seconds: Seconds
    heirs: Heirs
    commitments: Annotated[tuple[Contribution, ...], Field(max_length=MEMBER_LIMIT)]
    norms: Norms | None = None

    @property
    def position(self) -> Position:
        return self.round.name.position


class Part(Value):
    """Reducer → leader: these are all averages that I have signed in this round."""

    kind: ClassVar[Literal["part"]] = "part"
    round: RoundName
    averages: Signed

    @property
    def position(self) -> Position:
        return self.round.position


class Want(Value):
    """Member → member: send me your averages of the chunks in `averages`, and your own blocks of the chunks in
    `blocks`."""

    kind: ClassVar[Literal["want"]] = "want"
    round: RoundName
    averages: ChunkSet
    blocks: ChunkSet

    @property
    def position(self) -> Position:
        return self.round.position


class Propose(Value):
    """Leader → members: vote for this header.

    `justify` is the prepare certificate of this header, if the leader knows one. Without it the header is the outcome
    of `round`, and `marks` name its averages, in the order of the chunks.
    """

    kind: ClassVar[Literal["propose"]] = "propose"
    ballot: Ballot
    header: Header
    group: Group
    justify: Certificate | None
    round: RoundName | None
    marks: Marks = b""

    @property
    def position(self) -> Position:
        return position_of(self.header)

    @cached_property
    def choice(self) -> Choice:
        """The choice that a voter signs in phase 1 if it agrees with this proposal."""
        return Choice(
            ballot=self.ballot,
            phase=Phase.PREPARE,
            header=self.header.digest,
            group=digest_of_group(self.group),
            justify=self.justify.choice.ballot if self.justify else None,
        )


class Vote(Value):
    """Voter → leader, and in rounds of up to 16 members → all: I vote for this choice, in this incarnation."""

    kind: ClassVar[Literal["vote"]] = "vote"
    position: Position
    incarnation: Count
    choice: Choice
    signature: Signature

    @property
    def text(self) -> bytes:
        return self.choice.text(self.position, self.incarnation)


class Proof(Value):
    """Member → leader: this proves that a peer has lied (R9). Leader → members: this proves a fault that the next
    header names."""

    kind: ClassVar[Literal["proof"]] = "proof"
    position: Position
    fault: Kind
    proof: Annotated[bytes, Field(strict=True, max_length=PROOF_LIMIT)]


class Inquire(Value):
    """Peer → a peer whose heartbeat shows a longer log: which entry followed `position`?"""

    kind: ClassVar[Literal["inquire"]] = "inquire"
    position: Position


class Elsewhere(Value):
    """Answer to Inquire: the position that you named is not in my recent log; my own position is `position`."""

    kind: ClassVar[Literal["elsewhere"]] = "elsewhere"
    position: Position


class Leaving(Value):
    """Leaver → all: do not wait for me any more.

    In this incarnation the sender has not voted from index `departure` on, and will not. The `signature` is of that
    `Departure`, so that certificates can contain it.
    """

    kind: ClassVar[Literal["leaving"]] = "leaving"
    position: Position
    incarnation: Count
    departure: Count
    signature: Signature


Message = (
    LeaseRequest
    | LeaseGrant
    | Refuse
    | Ready
    | Begin
    | Part
    | Want
    | Propose
    | Vote
    | Certified
    | Proof
    | Inquire
    | Elsewhere
    | Leaving
)


class Unread(Value):
    """A message about another position than the receiver's own. The receiver can read only the position."""

    position: Position


KINDS: dict[str, type[Message]] = {kind.kind: kind for kind in get_args(Message)}
