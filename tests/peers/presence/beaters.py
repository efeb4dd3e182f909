"""Peers that beat to each other, one step at a time."""

from __future__ import annotations

from typing import Any

from peers.presence.beats import Beats, Call
from peers.presence.calls import BEAT, HEARTBEAT, Beat, Request
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.values.identity import Identity
from peers.values.wire import pack, unpack

RUN = "tiny-" + "a" * 32
WALL = 1_800_000_000.0
LIFETIME = 20.0


class Clock:
    """One for all peers: `now` is ours, `wall` everybody's."""

    def __init__(self) -> None:
        self.now = 100.0

    @property
    def wall(self) -> float:
        return WALL + self.now


class Beater:
    """One peer of the run, which says something of itself when it is told to."""

    def __init__(self, clock: Clock, identity: Identity | None = None) -> None:
        self.clock = clock
        self.identity = identity or Identity.generate()
        self.name = self.identity.peer_id
        self.beats = Beats(self.name, RUN)
        self.sent: list[Call] = []

    def heartbeat(self, **changes: Any) -> Heartbeat:
        fields: dict[str, Any] = {
            "run": RUN,
            "peer": self.name,
            "incarnation": 0,
            "sequence": int(self.clock.wall * 1000),
            "lifetime": LIFETIME,
            "state": PeerState.TRAINING,
            "index": 1,
            "head": bytes(32),
            "state_digest": bytes(32),
            "lineage_tokens": 5,
            "inner_step": 0,
            "tokens_per_second": 0.0,
            "loss": None,
            "speed": 0.0,
            "addresses": (),
            "roster_size": 2,
        }
        return Heartbeat(**(fields | changes))

    def say(self, **changes: Any) -> Beater:
        """Sign where a beat is not enough."""
        heartbeat = self.heartbeat(**changes)
        if self.beats.is_news(heartbeat, self.clock.now):
            self.beats.say(heartbeat.sign(self.identity), self.clock.now)
        else:
            self.beats.go_on(heartbeat, self.clock.now)
        return self

    @property
    def signed(self) -> bytes:
        assert self.beats.own is not None
        return self.beats.own.signed

    def finds(self, *others: Beater) -> Beater:
        """Find others in the DHT."""
        for other in others:
            self.beats.found(other.signed, self.clock.now, self.clock.wall)
        return self

    def hears(self, sender: str, call: Call) -> bytes:
        """Return the answer to a call."""
        now, wall = self.clock.now, self.clock.wall
        if call.name == BEAT:
            return self.beats.hear_beat(sender, unpack(Beat, call.payload), now, wall)
        assert call.name == HEARTBEAT
        return self.beats.hear_heartbeat(sender, call.payload[8:], now, wall)

    def tells(self, other: Beater) -> list[str]:
        """Tell another peer what there is to tell. Returns the names of the calls that it took."""
        calls = []
        while call := self.beats.call_for(other.name):
            calls.append(call.name)
            self.sent.append(call)
            answer = other.hears(self.name, call)
            if not self.beats.answered(other.name, call, answer, self.clock.now, self.clock.wall):
                break
        return calls

    def tells_all(self, *others: Beater) -> None:
        """Tell those of these peers that are due."""
        self.beats.choose((), self.clock.now)
        due = self.beats.audience.due(self.clock.now)
        for other in others:
            if other.name in due:
                self.tells(other)

    def asks(self, other: Beater, known: tuple[str, ...] = ()) -> set[str]:
        """Ask another peer who is there. Returns the peers on its page."""
        request = Request.unpack(self.name, pack(self.beats.request(known)))
        page = other.beats.hand_out(self.name, request, other.clock.now, other.clock.wall)
        return self.beats.take_page(other.name, page, self.clock.now, self.clock.wall)

    def knows(self) -> dict[str, Heartbeat]:
        """Return the newest words of the other peers, of whomever they came."""
        return {one.peer: one for one in self.beats.heartbeats(self.clock.now) if one.peer != self.name}

    def heard(self) -> set[str]:
        """Return the peers that were heard within the expiry."""
        return {peer for peer, silence in self.beats.silences(self.clock.now).items() if silence <= LIFETIME / 2}


def couple(clock: Clock) -> tuple[Beater, Beater]:
    """Return two peers that hear each other."""
    one, other = Beater(clock).say(), Beater(clock).say()
    one.finds(other)
    one.tells_all(other)
    other.tells_all(one)
    return one, other
