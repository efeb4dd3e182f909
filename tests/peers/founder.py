"""b, which founds a run with a and c: one real peer with a clock. Of the others there are only messages."""

from __future__ import annotations

from peers.log.header import Header, Member
from peers.log.lineage import Lineage
from peers.log.settings import RunSettings
from peers.log.state import LogState
from peers.messages.commitment import Contribution, digest_of_all
from peers.messages.messages import Begin, LeaseGrant, Ready
from peers.messages.rounds import Round, Share
from peers.presence.heartbeat import PeerState
from peers.protocol.effects import Effect, Send
from peers.protocol.events import Event, HeartbeatsSeen, Received, Tick, TrainingDone
from peers.protocol.exchange import Exchange
from peers.protocol.peer import Peer
from peers.protocol.states import State
from peers.values.chunks import Sum
from peers.values.leases import SampleRange
from peers.values.workload import PayloadKind, Trained
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG, SETTINGS, STATE
from tests.peers.rounds import CONTRIBUTED, SIZE, TOKENS, round_name
from tests.simulator.simulated_keys import SimulatedKeys

LEASE = SampleRange(20, 40)


class Founder:
    """The peer b, into each state the short way."""

    def __init__(self, settings: RunSettings = SETTINGS, log: LogState | None = None) -> None:
        """Begin at the end of a log, by default before its first entry."""
        self.now = 0.0
        payloads = [PayloadKind(SIZE, lambda chunk, data, format: 1.0)] * settings.fragments
        self.peer = Peer("b", settings, payloads, STATE, 0.0, 0, SimulatedKeys("b"), Lineage(log or settings.empty_log))
        self.effects: list[Effect] = []
        self._beats = 0
        self.see(PeerState.JOINING)

    def do(self, event: Event, after: float = 0.0) -> list[Effect]:
        self.now += after
        self.effects = self.peer.handle(event, self.now)
        return self.effects

    def see(self, state: PeerState = PeerState.TRAINING, view: int = 0) -> None:
        self._beats += 1
        self.do(HeartbeatsSeen(tuple(beat(name, self.peer.log, state, self._beats, view=view) for name in "ac")))

    def is_in(self, state: State) -> bool:
        return self.peer.state is state

    def training(self) -> Founder:
        self.do(Tick(), 5.0)
        self.do(Received("a", LeaseGrant(position=self.peer.round.log.position, samples=(LEASE,), steps=10)))
        self.see()
        return self

    def ready(self) -> Founder:
        self.training()
        contribution = Sum(CONTRIBUTED.digest, CONTRIBUTED.squares)
        self.do(TrainingDone(Trained((LEASE,), TOKENS, 1.0, contribution=contribution)))
        assert self.is_in(State.READY)
        return self

    def begin(self, attempt: int = 1, ours: Contribution | None = None) -> Begin:
        """a begins a round, in which each averages two chunks."""
        told = [CONTRIBUTED, ours or self.contribution, CONTRIBUTED]
        shares = [
            Share(member=Member(peer=peer, tokens=TOKENS, samples=(SampleRange(start, start + 20),)), chunks=2)
            for start, peer in ((0, "a"), (20, "b"), (40, "c"))
        ]
        name = round_name(attempt, position=LOG.position)
        round = Round(name=name, shares=tuple(shares), committed=digest_of_all(told))
        return Begin(ballot=name.ballot, round=round, seconds=60.0, heirs=(), commitments=tuple(told))

    @property
    def contribution(self) -> Contribution:
        """What b has committed to."""
        told = [effect.message for effect in self.effects if isinstance(effect, Send)]
        (ready,) = [message for message in told if isinstance(message, Ready)]
        assert ready.commitment is not None
        return ready.commitment.contribution

    def exchanging(self) -> Founder:
        self.do(Received("a", self.ready().begin()))
        assert self.is_in(State.AVERAGING)
        return self

    @property
    def exchange(self) -> Exchange:
        assert self.peer.exchange is not None
        return self.peer.exchange

    def header(self, payload: bytes) -> Header:
        return self.begin(ours=CONTRIBUTED).round.entry(LOG.in_state(STATE), {}, payload, "a")
