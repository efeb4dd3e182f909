"""Values and peers that the protocol's tests are built from. The peers are a, b, c and so on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from peers.log.certificate import Ballot, Certificate, Choice, Group, Phase, certify, digest_of_group, electorate
from peers.log.header import Header, Member
from peers.log.lineage import Branch
from peers.log.settings import RunSettings
from peers.log.state import LogState, take_order
from peers.messages.averages import MARK_BYTES, Averaged, Origin, statement, statement_of
from peers.messages.commitment import (
    Author,
    ChunkProof,
    Commitment,
    CommittedChunk,
    Contribution,
    commit_to,
    digest_of_all,
)
from peers.messages.messages import Begin, Certified, LeaseGrant, Message, Propose, Ready, Unread, Vote
from peers.messages.rounds import Round, RoundName, Share
from peers.presence.heartbeat import PeerState
from peers.protocol.context import Context
from peers.protocol.effects import Effect, FetchLineage, KeepVotes, Send
from peers.protocol.events import (
    Applied,
    ContributionArrived,
    Digested,
    Event,
    HeartbeatsSeen,
    LineageSeen,
    PayloadAssembled,
    Received,
    ReducedArrived,
    Tick,
    TrainingDone,
    VotesKept,
)
from peers.protocol.parts import Reducers
from peers.protocol.peer import Peer
from peers.protocol.states import State
from peers.values.chunks import PayloadSize, Sum, SumTree
from peers.values.leases import Lease, SampleRange
from peers.values.wire import digest_of
from peers.values.workload import Blocks, PayloadKind, Trained
from tests.peers.heartbeats import beat
from tests.peers.logs import CERTIFIED, PAYLOAD, SETTINGS, STATE, TOKENS, next_header
from tests.simulator.simulated_keys import SimulatedKeys

SIZE = PayloadSize(chunks=6, bytes=6000)
CONTRIBUTION = Sum(digest_of(b"contribution"), 1.0)
FIRST = Ballot(view=0, attempt=1)
LEASES: dict[str, Lease] = {
    peer: (SampleRange(20 * place, 20 * place + 20),) for place, peer in enumerate("abcdefghijklmnopqrstuvwxyz")
}
"""The samples that a founder gives to each."""


def inspect(chunk: int, data: Blocks, format: int = 0) -> float:
    """Return the squared norm of a chunk's blocks: here their number of bytes."""
    return float(len(data))


PAYLOADS = [PayloadKind(SIZE, inspect)]


def context(me: str = "b", settings: RunSettings = SETTINGS, incarnation: int = 0) -> Context:
    return Context(me, settings, PAYLOADS, 0.0, incarnation, SimulatedKeys(me))


def trained(lease: Lease) -> Trained:
    return Trained(lease, TOKENS, 1.0, contribution=CONTRIBUTION)


def commitment(peer: str, log: LogState, number: int | None = None, incarnation: int = 0) -> Commitment:
    """Return what a peer has committed to, signed. It has trained once for each entry."""
    number = log.position.index + 1 if number is None else number
    said = Contribution(digest=CONTRIBUTION.digest, squares=CONTRIBUTION.squares, number=number)
    return commit_to(CONTRIBUTION, said.author(peer, incarnation, log.position), SimulatedKeys(peer))


def lease_of(log: LogState, peer: str) -> Lease:
    return log.leases.get(peer) or LEASES[peer]


def ready(log: LogState, peer: str, **changes: Any) -> Ready:
    """Return what a peer says that has trained its lease."""
    fields: dict[str, Any] = {
        "position": log.position,
        "view": 0,
        "incarnation": 0,
        "state_digest": STATE,
        "tokens": TOKENS,
        "samples": lease_of(log, peer),
        "wants": 0,
        "commitment": commitment(peer, log),
        "round": None,
        "rate": 0,
        "seen": (),
        "relayed": (),
        "unreached": (),
        "lock": None,
    }
    return Ready(**(fields | changes))


def roster(log: LogState, names: str = "abc") -> tuple[Member, ...]:
    """Return these as members that have trained their leases."""
    return tuple(
        Member(peer=name, tokens=TOKENS, samples=lease_of(log, name)) for name in take_order(log.roster, names)
    )


def round_of(log: LogState, names: str = "abc", ballot: Ballot = FIRST, leader: str = "a", group: Group = ()) -> Round:
    """Return a round of these, who average as much each."""
    members, each = roster(log, names), SIZE.chunks // len(names)
    return Round(
        name=RoundName(position=log.position, ballot=ballot, leader=leader),
        shares=tuple(Share(member=member, chunks=each) for member in members),
        committed=digest_of_all([commitment(member.peer, log).contribution for member in members]),
        group=group,
    )


def begin_of(round: Round, log: LogState, ballot: Ballot | None = None, **changes: Any) -> Begin:
    commitments = tuple(commitment(member.peer, log).contribution for member in round.contributors)
    fields: dict[str, Any] = {"seconds": 20.0, "heirs": (), "commitments": commitments}
    return Begin(ballot=ballot or round.name.ballot, round=round, **(fields | changes))


