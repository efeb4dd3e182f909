"""Rounds and averages that tests are built from. The members are a, b, c and so on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peers.log.certificate import Ballot
from peers.log.header import Member, Position
from peers.messages.averages import Averaged, Origin, statement
from peers.messages.commitment import Commitment, Contribution, commit_to, digest_of_all
from peers.messages.rounds import Round, RoundName, Share
from peers.protocol.contributions import Contributions
from peers.protocol.effects import Effect
from peers.protocol.exchange import Exchange, ExchangeEvent
from peers.values.chunks import PayloadSize
from peers.values.leases import SampleRange
from peers.values.wire import digest_of
from tests.simulator.simulated_keys import SimulatedKeys

SIZE = PayloadSize(chunks=6, bytes=6000)
TOKENS = 100
HERE = Position(index=1, head=bytes(32))
"""At this head the first reducer of a round has its first part."""
CONTRIBUTED = Contribution(digest=digest_of(b"contribution"), squares=1.0)


def round_name(attempt: int = 1, view: int = 0, leader: str = "a", position: Position = HERE) -> RoundName:
    return RoundName(position=position, ballot=Ballot(view=view, attempt=attempt), leader=leader)


AT = round_name()


def round_among(names: Sequence[str], idle: str = "", each: int = 1, name: RoundName = AT, **more: Any) -> Round:
    """A round in which each reduces so many chunks; `idle` members have trained nothing, and reduce nothing."""
    return round_with({peer: 0 if peer in idle else each for peer in names}, idle, name, **more)


def round_with(chunks: Mapping[str, int], idle: str = "", name: RoundName = AT, **more: Any) -> Round:
    """A round in which each member reduces so many chunks."""
    shares = [
        Share(
            member=Member(
                peer=peer,
                tokens=0 if peer in idle else TOKENS,
                samples=(SampleRange(60 + 20 * place, 80 + 20 * place),),
            ),
            chunks=count,
        )
        for place, (peer, count) in enumerate(chunks.items())
    ]
    committed = digest_of_all([CONTRIBUTED] * sum(share.member.tokens > 0 for share in shares))
    fields: dict[str, Any] = {"name": name, "shares": tuple(shares), "committed": committed}
    return Round(**fields | more)


def signed_by(round: Round, reducer: str, chunk: int, digest: bytes = bytes(32), absent: str = "") -> Averaged:
    """A member's signed statement about a chunk."""
    text = statement(round, reducer, chunk, digest, tuple(absent)).text
    origin = Origin(reducer=reducer, signature=SimulatedKeys(reducer).sign(text))
    return Averaged(chunk=chunk, digest=digest, absent=tuple(absent), origin=origin)


def commitment(round: Round, peer: str, contribution: Contribution = CONTRIBUTED) -> Commitment:
    """A member's signed commitment to what it contributes."""
    member = next(one for one in round.roster if one.peer == peer)
    return commit_to(contribution.root, round.author(member, contribution), SimulatedKeys(peer))


def contributions(round: Round, me: str) -> Contributions:
    """What a member knows of a round whose members have all committed to the same."""
    commitments = {member.peer: CONTRIBUTED for member in round.contributors}
    squares = dict.fromkeys(commitments, CONTRIBUTED.squares)
    weights = {member.peer: float(member.tokens) for member in round.contributors}
    return Contributions(round.chunks, commitments, squares, 4.0, commitment(round, me).signature, weights)


class InRound:
    """A peer that is nothing but a member of a round."""

    def __init__(self, me: str = "b", live: str = "abc") -> None:
        self.me = me
        self.live = live
        self.exchange: Exchange | None = None

    def begin(self, round: Round, now: float = 0.0) -> list[Effect]:
        self.exchange = Exchange(self.me, round, contributions(round, self.me), SimulatedKeys(self.me), now, 10.0)
        return self.exchange.open()

    def exchange_of(self, name: RoundName) -> Exchange | None:
        return self.exchange if self.exchange and self.exchange.name == name else None

    def is_live(self, peer: str) -> bool:
        return peer in self.live

    def handle(self, event: ExchangeEvent) -> list[Effect]:
        return self.exchange.handle(event) if self.exchange else []
