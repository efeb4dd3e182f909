"""Control messages between peers: what each says. packing.py turns them into bytes.

Every message names the position that it is about. An answer about a position that the receiver has left behind is
`Commit` with the header that followed, so a lost message is repaired by whichever comes next.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias, get_args

from pydantic import Field

from peers.log.certificate import Certificate
from peers.log.header import FAULT_LIMIT, MEMBER_LIMIT, Header, Kind, Member, Position
from peers.presence.reachability import SEEN_LIMIT
from peers.protocol.chunk_sets import ChunkSet
from peers.protocol.commitment import Author, Commitment, Contribution, Evidence
from peers.protocol.faults import PROOF_LIMIT
from peers.protocol.rounds import Attempt, Disclaimer, Held, Holder, Round
from peers.protocol.signed_averages import Averaged, Marks
from peers.values.identity import Signature
from peers.values.leases import PIECE_LIMIT
from peers.values.wire import Count, Digest, PeerId, Reason, Samples, Seconds, Value

Peers = Annotated[tuple[PeerId, ...], Field(max_length=MEMBER_LIMIT)]
Holders = Annotated[tuple[Holder, ...], Field(max_length=MEMBER_LIMIT)]
Disclaimers = Annotated[tuple[Disclaimer, ...], Field(max_length=MEMBER_LIMIT)]
Missed = Annotated[tuple[tuple[PeerId, Count], ...], Field(max_length=MEMBER_LIMIT)]
"""Peers, and in how many chunks their blocks are missing."""
Proofs = Annotated[tuple[Digest, ...], Field(max_length=FAULT_LIMIT)]
Result: TypeAlias = tuple[Attempt, bytes, tuple[tuple[str, int], ...], bytes]
Rates = Annotated[tuple[tuple[PeerId, Count], ...], Field(max_length=SEEN_LIMIT)]
"""Peers, and bytes a second."""


class LeaseRequest(Value):
    """Joiner → leader: I hold the state at `position`; give me samples to train on.

    `relayed` and `unreached` as in Ready: a peer that could take part in no round gets no lease.
    """

    kind: ClassVar[Literal["lease-request"]] = "lease-request"
    position: Position
    state_digest: Digest
    relayed: Peers
    unreached: Peers


class LeaseGrant(Value):
    """Leader → joiner: train these samples, in at most `steps` inner steps, to finish together with the others."""

    kind: ClassVar[Literal["lease-grant"]] = "lease-grant"
    position: Position
    samples: Annotated[tuple[Samples, ...], Field(min_length=1, max_length=PIECE_LIMIT)]
    steps: Count


class Ready(Value):
    """Member → leader: my inner steps are done; I take part in your next attempt and in no earlier one.

    Towards the quorum that protects a committed entry counts who has the `incarnation` of the last roster: a peer that
    started since may have been here before, and have forgotten what it held. `round`: the
    exchange it is in the middle of, if its leader was lost. `rate`: bytes a second that its link was seen to carry each
    way; 0: not measured yet. `wants`: the samples of its next lease; 0: a whole one.

    `relayed` names the peers that it reaches only through a relay, or with other difficulty, `unreached` those with
    which it can exchange no data. `seen`: at how many bytes a second data of some others came to it in recent rounds.
    The `commitment` is to its blocks, in the next attempt; who has trained nothing has none. The signature `stance` is
    of its `Stance`: what it holds, and which attempts it takes part in no more. `unproven` are the digests of proofs
    that the leader has named, and that are not here; `heard` the voters that are gone, as it has said, and that the
    sender hears.
    """

    kind: ClassVar[Literal["ready"]] = "ready"
    position: Position
    state_digest: Digest
    tokens: Count
    samples: Annotated[tuple[Samples, ...], Field(max_length=PIECE_LIMIT)]
    commitment: Commitment | None
    incarnation: Count
    last_attempt: Count
    held: Held | None
    stance: Signature
    round: Round | None
    rate: Count
    wants: Count
    relayed: Peers
    unreached: Peers
    seen: Rates
    unproven: Proofs = ()
    heard: Peers = ()

    def author(self, sender: str) -> Author:
        """Return as whom the sender commits to its blocks."""
        after, position = self.last_attempt, self.position
        return Author(peer=sender, incarnation=self.incarnation, position=position, after=after)

    def member(self, sender: str) -> Member:
        """Return what the sender would be in the round's roster."""
        tokens, samples, wants = self.tokens, self.samples, self.wants
        return Member(peer=sender, tokens=tokens, samples=samples, wants=wants, incarnation=self.incarnation)


class OfAttempt(Value):
    """A message about an attempt, and so about its position."""

    attempt: Attempt

    @property
    def position(self) -> Position:
        return self.attempt.position


class Begin(OfAttempt):
    """Leader → remaining members: begin this round, or go on with it now that somebody is lost.

    The leader ends the attempt after `seconds`. If it is `open`, all members tell each other that they are complete,
    and whoever has heard the same of all knows that the entry is committed. A minority's attempt never is. Those who
    reduce are told what all who contribute have committed to, in roster order; nobody else needs to know, and each
    shows its signature with its chunks. To a member that holds an entry `disclaimers` show that too many others have
    not signed that.
    """

    kind: ClassVar[Literal["begin"]] = "begin"
    round: Round
    seconds: Seconds
    open: Annotated[bool, Field(strict=True)]
    commitments: Annotated[tuple[Contribution, ...], Field(max_length=MEMBER_LIMIT)]
    disclaimers: Disclaimers = ()