def averaged(round: Round, reducer: str, chunk: int, data: bytes = b"average", absent: str = "") -> Averaged:
    """Return a reducer's signed statement about a chunk."""
    digest = digest_of(data + bytes([chunk]))
    text = statement(round, reducer, chunk, digest, tuple(absent)).text
    origin = Origin(reducer=reducer, signature=SimulatedKeys(reducer).sign(text))
    return Averaged(chunk=chunk, digest=digest, absent=tuple(absent), origin=origin)


def propose(
    header: Header,
    ballot: Ballot = FIRST,
    justify: Certificate | None = None,
    round: Round | None = None,
    marks: bytes = b"",
    group: Group = (),
) -> Propose:
    name = round.name if round else None
    return Propose(ballot=ballot, header=header, group=group, justify=justify, round=name, marks=marks)


def choice(header: Header, phase: Phase, ballot: Ballot = FIRST, group: Group = ()) -> Choice:
    return Choice(ballot=ballot, phase=phase, header=header.digest, group=digest_of_group(group), justify=None)


def vote(peer: str, log: LogState, for_: Choice, incarnation: int = 0) -> Vote:
    signature = SimulatedKeys(peer).sign(for_.text(log.position, incarnation))
    return Vote(position=log.position, incarnation=incarnation, choice=for_, signature=signature)


def certified(
    log: LogState,
    header: Header,
    phase: Phase = Phase.COMMIT,
    by: Iterable[str] = "ac",
    ballot: Ballot = FIRST,
    group: Group = (),
) -> Certified:
    """Return a header with its certificate, as these have signed it."""
    voted = choice(header, phase, ballot, group)
    incarnations = dict(electorate(log, header, group).voters)
    signatures = {(peer, incarnations[peer]): vote(peer, log, voted, incarnations[peer]).signature for peer in by}
    found = certify(log, header, voted, group, signatures, {})
    assert found is not None
    return Certified(header=header, certificate=found)


def evidence(log: LogState, liar: str, honest: bool = False) -> CommittedChunk:
    """Return a chunk whose owner has committed to another norm than it has; if it is honest, to this one."""
    data, chunk = b"blocks", 2
    squares = inspect(chunk, data) if honest else 1.0
    leaves = [Sum(digest_of(bytes([place])), 1.0) for place in range(SIZE.chunks)]
    leaves[chunk] = Sum(digest_of(data), squares)
    tree = SumTree(leaves)
    author = Author(peer=liar, incarnation=0, position=log.position, number=log.position.index + 1)
    return CommittedChunk(
        commitment=commit_to(tree.root, author, SimulatedKeys(liar)),
        chunk=chunk,
        proof=ChunkProof(squares=squares, path=tree.path(chunk)),
        data=data,
    )


def two_votes(peer: str, log: LogState) -> list[Vote]:
    """Return two votes of one ballot and phase, for headers with other payloads."""
    headers = (next_header(log, roster(log), payload) for payload in (PAYLOAD, digest_of(b"another payload")))
    return [vote(peer, log, choice(header, Phase.PREPARE)) for header in headers]


def sends(effects: Iterable[Effect], kind: type[Message]) -> list[tuple[str, Any]]:
    """Return the messages of a kind, and to whom each goes."""
    return [(one.to, one.message) for one in effects if isinstance(one, Send) and isinstance(one.message, kind)]


