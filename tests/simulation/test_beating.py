"""Swarms that beat over a lossy network: live peers are heard, dead ones are not, and it costs little (R20)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection

import pytest

from peers.errors import RemoteProtocolError
from peers.presence.beats import AUDIENCE_LIMIT, Beats, Call
from peers.presence.calls import BEAT, Answer, Beat, Page, Request
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.meeting_place import SAMPLE, MeetingPlace
from peers.values.identity import Identity
from peers.values.wire import pack, unpack
from tests.peers.presence.beaters import LIFETIME, RUN, WALL, Beater, Clock

BEAT_SECONDS = 2.0
EXPIRY = LIFETIME / 2
ASK_SECONDS = 10.0
IDENTITIES = [Identity.generate() for _ in range(300)]


class Swarm:
    """Peers, a DHT, and a network that loses calls, and has pairs between which nothing passes."""

    def __init__(self, size: int, seed: int = 1, loss: float = 0.0, cut: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.clock = Clock()
        self.loss, self.cut = loss, cut
        self.peers: dict[str, Swimmer] = {}
        self.dht: dict[str, tuple[Heartbeat, bytes]] = {}
        self.parted: Collection[str] = ()
        self.bytes = Counter[str]()
        self.longest = Counter[str]()
        for identity in IDENTITIES[:size]:
            self.add(identity)

    def add(self, identity: Identity) -> Swimmer:
        peer = self.peers[identity.peer_id] = Swimmer(self, identity)
        return peer

    def reaches(self, one: str, other: str) -> bool:
        is_cut = random.Random(f"{min(one, other)} {max(one, other)}").random() < self.cut
        return not is_cut and (one in self.parted) == (other in self.parted)

    def call(self, one: str, other: str, call: Call) -> bytes | None:
        """Return the answer to a call; None: there is none."""
        self.bytes[one] += len(call.payload)
        self.longest[call.name] = max(self.longest[call.name], len(call.payload))
        if other not in self.peers or not self.reaches(one, other) or self.random.random() < self.loss:
            return None
        answer = self.peers[other].hears(one, call)
        self.bytes[other] += len(answer)
        return None if self.random.random() < self.loss else answer

    def live(self, seconds: float) -> None:
        """Let everybody beat, in another order each time."""
        for _ in range(int(seconds / BEAT_SECONDS)):
            self.clock.now += BEAT_SECONDS
            living = list(self.peers.values())
            self.random.shuffle(living)
            for peer in living:
                peer.beat()

    def strangers(self) -> int:
        """Return for how many ordered pairs of living peers that reach each other one does not hear the other."""
        return sum(
            other not in peer.heard()
            for peer in self.peers.values()
            for other in self.peers
            if other != peer.name and self.reaches(peer.name, other)
        )


class Swimmer(Beater):
    """One peer with its place in the DHT."""

    def __init__(self, swarm: Swarm, identity: Identity) -> None:
        super().__init__(swarm.clock, identity)
        self.swarm = swarm
        self.place = MeetingPlace(self.beats)
        self.voters: Collection[str] = ()
        self.asked_at = -float("inf")
        self.step = 0

    def beat(self) -> None:
        now, wall = self.clock.now, self.clock.wall
        self.step += 1
        heartbeat = self.heartbeat(inner_step=self.step)
        is_to_be_stored = self.place.is_to_be_stored(now, wall)
        if is_to_be_stored or self.beats.is_news(heartbeat, now):
            signed = heartbeat.sign(self.identity)
            self.beats.say(signed, now)
            if is_to_be_stored:
                self.place.stored(now)
                self.swarm.dht[self.name] = heartbeat, signed
        else:
            self.beats.go_on(heartbeat, now)
        self.tell()
        if self.place.is_search_due(now):
            self.place.searched(now)
            fresh = [signed for beat, signed in self.swarm.dht.values() if beat.expires > wall]
            for signed in self.swarm.random.sample(fresh, min(SAMPLE, len(fresh))):
                self.beats.found(signed, now, wall)
        if now - self.asked_at >= ASK_SECONDS:
            self.ask()

    def tell(self) -> None:
        self.beats.choose(self.voters, self.clock.now)
        for other in self.beats.audience.due(self.clock.now):
            while call := self.beats.call_for(other):
                answer = self.swarm.call(self.name, other, call)
                if answer is None:
                    self.beats.failed(other, self.clock.now)
                    break
                if not self.beats.answered(other, call, answer, self.clock.now, self.clock.wall):
                    break

    def ask(self) -> None:
        others = sorted(self.beats.silences(self.clock.now))
        if others:
            other = self.swarm.random.choice(others)
            if other in self.swarm.peers and self.swarm.reaches(self.name, other):
                self.asks(self.swarm.peers[other], tuple(self.beats.others(self.clock.now)))
                self.asked_at = self.clock.now


@pytest.mark.parametrize(
    "weather",
    [*(pytest.param(each, marks=pytest.mark.thorough) for each in ({}, {"loss": 0.05})), {"loss": 0.05, "cut": 0.05}],
    ids=["fair", "loss", "cuts"],
)
def test_the_living_are_heard_the_dead_are_not_and_newcomers_are_met(weather: dict[str, float]) -> None:
    swarm = Swarm(40, loss=weather.get("loss", 0.0), cut=weather.get("cut", 0.0))
    swarm.live(40.0)
    assert swarm.strangers() <= 2 if weather else swarm.strangers() == 0
    dead = list(swarm.peers)[:10]
    for name in dead:
        del swarm.peers[name]
    swarm.live(EXPIRY + 2.0)
    if not weather:
        assert not any(set(dead) & peer.heard() for peer in swarm.peers.values())
    new = [swarm.add(identity) for identity in IDENTITIES[40:45]]
    swarm.live(24.0)
    assert swarm.strangers() <= 2 if weather else swarm.strangers() == 0
    assert not any(set(dead) & peer.heard() for peer in swarm.peers.values())
    assert all(len(one.heard()) > 25 for one in new)


@pytest.mark.parametrize("parted", [20.0, pytest.param(300.0, marks=pytest.mark.thorough)])
def test_halves_that_were_parted_for_minutes_meet_again(parted: float) -> None:
    swarm = Swarm(24)
    swarm.live(30.0)
    swarm.parted = frozenset(list(swarm.peers)[:12])
    dht, swarm.dht = swarm.dht, {}  # which is parted, too: each half sees what it stores itself
    swarm.live(parted)
    assert swarm.strangers() == 0
    swarm.parted = ()
    swarm.dht |= dht
    swarm.live(40.0)
    assert swarm.strangers() == 0


def nothing(sender: str, request: Request, now: float, wall: float) -> bytes:
    return Page(heartbeats=()).packed()


def test_those_who_say_nothing_of_others_bury_nobody_and_keep_nobody_alive() -> None:
    """Nobody's life depends on what others pass on."""
    swarm = Swarm(12)
    swarm.live(30.0)
    for peer in list(swarm.peers.values())[:8]:
        peer.beats.hand_out = nothing  # type: ignore[method-assign]
    dead = list(swarm.peers)[-1]
    del swarm.peers[dead]
    swarm.live(EXPIRY + 2.0)
    assert swarm.strangers() == 0
    assert not any(dead in peer.heard() for peer in swarm.peers.values())


