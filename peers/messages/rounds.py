"""Rounds, which are exchanges of blocks: their members, and the number of chunks that each member averages."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated

from pydantic import Field

from peers.log.certificate import Ballot, Group
from peers.log.header import MEMBER_LIMIT, Faults, Header, Member, Position
from peers.log.state import LogState
from peers.messages.commitment import NOTHING, Author, Contribution
from peers.values.manifest import Amendment
from peers.values.wire import Count, Digest, PeerId, Value, digest_of, pack


class RoundName(Value):
    """The name of a round: its position, the ballot that began it, and its leader. Later ballots may continue the
    round."""

    position: Position
    ballot: Ballot
    leader: PeerId

    def __hash__(self) -> int:
        return hash((self.position.head, self.position.fragment, self.ballot.order, self.leader))

    def __str__(self) -> str:
        return f"{str(self.position).partition(':')[0]}.{self.ballot}"


class Share(Value):
    """A member's part in a round: its entry in the roster, and the number of chunks of the payload that it averages."""

    member: Member
    chunks: Count


class Round(Value):
    """An exchange of blocks. Each member sends its blocks of a chunk to the chunk's reducer, which averages them and
    sends the average to all.

    `committed` is the digest of all commitments. A minority's round names its `group`: all peers that are here.
    """

    name: RoundName
    shares: Annotated[tuple[Share, ...], Field(min_length=1, max_length=MEMBER_LIMIT)]
    committed: Digest = NOTHING
    group: Group = ()

    @cached_property
    def roster(self) -> tuple[Member, ...]:
        return tuple(share.member for share in self.shares)

    @cached_property
    def peers(self) -> tuple[str, ...]:
        return tuple(share.member.peer for share in self.shares)

    @cached_property
    def incarnations(self) -> Mapping[str, int]:
        return {member.peer: member.incarnation for member in self.roster}

    @cached_property
    def contributors(self) -> tuple[Member, ...]:
        """The members whose blocks are averaged."""
        return tuple(member for member in self.roster if member.tokens)

    @cached_property
    def chunks(self) -> int:
        return sum(share.chunks for share in self.shares)

    @cached_property
    def terms(self) -> bytes:
        """The digest of all facts about the round that its members must agree on."""
        return digest_of(pack(self))

    def author(self, member: Member, contribution: Contribution) -> Author:
        """Return the facts that a member signs together with its contribution: its id and incarnation, the round's
        position, and the contribution's number."""
        return contribution.author(member.peer, member.incarnation, self.name.position)

    def counted(self, absent: Mapping[str, int]) -> tuple[Member, ...]:
        """Return the roster with the tokens that count, given the number of chunks from which each member is absent.

        A member without any tokens left is not in it. Founders all stay in it, since a minimum of them must found the
        run (R13).
        """
        if not absent:
            return self.roster if self.chunks else ()
        is_founding = self.name.position.index == 0
        counted = []
        for member in self.roster:
            chunks = self.chunks - absent.get(member.peer, 0)
            tokens = member.tokens * chunks // self.chunks
            if tokens == member.tokens and chunks:
                counted.append(member)
            elif tokens:
                counted.append(member.model_copy(update={"tokens": tokens}))
            elif is_founding:
                counted.append(member.model_copy(update={"tokens": 0, "samples": ()}))
        return tuple(counted)

    def counts_enough(self, absent: Mapping[str, int], view: int, ring: int) -> bool:
        """Return True if at least half of the round's tokens count, given the number of chunks from which each member
        is absent. Once all peers of the ring (R1, `ring` is their number) have led a view without success, any number
        of tokens is enough, since a link may be broken for good (R5)."""
        if view >= (ring or len(self.roster)):
            return True
        counted = sum(member.tokens for member in self.counted(absent))
        return 2 * counted >= sum(member.tokens for member in self.roster)

    def entry(
        self,
        log: LogState,
        absent: Mapping[str, int],
        payload: bytes,
        leader: str | None,
        faults: Faults = (),
        gone: tuple[str, ...] = (),
        amendment: Amendment | None = None,
    ) -> Header:
        """Return the header of the entry that the round produces after `log`. Raises: LogError when no valid entry
        follows."""
        return log.next_header(self.counted(absent), payload, leader, faults, gone, amendment)