def of(effects: Iterable[Effect], kind: type[Any]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


class Rig:
    """One peer with a clock, among others that are only heartbeats and messages."""

    def __init__(
        self, me: str = "b", others: str = "ac", settings: RunSettings = SETTINGS, incarnation: int = 0
    ) -> None:
        self.now = 0.0
        self.peer = Peer(me, settings, PAYLOADS * settings.fragments, STATE, 0.0, incarnation, SimulatedKeys(me))
        self.others = others
        self.sequence = 0
        self.effects: list[Effect] = []

    def do(self, event: Event, after: float = 0.0) -> list[Effect]:
        self.now += after
        effects = self.peer.handle(event, self.now)
        for effect in effects:  # which become more
            if isinstance(effect, KeepVotes):
                effects += self.peer.handle(VotesKept(), self.now)
        self.effects = effects
        return self.effects

    def tick(self, after: float = 1.0) -> list[Effect]:
        return self.do(Tick(), after)

    def hear(self, sender: str, message: Message | Unread, after: float = 0.0) -> list[Effect]:
        return self.do(Received(sender, message), after)

    def see(
        self, log: LogState | None = None, others: str | None = None, state: PeerState = PeerState.TRAINING, **more: Any
    ) -> list[Effect]:
        """Take in fresh heartbeats of the others, at `log` (by default where this peer is)."""
        self.sequence += 1
        names = self.others if others is None else others
        beats = [beat(name, log or self.peer.log, state, self.sequence, **more) for name in names]
        return self.do(HeartbeatsSeen(tuple(beats)))

    def waits(self, seconds: int, state: PeerState = PeerState.READY, others: str | None = None) -> list[Effect]:
        """Let so much time pass, while the others beat. Returns all effects."""
        effects: list[Effect] = []
        for _ in range(seconds):
            effects += self.see(state=state, others=others)
            effects += self.tick()
        return effects

    def shown(self, theirs: LogState, by: str | None = None) -> list[Effect]:
        """The log of the peer that was looked at leads on from ours to `theirs`."""
        donor = by or next(effect.donor for effect in self.effects if isinstance(effect, FetchLineage))
        ours = Branch(self.peer.log, self.peer.log)
        first = {0: (theirs.position.head, CERTIFIED)}
        return self.do(LineageSeen(donor, replace(ours, end=theirs, first=first), ours))

    # Into each state, the short way ---------------------------------------------------------------------------
    def joined(self) -> Rig:
        """Training the first lease, as the leader a granted it."""
        self.see(state=PeerState.JOINING)
        self.tick(5.0)
        grant = LeaseGrant(position=self.peer.round.log.position, samples=LEASES[self.peer.me], steps=10)
        self.hear("a", grant)
        assert self.peer.state is State.TRAINING
        self.see()
        return self

    def trained(self) -> Rig:
        self.do(TrainingDone(trained(lease_of(self.peer.log, self.peer.me))))
        assert self.peer.state is State.READY
        return self

    @property
    def log(self) -> LogState:
        """The log before the entry, with the state that this peer has."""
        return self.peer.log.in_state(self.peer.state_digest)

    @property
    def leader(self) -> str:
        leader = self.peer.round.led_by
        assert leader is not None
        return leader

    def exchanging(self, names: str = "abc") -> Rig:
        """In a round of these, as the leader begins it."""
        round = round_of(self.log, names, leader=self.leader)
        self.hear(self.leader, begin_of(round, self.log))
        assert self.peer.state is State.AVERAGING
        return self

    def whole(self, absent: str = "") -> Rig:
        """All averages of the round are here."""
        exchange = self.peer.exchange
        assert exchange is not None
        effects: list[Effect] = []
        for chunk, average in self.averages(absent).items():
            sender = average.reducer
            if sender == self.peer.me:
                for other in exchange.round.peers:
                    if other not in (sender, *absent):
                        effects += self.do(ContributionArrived(exchange.name, other, chunk))
            origin = None if sender == self.peer.me else average.origin
            event = ReducedArrived(exchange.name, sender, chunk, average.absent, average.digest, origin)
            effects += self.do(event)
        effects += self.do(PayloadAssembled(exchange.name, PAYLOAD))
        self.effects = effects
        return self

    def averages(self, absent: str = "") -> dict[int, Averaged]:
        """Return what the reducers of the round have signed."""
        exchange = self.peer.exchange
        assert exchange is not None
        round, reducers = exchange.round, Reducers(exchange.round)
        return {chunk: averaged(round, reducers.of(chunk)[0], chunk, absent=absent) for chunk in range(round.chunks)}

    @property
    def marks(self) -> bytes:
        exchange = self.peer.exchange
        assert exchange is not None
        in_order = [statement_of(exchange.round, one).mark for _, one in sorted(self.averages().items())]
        return b"".join(mark[:MARK_BYTES] for mark in in_order)

    def next_header(self, names: str = "abc", payload: bytes = PAYLOAD, leader: str | None = None) -> Header:
        return self.log.next_header(roster(self.log, names), payload, leader or self.leader)

    def applying(self) -> Rig:
        """The next entry is committed, and its payload is here."""
        self.committed(self.next_header())
        assert self.peer.state is State.APPLYING
        return self

    def committed(self, header: Header) -> list[Effect]:
        """The header is prepared, and a and c give vote 2. Returns all effects."""
        log, effects = self.log, self.hear(self.leader, certified(self.log, header, Phase.PREPARE))
        for peer in "ac":
            effects += self.hear(peer, vote(peer, log, choice(header, Phase.COMMIT)))
        return effects

    def applied(self, state: bytes = STATE) -> Rig:
        last = self.peer.log.last
        assert last is not None
        self.step(last, state)
        self.see()
        return self

    def step(self, header: Header, state_digest: bytes = STATE) -> list[Effect]:
        """The outer step is done, and the state after it digested."""
        return [*self.do(Applied(header)), *self.do(Digested(header, state_digest))]


def ahead(log: LogState, entries: int = 1, names: str = "abc") -> LogState:
    """Return the log after so many more entries of these."""
    for _ in range(entries):
        log = log.append(next_header(log, roster(log, names)))
    return log


def follower_at_second() -> Rig:
    """c trains its second lease, and b leads."""
    rig = Rig("c", "ab").joined().trained().exchanging().whole().applying().applied()
    assert (rig.peer.state, rig.leader) == (State.TRAINING, "b")
    return rig


def at_second(settings: RunSettings = SETTINGS) -> Rig:
    """b has applied the first entry and trains its second lease."""
    rig = Rig(settings=settings).joined().trained().exchanging().whole().applying().applied()
    assert rig.peer.state is State.TRAINING
    return rig
