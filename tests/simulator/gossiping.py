"""A simulated swarm that does nothing but gossip, on a clock, a network that misbehaves, and a DHT."""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peers.errors import RemoteProtocolError
from peers.log.settings import Timing
from peers.presence.gossip import Gossip
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.meeting_place import MeetingPlace
from peers.presence.news import Request
from peers.presence.voice import Pace, Voice
from peers.values.identity import Identity
from peers.values.wire import digest_of

RUN = "simulated-" + "a" * 32
WALL = 1_800_000_000.0  # seconds since the epoch when the simulation begins
LOOK = 0.125  # seconds between two looks at which exchanges are due
TIMEOUT = 3.0  # seconds that a peer waits for an answer
OVERHEAD = 150  # bytes of TLS, TCP and IP around one message
SEARCH_TIME = 1.0  # seconds that a search of the DHT takes
FOUND = 64  # heartbeats at most that it finds
TIMING = Timing()


@dataclass(frozen=True)
class Weather:
    """How badly the network behaves. `cut`: the share of pairs between which nothing passes; `relayed`: that of pairs
    between which all takes five times as long; times in seconds."""

    loss: float = 0.0
    shortest: float = 0.01
    longest: float = 0.15
    cut: float = 0.0
    relayed: float = 0.0


class GossipingPeer:
    """One peer: a voice, what it has heard, and a clock."""

    def __init__(self, identity: Identity, swarm: Crowd) -> None:
        self.identity = identity
        self.name = identity.peer_id
        self.swarm = swarm
        self.is_alive = True
        self.state = PeerState.TRAINING
        self.voice = Voice(identity)
        self.gossip = Gossip(self.name, RUN, swarm.random.randbytes(16), swarm.wall)
        self.dht = MeetingPlace(self.gossip, 2 * TIMING.heartbeat_expiry)
        self.sent = self.received = self.messages = 0

    def say(self) -> None:
        swarm = self.swarm
        others = swarm.scale or len(self.gossip.others(swarm.now))
        is_for_dht = swarm.has_dht and self.dht.is_to_be_stored(swarm.now, swarm.wall)
        signed, sign = self.voice.say(swarm.heartbeat_of(self), Pace(others, is_for_dht), swarm.now)
        self.gossip.say(signed, sign, swarm.now, swarm.wall)
        if is_for_dht and signed is not None:
            self.dht.stored(swarm.now)
            swarm.store(self, signed)
        if swarm.has_dht and self.dht.is_search_due(swarm.now):
            self.dht.searched(swarm.now)
            swarm.at(SEARCH_TIME, lambda: swarm.search(self))

    def answer(self, sender: str, request: bytes) -> bytes:
        return self.gossip.answer(sender, Request.unpack(sender, request), self.swarm.now, self.swarm.wall)

    def knows(self, other: str) -> bool:
        """Whether it takes the other one for alive, as `Membership` would that looks all the time."""
        word = self.gossip.heard.get(other)
        is_there = word is not None and word.heartbeat.state is not PeerState.LEAVING
        return is_there and word is not None and self.swarm.now - word.at <= TIMING.heartbeat_expiry


class _Detours:
    """The peers that one peer's links have found hard to reach."""

    def __init__(self, crowd: Crowd, name: str) -> None:
        self._crowd = crowd
        self._name = name

    def __contains__(self, other: object) -> bool:
        return self._crowd.is_detour(self._name, str(other))


@lru_cache(maxsize=1 << 16)
def _pair(one: str, other: str) -> float:
    """Return a number between 0 and 1 that is the pair's own."""
    return int.from_bytes(digest_of("".join(sorted((one, other))).encode())[:4], "big") / (1 << 32)


