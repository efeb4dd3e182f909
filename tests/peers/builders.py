"""Values and peers that the protocol's tests are built from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from peers.log.certificate import Departure, Proof, ballot, certify, electorate, shortened
from peers.log.chain import Chain, Entry
from peers.log.header import Header, Member, Position
from peers.log.lineage import Branch, Lineage
from peers.log.settings import RunSettings, Timing
from peers.log.state import LogState, take_order
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.protocol.amending import Amending
from peers.protocol.commitment import Author, ChunkProof, Commitment, Contribution, Evidence, commit_to, digest_of_all
from peers.protocol.docket import Docket
from peers.protocol.effects import Effect, FetchLineage, Send
from peers.protocol.events import (
    Applied,
    Digested,
    Event,
    HeartbeatsSeen,
    LineageSeen,
    PayloadAssembled,
    Received,
    Tick,
    TrainingDone,
)
from peers.protocol.exchange import Exchange
from peers.protocol.faults import Court
from peers.protocol.judge import Judge
from peers.protocol.messages import (
    Adopt,
    Begin,
    Commit,
    Complete,
    LeaseGrant,
    Leaving,
    Message,
    Prepared,
    Ready,
    Unread,
)
from peers.protocol.peer import Peer
from peers.protocol.rounds import Attempt, Held, Holder, Round, Share, Stance
from peers.protocol.showings import Showings
from peers.protocol.states import State
from peers.values.chunks import PayloadSize, Sum, SumTree, split_by_rate
from peers.values.leases import Lease, SampleRange
from peers.values.wire import digest_of
from peers.values.workload import Blocks, PayloadKind, Trained
from tests.peers.heartbeats import beat
from tests.simulator.simulated_keys import SimulatedKeys

RUN = "tiny"
MANIFEST = digest_of(b"manifest")
STATE = digest_of(b"state")
PAYLOAD = digest_of(b"payload")
TIMING = Timing(grace=30.0, round_timeout=20.0, partition_grace=100.0)
SETTINGS = RunSettings(
    RUN, MANIFEST, inner_steps=10, samples_per_lease=20, tokens_per_sample=100, minimum_peers=3, timing=TIMING
)
SIZE = PayloadSize(chunks=6, bytes=6000)
TOKENS = 100
CONTRIBUTION = Sum(digest_of(b"contribution"), 1.0)
CONTRIBUTED = Contribution(digest=CONTRIBUTION.digest, squares=CONTRIBUTION.squares)
LOG = SETTINGS.empty_log
CERTIFIED = Proof(is_certified=True, signers=2)


def member(peer: str, start: int, stop: int, tokens: int = TOKENS) -> Member:
    return Member(peer=peer, tokens=tokens, samples=(SampleRange(start, stop),))


def first_log() -> LogState:
    """a, b and c have made the first entry; each has a lease of 20 samples, from 60, 80 and 100 on."""
    roster = [member(peer, 20 * place, 20 * place + 20) for place, peer in enumerate("abc")]
    return LOG.append(LOG.next_header(roster, PAYLOAD))


def chain_of(headers: Iterable[Header], empty_log: LogState = LOG) -> Chain:
    """Consecutive entries, as a peer keeps them."""
    chain = Chain(empty_log)
    for header in headers:
        chain.add(Entry.whole(header, None))
    return chain


def beats(log: LogState, names: str, state: PeerState = PeerState.TRAINING) -> dict[str, Heartbeat]:
    return {name: beat(name, log, state) for name in names}


def attempt(log: LogState, number: int = 1, leader: str = "a") -> Attempt:
    return Attempt(position=log.position, number=number, leader=leader)


def round_of(
    name: Attempt, roster: Sequence[Member], lost: Iterable[str] = (), chunks: Sequence[int] | None = None
) -> Round:
    """A round in which `chunks` says how many each member reduces; by default all with tokens reduce as much."""
    if chunks is None:
        reducers = sum(one.tokens > 0 for one in roster)
        parts = iter(split_by_rate(SIZE.chunks, [0.0] * reducers, reducers))
        chunks = [next(parts) if one.tokens else 0 for one in roster]
    shares = tuple(Share(member=one, chunks=count) for one, count in zip(roster, chunks, strict=True))
    committed = digest_of_all([CONTRIBUTED] * sum(one.tokens > 0 for one in roster))
    return Round(name=name, shares=shares, lost=tuple(lost), committed=committed)


def ready(log: LogState, peer: str, samples: Lease | None = None, **changes: Any) -> Ready:
    """A peer's Ready with its whole lease trained."""
    samples = log.leases.get(peer, ()) if samples is None else samples
    fields: dict[str, Any] = {
        "position": log.position,
        "state_digest": STATE,
        "tokens": TOKENS,
        "samples": samples,
        "incarnation": 0,
        "last_attempt": 0,
        "held": None,
        "round": None,
        "rate": 0,
        "wants": 0,
        "relayed": (),
        "unreached": (),
        "seen": (),
    }
    said = fields | changes
    held = said["held"].header.digest if said["held"] else None
    told = {"position": said["position"], "peer": peer, "incarnation": said["incarnation"], "held": held}
    stance = SimulatedKeys(peer).sign(Stance(last_attempt=said["last_attempt"], **told).text)
    after = said["last_attempt"]
    mine = commitment(peer, said["incarnation"], said["position"], after=after) if said["tokens"] else None
    return Ready(**({"commitment": mine, "stance": stance} | said))