class Adopt(OfAttempt):
    """Leader → members: an earlier attempt's entry may have been committed; take it over from its holders.

    Their signatures show it. A fragment that nobody has trained is skipped: that entry has no holders yet.
    """

    kind: ClassVar[Literal["adopt"]] = "adopt"
    header: Header
    holders: Holders
    seconds: Seconds

    @property
    def donors(self) -> tuple[str, ...]:
        """Who has the payload."""
        return tuple(holder.peer for holder in self.holders)


class Holding(OfAttempt):
    """Member → whoever a lost member's chunks have fallen to: of those, I have these already."""

    kind: ClassVar[Literal["holding"]] = "holding"
    chunks: ChunkSet


class Want(OfAttempt):
    """Who reduces a lost member's chunks → member: send me these, `reduced` as you hold them, or your own blocks."""

    kind: ClassVar[Literal["want"]] = "want"
    reduced: ChunkSet
    own: ChunkSet


class Waiting(OfAttempt):
    """Member → leader: chunks of the payload are missing; I need something from these peers.

    `moved` counts the chunks that have come and gone here since the round began. With the `unreached` of its members it
    can exchange nothing: the round must be planned anew.
    """

    kind: ClassVar[Literal["waiting"]] = "waiting"
    missing: Peers
    moved: Count
    unreached: Peers


class Accuse(OfAttempt):
    """Member → leader: this peer broke the rules, as the evidence shows: what it contributed, or an average that it
    signed to us and not to you. Who accuses without is to blame itself."""

    kind: ClassVar[Literal["accuse"]] = "accuse"
    accused: PeerId
    reason: Reason
    evidence: Evidence | None = None
    average: Averaged | None = None


class Prove(Value):
    """Member → leader: this proves that somebody has lied, which is for the next entry's annex. Leader → members: this
    is behind the annex of what I begin or hand on, to be seen before it is signed; once, and again to a member whose
    Ready says that it lacks it."""

    kind: ClassVar[Literal["prove"]] = "prove"
    position: Position
    fault: Kind
    proof: Annotated[bytes, Field(strict=True, max_length=PROOF_LIMIT)]


class Compare(OfAttempt):
    """Leader → member: another member's payload, or mine, is not yours. These are the marks of its averages, in their
    order: of the first that is another one at yours, show me what its reducer has signed. Without: tell me yours."""

    kind: ClassVar[Literal["compare"]] = "compare"
    marks: Marks | None


class Marked(OfAttempt):
    """Member → leader: these are the marks of my averages, in their order."""

    kind: ClassVar[Literal["marked"]] = "marked"
    marks: Marks


class Told(OfAttempt):
    """What a member says has come of a round: the payload's digest, and whose blocks lack in how many chunks."""

    payload: Digest
    missed: Missed
    entry: Digest

    @property
    def outcome(self) -> Result:
        """What all members must say alike: also the entry itself, of which each is told by its leader."""
        return self.attempt, self.payload, self.missed, self.entry


class Prepared(Told):
    """Member → leader and all members, of few: my payload is whole. I sign what follows from it when all of you say the
    same."""

    kind: ClassVar[Literal["prepared"]] = "prepared"


class Complete(Told):
    """Member → leader, and in an open attempt → all members: I hold the whole payload. The `signature` is of the header
    that follows from it, in this attempt."""

    kind: ClassVar[Literal["complete"]] = "complete"
    signature: Signature


class Commit(Value):
    """The entry that follows `header.previous` is this one, as the certificate proves."""

    kind: ClassVar[Literal["commit"]] = "commit"
    header: Header
    certificate: Certificate | None

    @property
    def position(self) -> Position:
        return Position(index=self.header.index, head=self.header.previous, fragment=self.header.fragment)


class Abort(OfAttempt):
    """Leader → members: this attempt is over; say Ready again."""

    kind: ClassVar[Literal["abort"]] = "abort"
    reason: Reason


class Refuse(Value):
    """Leader → peer: what you have can't be used at this position; fetch the state from a peer and ask again.

    `state_digest` is the leader's: if that is another one, who is wrong is for most of the roster to say.
    """

    kind: ClassVar[Literal["refuse"]] = "refuse"
    position: Position
    state_digest: Digest
    reason: Reason


class Excluded(Value):
    """Leader → peer: rounds go on without you, for this reason. Nothing that you train would count."""

    kind: ClassVar[Literal["excluded"]] = "excluded"
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

    In this incarnation the sender has said of no entry from index `departure` on that it holds it, and says so of none
    any more: in their quorums it does not count. Before, it does: others may be behind, and need to know what it held.
    The `signature` is of that `Departure`, so that it can be part of certificates.
    """

    kind: ClassVar[Literal["leaving"]] = "leaving"
    position: Position
    incarnation: Count
    departure: Count
    signature: Signature


Message = (
    LeaseRequest
    | LeaseGrant
    | Ready
    | Begin
    | Adopt
    | Holding
    | Want
    | Waiting
    | Accuse
    | Prove
    | Compare
    | Marked
    | Prepared
    | Complete
    | Commit
    | Abort
    | Refuse
    | Excluded
    | Inquire
    | Elsewhere
    | Leaving
)


class Unread(Value):
    """A message about a position where the receiver is not, so that it could not be read; no answer to one of ours."""

    position: Position


KINDS: dict[str, type[Message]] = {kind.kind: kind for kind in get_args(Message)}
