"""What messages speak of: attempts, the rounds in which members exchange blocks, and entries that are held."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated

from pydantic import Field

from peers.log.certificate import AttemptName
from peers.log.header import MEMBER_LIMIT, Faults, Header, Member, Position
from peers.log.state import LogState
from peers.protocol.commitment import NOTHING, Author
from peers.values.identity import Signature
from peers.values.manifest import Amendment
from peers.values.wire import Count, Digest, PeerId, Value, digest_of, field_names, pack

STANCE_CONTEXT = b"diloco-peer stance\0"


class Attempt(Value):
    """One leader's attempt to produce the entry at `position`. Later ones have higher numbers; the leader breaks ties.

    A round, the exchange of blocks, is named by the attempt that began it. When somebody dies, the next attempt goes on
    with the same round. A minority's attempt, which goes on `alone`, has asked too few to know what may be committed.
    """

    position: Position
    number: Count
    leader: PeerId
    alone: Annotated[bool, Field(strict=True)] = False

    def __hash__(self) -> int:
        """What members say is compared by its attempt."""
        return hash((self.position.head, self.number, self.leader))

    @property
    def name(self) -> AttemptName:
        """What its members sign."""
        return self.number, self.leader, self.alone

    @property
    def weight(self) -> tuple[bool, int, str]:
        """Of two entries that are held, the one of the weightier attempt may have been committed: of the later one, but
        of no minority's where there is another."""
        return not self.alone, self.number, self.leader

    def __str__(self) -> str:
        return f"{str(self.position).partition(':')[0]}.{self.number}"


class Held(Value):
    """An entry whose whole payload a peer has, and the weightiest attempt in which it said so; the signature is the one
    that it gave in that attempt, so that it proves what the peer says."""

    attempt: Attempt
    header: Header
    signature: Signature


class Holder(Value):
    """A peer that holds an entry, and its signature of that in one attempt: anybody can check it."""

    peer: PeerId
    attempt: Attempt
    signature: Signature


class Stance(Value):
    """What a peer signs when it is ready: it takes part in no attempt up to this one any more, and holds this entry, or
    none."""

    position: Position
    peer: PeerId
    incarnation: Count
    last_attempt: Count
    held: Digest | None

    @property
    def text(self) -> bytes:
        return STANCE_CONTEXT + pack(self)


class Disclaimer(Value):
    """The stance of one who was ready when an attempt began, and its signature. To whoever holds another entry it shows
    who has not signed that, and will not."""

    peer: PeerId
    last_attempt: Count
    held: Digest | None
    signature: Signature


class Share(Value):
    """A peer's part in a round: what it brings, and how many chunks of the payload it reduces."""

    member: Member
    chunks: Count


class Round(Value):
    """An exchange of blocks: who takes part, from which chunk on who reduces, and who has been lost on the way.

    Everybody in it sends everybody else the blocks of that one's chunks. The chunks of who is lost fall to the next in
    line; blocks of its own that had arrived count, the others don't. `faults` is the annex of the entry that it makes.
    `gone` are the voters that have no say in the next one. `amendment` is the one that the entry takes in. `committed`
    names what all have committed to: whoever knows it of another kind averages something else.
    """

    name: Attempt
    shares: Annotated[tuple[Share, ...], Field(min_length=1, max_length=MEMBER_LIMIT)]
    lost: Annotated[tuple[PeerId, ...], Field(max_length=MEMBER_LIMIT)] = ()
    faults: Faults = ()
    gone: Annotated[tuple[PeerId, ...], Field(max_length=2 * MEMBER_LIMIT)] = ()
    amendment: Amendment | None = None
    committed: Digest = NOTHING

    @cached_property
    def roster(self) -> tuple[Member, ...]:
        return tuple(share.member for share in self.shares)

    @cached_property
    def peers(self) -> tuple[str, ...]:
        return tuple(share.member.peer for share in self.shares)

    @cached_property
    def contributors(self) -> tuple[Member, ...]:
        """Those whose blocks are averaged."""
        return tuple(member for member in self.roster if member.tokens)

    @cached_property
    def remaining(self) -> tuple[str, ...]:
        lost = set(self.lost)
        return tuple(peer for peer in self.peers if peer not in lost)

    @cached_property
    def chunks(self) -> int:
        return sum(share.chunks for share in self.shares)

    @cached_property
    def terms(self) -> bytes:
        """Return what names all that its members must know of it alike: all but who is lost."""
        return digest_of(pack(self.model_copy(update={"lost": ()})))

    def entry_roster(self, missed: Mapping[str, int]) -> tuple[Member, ...]:
        """Who the entry says took part, given in how many chunks whose blocks are missing: not who is in none."""
        if not missed:
            return self._whole_roster
        roster = (member.lacking(missed.get(member.peer, 0)) for member in self.roster)
        return tuple(member for member in roster if member.missed < self.chunks)

    @cached_property
    def _whole_roster(self) -> tuple[Member, ...]:
        """Everybody, where nothing is missing: asked for whenever somebody says what it has."""
        return tuple(member.lacking(0) for member in self.roster) if self.chunks else ()

    def entry(self, log: LogState, missed: Mapping[str, int], payload: bytes) -> Header:
        """Return what the round leads to, at this end of the log. Raises: LogError when it can lead to no entry."""
        return log.next_header(self.entry_roster(missed), payload, self.faults, self.gone, self.amendment)

    def without(self, lost: Iterable[str]) -> Round:
        """The same round with more peers lost."""
        all_lost = {*self.lost, *lost}
        lost = tuple(peer for peer in self.peers if peer in all_lost)
        return Round(
            name=self.name,
            shares=self.shares,
            lost=lost,
            faults=self.faults,
            gone=self.gone,
            amendment=self.amendment,
            committed=self.committed,
        )

    def author(self, member: Member) -> Author:
        """Return as whom a member has committed to what it contributes."""
        after, position = max(0, self.name.number - 1), self.name.position
        return Author(peer=member.peer, incarnation=member.incarnation, position=position, after=after)

    def is_same(self, other: Round) -> bool:
        """Whether it leads to the same entry, whoever is lost. Two rounds of one leader may have one name."""
        return all(getattr(self, field) == getattr(other, field) for field in field_names(Round) if field != "lost")