def trained(lease: Lease) -> Trained:
    return Trained(lease, TOKENS, 1.0, contribution=CONTRIBUTION)


def author(peer: str, incarnation: int, position: Position, after: int = 0) -> Author:
    return Author(peer=peer, incarnation=incarnation, position=position, after=after)


def commitment(peer: str, incarnation: int, position: Position, root: Sum = CONTRIBUTION, after: int = 0) -> Commitment:
    """What a peer has signed that it contributes to an entry, in the round after this attempt."""
    return commit_to(root, author(peer, incarnation, position, after), SimulatedKeys(peer))


def commitments(round: Round, root: Sum = CONTRIBUTION) -> tuple[Contribution, ...]:
    """What all who contribute to a round have committed to."""
    return (Contribution(digest=root.digest, squares=root.squares),) * len(round.contributors)


def sends(effects: list[Effect], kind: type[Message]) -> list[tuple[str, Any]]:
    """Receivers and messages of one kind."""
    return [
        (effect.to, effect.message) for effect in effects if isinstance(effect, Send) and type(effect.message) is kind
    ]


def of(effects: list[Effect], kind: type[Any]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def vote(header: Header, at: Attempt, peer: str, incarnation: int = 0) -> bytes:
    """The peer's signature of an entry, in an attempt."""
    return SimulatedKeys(peer).sign(ballot(header, at.name, incarnation).text)


def holding(header: Header, at: Attempt, peer: str, incarnation: int = 0) -> Held:
    """What a peer says that holds an entry."""
    return Held(attempt=at, header=header, signature=vote(header, at, peer, incarnation))


def holders_of(held: Held, peers: str) -> tuple[Holder, ...]:
    """These peers have signed the entry, in the same attempt."""
    return tuple(
        Holder(peer=peer, attempt=held.attempt, signature=vote(held.header, held.attempt, peer)) for peer in peers
    )


def complete(header: Header, at: Attempt, peer: str, missed: tuple[tuple[str, int], ...] = ()) -> Complete:
    """A member holds the whole payload of the entry."""
    signature = vote(header, at, peer)
    return Complete(attempt=at, payload=header.payload, missed=missed, entry=header.digest, signature=signature)


def commit(log: LogState, header: Header, at: Attempt | None = None, by: Iterable[str] | None = None) -> Commit:
    """The entry after `log` is made; by default all who may have signed it, in the first attempt."""
    at = at or attempt(log)
    signers = {peer for peer, _ in electorate(log, header)} if by is None else set(by)
    votes = {peer: vote(header, at, peer) for peer in signers}
    certificate = shortened(certify(log, header, at.name, votes, {}), log, header)
    return Commit(header=header, certificate=certificate)


def leaving(log: LogState, peer: str, departure: int, incarnation: int = 0) -> Leaving:
    said = Departure(run=RUN, peer=peer, incarnation=incarnation, index=departure)
    signature = SimulatedKeys(peer).sign(said.text)
    return Leaving(position=log.position, incarnation=incarnation, departure=departure, signature=signature)


def evidence(log: LogState, liar: str, honest: bool = False) -> Evidence:
    """A chunk whose owner has committed to another norm than it has; if it is honest, to this one."""
    data, chunk = b"blocks", 2
    squares = inspect(chunk, data) if honest else 1.0
    leaves = [Sum(digest_of(bytes([place])), 1.0) for place in range(SIZE.chunks)]
    leaves[chunk] = Sum(digest_of(data), squares)
    tree = SumTree(leaves)
    said = commitment(liar, 0, log.position, tree.root)
    return Evidence(commitment=said, chunk=chunk, proof=ChunkProof(squares=squares, path=tree.path(chunk)), data=data)


def inspect(chunk: int, data: Blocks) -> float:
    """Return the squared norm of blocks that are taken for values."""
    return float(sum(value * value for value in data))


PAYLOADS = (PayloadKind(SIZE, inspect),)
COURT = Court(SimulatedKeys("a").verify, PAYLOADS)


def judge(log: LogState, exchange: Callable[[], Exchange | None] = lambda: None) -> Judge:
    return Judge(
        log, Docket(COURT), Amending(log.run, log.organiser), Lineage(log), exchange, Showings(SETTINGS.timing.resend)
    )


class Rig:
    """One peer with a clock, among others that are only heartbeats."""

    def __init__(
        self, me: str = "b", others: str = "ac", settings: RunSettings = SETTINGS, incarnation: int = 0
    ) -> None:
        self.now = 0.0
        self.peer = Peer(me, settings, PAYLOADS, STATE, 0.0, incarnation, SimulatedKeys(me))
        self.others = others
        self.sequence = 0
        self.effects: list[Effect] = []

    def do(self, event: Event, after: float = 0.0) -> list[Effect]:
        self.now += after
        self.effects = self.peer.handle(event, self.now)
        return self.effects

    def tick(self, after: float = 1.0) -> list[Effect]:
        return self.do(Tick(), after)

    def hear(self, sender: str, message: Message | Unread, after: float = 0.0) -> list[Effect]:
        return self.do(Received(sender, message), after)

    def see(
        self, log: LogState | None = None, others: str | None = None, state: PeerState = PeerState.TRAINING
    ) -> list[Effect]:
        """Fresh heartbeats of the others, at `log` (by default where this peer is)."""
        self.sequence += 1
        names = self.others if others is None else others
        return self.do(HeartbeatsSeen(tuple(beat(name, log or self.peer.log, state, self.sequence) for name in names)))

    def shown(self, theirs: LogState, by: str | None = None, proof: Proof = CERTIFIED) -> list[Effect]:
        """The log of the peer that was looked at leads on from ours to `theirs`."""
        donor = by or next(effect.donor for effect in self.effects if isinstance(effect, FetchLineage))
        ours = Branch(self.peer.log, self.peer.log)
        first = {0: (theirs.position.head, proof)}
        return self.do(LineageSeen(donor, replace(ours, end=theirs, first=first), ours))

    @property
    def moved(self) -> int:
        """The chunks that have come and gone in the present round."""
        assert self.peer.exchange is not None
        return self.peer.exchange.moved

    def is_in(self, state: State) -> bool:
        return self.peer.state is state

    # Into each state, the short way ---------------------------------------------------------------------------
    def joined(self) -> Rig:
        """Training the first lease, as the leader a granted it."""
        self.see(state=PeerState.JOINING)
        self.tick(5.0)
        closing = self.peer.slot.log.position
        self.hear("a", LeaseGrant(position=closing, samples=(SampleRange(20, 40),), steps=10))
        assert self.peer.state is State.TRAINING
        self.see()
        return self

    def trained(self) -> Rig:
        self.do(TrainingDone(trained(self.lease)))
        assert self.peer.state is State.READY
        return self

    @property
    def lease(self) -> Lease:
        return self.peer.log.leases.get(self.peer.me, (SampleRange(20, 40),))

    def roster(self) -> tuple[Member, ...]:
        log = self.peer.log
        first = {"a": (SampleRange(0, 20),), "b": (SampleRange(20, 40),), "c": (SampleRange(40, 60),)}
        offers = log.leases if log.last else first
        return tuple(
            Member(peer=name, tokens=TOKENS * (name in offers), samples=offers.get(name, ()))
            for name in take_order(log.roster, "abc")
        )

    def attempt(self, number: int = 1, leader: str = "a") -> Attempt:
        return attempt(self.peer.log, number, leader)

    def begin(self, number: int = 1, leader: str = "a", lost: str = "", name: Attempt | None = None) -> Begin:
        """A round of a, b and c begins; with a `name`, it goes on."""
        at = self.attempt(number, leader)
        round = round_of(name or at, self.roster(), lost)
        said = commitments(round)
        return Begin(attempt=at, round=round, seconds=TIMING.round_timeout, open=False, commitments=said)

    def held(self, number: int = 1, leader: str = "a", payload: bytes = PAYLOAD) -> Held:
        return holding(self.next_header(payload), self.attempt(number, leader), self.peer.me)

    def adopt(self, number: int, held: Held, holders: str = "ac", leader: str = "a") -> Adopt:
        at = self.attempt(number, leader)
        signed = holders_of(held, holders)
        return Adopt(attempt=at, header=held.header, holders=signed, seconds=TIMING.round_timeout)

    def averaging(self) -> Rig:
        self.hear("a", self.begin())
        assert self.peer.state is State.AVERAGING
        return self

    def next_header(self, payload: bytes = PAYLOAD, missed: tuple[tuple[str, int], ...] = ()) -> Header:
        lacking = dict(missed)
        roster = [member.lacking(lacking.get(member.peer, 0)) for member in self.roster()]
        return self.peer.log.in_state(self.peer.state_digest).next_header(roster, payload)

    def complete(
        self, peer: str, number: int = 1, payload: bytes = PAYLOAD, missed: tuple[tuple[str, int], ...] = ()
    ) -> Complete:
        """A member says that it holds the payload of a's attempt."""
        return complete(self.next_header(payload, missed), self.attempt(number), peer, missed)

    def commit(self, header: Header | None = None, by: Iterable[str] | None = None) -> Commit:
        """The next entry is made."""
        return commit(self.peer.log, header or self.next_header(), by=by)

    def holding(self, payload: bytes = PAYLOAD) -> Rig:
        """All of the present round's payload is here, and all other members say the same."""
        assert self.peer.exchange is not None
        self.agreeing(self.do(PayloadAssembled(self.peer.exchange.name, payload)))
        return self

    def agreeing(self, effects: list[Effect]) -> list[Effect]:
        """If this peer says what its payload is, all other members say the same."""
        self.effects, exchange = effects, self.peer.exchange
        for _, said in sends(effects, Prepared)[:1]:
            for peer in exchange.round.remaining if exchange else ():
                effects += self.hear(peer, said) if peer != self.peer.me else []
        self.effects = effects
        return effects

    def applying(self) -> Rig:
        self.hear("a", self.commit())
        assert self.peer.state is State.APPLYING
        return self

    def applied(self) -> Rig:
        last = self.peer.log.last
        assert last is not None
        self.step(last)
        self.see()
        return self

    def step(self, header: Header, state_digest: bytes = STATE) -> list[Effect]:
        """The outer step is done, and the state after it digested."""
        return [*self.do(Applied(header)), *self.do(Digested(header, state_digest))]
