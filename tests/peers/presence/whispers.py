"""Peers that gossip, one step at a time."""

from __future__ import annotations

from typing import Any

from peers.presence.gossip import Gossip
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.life_signs import LifeSign
from peers.presence.news import Request
from peers.presence.voice import Pace, Voice
from peers.values.identity import Identity

RUN = "tiny-" + "a" * 32
WALL = 1_800_000_000.0
LARGE = Pace(others=5000)
"""In a swarm in which heartbeats are rare."""


class Clock:
    """One for all peers: `now` is ours, `wall` everybody's."""

    def __init__(self) -> None:
        self.now = 100.0

    @property
    def wall(self) -> float:
        return WALL + self.now


class Whisperer:
    """One peer of the run, which says something of itself when it is told to."""

    def __init__(self, clock: Clock, identity: Identity | None = None) -> None:
        self.clock = clock
        self.identity = identity or Identity.generate()
        self.name = self.identity.peer_id
        self.voice = Voice(self.identity)
        self.gossip = Gossip(self.name, RUN, b"seed" + self.name.encode(), clock.wall)
        self.signed = b""
        self.signs: list[LifeSign] = []

    def heartbeat(self, **changes: Any) -> Heartbeat:
        fields: dict[str, Any] = {
            "run": RUN,
            "peer": self.name,
            "incarnation": 0,
            "sequence": int(self.clock.wall * 1000),
            "lifetime": 20.0,
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

    def say(self, pace: Pace | None = None, **changes: Any) -> Whisperer:
        signed, sign = self.voice.say(self.heartbeat(**changes), pace or Pace(), self.clock.now)
        self.signed = signed or self.signed
        self.signs += [sign] if sign else []
        self.gossip.say(signed, sign, self.clock.now, self.clock.wall)
        return self

    def finds(self, *others: Whisperer) -> None:
        """In the DHT."""
        for other in others:
            self.gossip.found(other.signed, self.clock.now, self.clock.wall)

    def answer(self, sender: str, request: bytes) -> bytes:
        return self.gossip.answer(sender, Request.unpack(sender, request), self.clock.now, self.clock.wall)

    def tells(self, other: Whisperer) -> tuple[int, int]:
        """One exchange. Returns the bytes there and back."""
        request = self.gossip.request(other.name, self.clock.now)
        answer = other.answer(self.name, request)
        self.gossip.answer_of(other.name, answer, self.clock.now, self.clock.wall)
        return len(request), len(answer)

    def knows(self) -> dict[str, Heartbeat]:
        return {one.peer: one for one in self.gossip.heartbeats(self.clock.now)}