@pytest.mark.parametrize(("size", "limit"), [(8, 1_000), pytest.param(100, 7_000, marks=pytest.mark.thorough)])
def test_what_each_sends_is_bounded(size: int, limit: int) -> None:
    """Bytes a second, of which those of a beat are at most 100."""
    swarm = Swarm(size)
    swarm.live(20.0)
    swarm.bytes.clear()
    swarm.live(16.0)
    assert swarm.longest[BEAT] <= 100
    assert max(swarm.bytes.values()) / 16.0 <= limit


def test_in_a_large_swarm_all_hear_the_voters_and_the_voters_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.presence.beats.AUDIENCE_LIMIT", 8)
    assert AUDIENCE_LIMIT == 128
    swarm = Swarm(40)
    swarm.live(20.0)
    voters = frozenset(list(swarm.peers)[-8:])
    for peer in swarm.peers.values():
        peer.voters = voters
    swarm.live(40.0)
    for name, peer in swarm.peers.items():
        assert peer.heard() >= voters - {name}
        assert name not in voters or peer.heard() == swarm.peers.keys() - {name}


def test_whoever_makes_up_peers_cannot_have_the_others_send_without_end() -> None:
    swarm = Swarm(10)
    swarm.live(30.0)
    honest = frozenset(swarm.peers)
    for number in range(1000):
        identity = IDENTITIES[10 + number % 290]
        made_up = Beater(swarm.clock, identity).heartbeat(addresses=("/ip4/192.0.2.1/tcp/1",), lifetime=600.0)
        swarm.dht[identity.peer_id] = made_up, made_up.sign(identity)
    swarm.live(60.0)
    swarm.bytes.clear()
    swarm.live(60.0)
    assert swarm.strangers() == 0, "those that are there still hear each other"
    assert max(swarm.bytes[name] for name in honest) / 60.0 <= 128 * 500 / 30.0 + 1000, "each made-up one now and then"


def test_a_liar_with_many_names_fills_no_memory() -> None:
    """Beats of unknown peers leave nothing behind, whatever they say."""
    swarm = Swarm(2)
    swarm.live(10.0)
    one = next(iter(swarm.peers.values()))
    before = len(one.beats.store)
    for number in range(10_000):
        beat = Beat.of(one.heartbeat(incarnation=number, sequence=number, state=PeerState.READY))
        answer = one.beats.hear_beat(f"made up {number}", beat, swarm.clock.now, swarm.clock.wall)
        assert unpack(Answer, answer).wants
    assert len(one.beats.store) == before
    assert one.beats.audience.peers == swarm.peers.keys() - {one.name}
    with pytest.raises(RemoteProtocolError):
        one.beats.hear_heartbeat("made up", b"garbage", swarm.clock.now, swarm.clock.wall)


def test_a_heartbeat_of_another_run_is_no_page() -> None:
    beats = Beats(IDENTITIES[0].peer_id, RUN)
    with pytest.raises(RemoteProtocolError):
        beats.hand_out("a", Request.unpack("a", pack(Request(run="other", known=b""))), 0.0, WALL)