class Crowd:
    """A simulated swarm that does nothing but gossip."""

    def __init__(self, seed: int, weather: Weather | None = None, scale: int = 0) -> None:
        """`scale`: how many peers each of those that speak takes the swarm for; 0: as many as it hears of."""
        self.random = random.Random(seed)
        self.weather = weather or Weather()
        self.scale = scale
        self.now = 0.0
        self.peers: dict[str, GossipingPeer] = {}
        self.side: dict[str, int] = defaultdict(int)
        self.meddle: Callable[[str, str, bytes, bool], bytes] = lambda sender, to, message, is_request: message
        """(sender, receiver, message, whether it is a request) -> what arrives."""
        self.refused: Counter[str] = Counter()
        """Messages that did not prove themselves, by who sent them."""
        self.behind_nat: set[str] = set()
        """Peers with which nobody can begin an exchange."""
        self.has_dht = True
        self._dht: dict[str, tuple[float, int, bytes]] = {}  # until when, on which side, what
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._steps = 0

    @property
    def wall(self) -> float:
        return WALL + self.now

    @property
    def living(self) -> list[GossipingPeer]:
        return [peer for peer in self.peers.values() if peer.is_alive]

    # Peers ----------------------------------------------------------------------------------------------------
    def start(
        self, known: Iterable[GossipingPeer] = (), identity: Identity | None = None, after: float | None = 0.0
    ) -> GossipingPeer:
        """Start a peer that has found in the DHT what the `known` ones said last. It begins to speak `after` so many
        seconds; None: never."""
        peer = GossipingPeer(identity or self.new_identity(), self)
        peer.gossip.partners.avoided = _Detours(self, peer.name)
        self.peers[peer.name] = peer
        for other in known:
            if other.gossip.own is not None:
                peer.gossip.found(other.gossip.own.signed, self.now, self.wall)
        if after is not None:
            self.at(after, lambda: self._repeat(peer, TIMING.heartbeat, peer.say))
        self._repeat(peer, LOOK, lambda: self._look(peer))
        return peer

    def new_identity(self) -> Identity:
        """Return a peer's key, the same ones for each seed."""
        return Identity(Ed25519PrivateKey.from_private_bytes(self.random.randbytes(32)))

    def heartbeat_of(self, peer: GossipingPeer) -> Heartbeat:
        relay = f"/ip4/198.51.100.7/tcp/31337/p2p/{peer.name}"
        host = f"203.0.{len(peer.name) % 250}.{self.random.randrange(1, 250)}"
        return Heartbeat(
            run=RUN,
            peer=peer.name,
            incarnation=0,
            sequence=int(self.wall * 1000),
            lifetime=2 * TIMING.heartbeat_expiry,
            state=peer.state,
            index=17,
            head=digest_of(b"head"),
            state_digest=digest_of(b"state"),
            lineage_tokens=1 << 40,
            inner_step=int(self.now),
            tokens_per_second=self.random.random(),
            loss=self.random.random(),
            speed=self.random.random(),
            addresses=(f"/ip4/{host}/tcp/4001/p2p/{peer.name}", f"{relay}/p2p-circuit/p2p/{peer.name}"),
            roster_size=self.scale or len(self.peers),
            endpoints=(f"{host}:31338",),
            relays=(relay,),
        )

    # The DHT --------------------------------------------------------------------------------------------------
    def store(self, peer: GossipingPeer, signed: bytes) -> None:
        """Keep a heartbeat where those who are on the same side find it."""
        self._dht[peer.name] = self.now + 2 * TIMING.heartbeat_expiry, self.side[peer.name], signed

    def search(self, peer: GossipingPeer) -> None:
        """Let a peer know some of those whose heartbeats are kept."""
        kept = [one for until, side, one in self._dht.values() if until > self.now and side == self.side[peer.name]]
        for signed in self.random.sample(kept, min(FOUND, len(kept))):
            peer.gossip.found(signed, self.now, self.wall)

    # The clock ------------------------------------------------------------------------------------------------
    def at(self, delay: float, action: Callable[[], None]) -> None:
        self._steps += 1
        heapq.heappush(self._agenda, (self.now + delay, self._steps, action))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._agenda and self._agenda[0][0] <= end:
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        self.now = end

    def _repeat(self, peer: GossipingPeer, period: float, action: Callable[[], None]) -> None:
        def again() -> None:
            if peer.is_alive:
                action()
                self.at(period * self.random.uniform(0.98, 1.02), again)

        self.at(period * self.random.random(), again)

    # The network ----------------------------------------------------------------------------------------------
    def _look(self, peer: GossipingPeer) -> None:
        for other in peer.gossip.due(self.now):
            self._exchange(peer, other)

    def is_detour(self, one: str, other: str) -> bool:
        """Whether nothing passes from one peer to another, or only with detours."""
        return other in self.behind_nat or not self.weather.cut <= _pair(one, other) <= 1 - self.weather.relayed

    def _delay(self, one: str, other: str) -> float:
        delay = self.random.uniform(self.weather.shortest, self.weather.longest)
        return delay * (5 if _pair(one, other) > 1 - self.weather.relayed else 1)

    def _passes(self, one: str, other: str) -> bool:
        """Whether a message from one to the other arrives."""
        is_there = other in self.peers and self.peers[other].is_alive and self.side[one] == self.side[other]
        is_there = is_there and _pair(one, other) >= self.weather.cut
        return is_there and self.random.random() >= self.weather.loss

    def _exchange(self, peer: GossipingPeer, other: str) -> None:
        request = peer.gossip.request(other, self.now)
        is_over = False

        def fail() -> None:
            nonlocal is_over
            if not is_over and peer.is_alive:
                is_over = True
                peer.gossip.failed(other, self.now)

        def answered(answer: bytes) -> None:
            nonlocal is_over
            if is_over or not peer.is_alive:
                return
            is_over = True
            peer.received += len(answer) + OVERHEAD
            try:
                peer.gossip.answer_of(other, answer, self.now, self.wall)
            except RemoteProtocolError:
                self.refused[other] += 1
            self._look(peer)

        def asked() -> None:
            there = self.peers[other]
            if not there.is_alive:
                return
            there.received += len(request) + OVERHEAD
            try:
                answer = there.answer(peer.name, self.meddle(peer.name, other, request, True))
            except RemoteProtocolError:
                self.refused[peer.name] += 1
                return
            there.sent += len(answer) + OVERHEAD
            answer = self.meddle(other, peer.name, answer, False)
            if self._passes(other, peer.name):
                self.at(self._delay(peer.name, other), lambda: answered(answer))

        peer.messages += 1
        peer.sent += len(request) + OVERHEAD
        self.at(TIMEOUT, fail)
        if other not in self.behind_nat and self._passes(peer.name, other):
            self.at(self._delay(peer.name, other), asked)
