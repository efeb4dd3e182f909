"""When a peer sends a whole heartbeat, and when a sign of life is enough, so that a large swarm can hear it."""

from __future__ import annotations

from typing import NamedTuple

from peers.presence.heartbeat import NUMBERS, Heartbeat, PeerState
from peers.presence.life_signs import SLOT, SLOTS, Chain, LifeSign, tag_of
from peers.values.identity import Identity

CALM, URGENT = 0.03, 0.007
"""Seconds from one whole heartbeat to the next, for each other peer: of some 330 bytes each, all together are then 11
KB a second at most, or 47 while everybody has something to tell that others act upon."""
SIGNS = 0.003
"""Seconds from one sign of life to the next, for each other peer: at three copies of 22 bytes, 22 KB a second."""
LONGEST_SILENCE = 0.2  # of a heartbeat's lifetime, from one sign to the next at most: others wait half of that lifetime
AHEAD = 4  # slots that the clock may gain on a chain before there is a new one
RESERVE = 0.25  # of a chain's length, which is left for the next heartbeat to bring a new chain in time


class Pace(NamedTuple):
    """What the next thing that a peer says of itself depends on. With more `others` heartbeats come more slowly, unless
    it must be a whole one. It must come `after` what a former life said, whatever the clock was then (a sequence)."""

    others: int = 0
    is_whole: bool = False
    after: int = 0


def longest_silence(others: int, lifetime: float) -> float:
    """Return how many seconds pass from one sign of life to the next, at most."""
    return min(SIGNS * others, LONGEST_SILENCE * lifetime)


class Voice:
    """Utters one peer's heartbeats, and remembers what it said last."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._last: Heartbeat | None = None
        self._said_at = -float("inf")
        self._chain: Chain | None = None
        self._chained_at = 0.0
        self._number = 0
        self._tag = b""
        self._slots = 0
        self._signed_at = -float("inf")

    def say(self, heartbeat: Heartbeat, pace: Pace, now: float) -> tuple[bytes | None, LifeSign | None]:
        """Return what to tell others now: the signed heartbeat or nothing, and a sign of life or, so soon, none."""
        said = None
        if heartbeat.sequence <= pace.after:
            heartbeat = heartbeat.model_copy(update={"sequence": pace.after + 1})
        if pace.is_whole or self._is_due(heartbeat, pace.others, now):
            said = self._whole(heartbeat, now)
        slots = self._slots_at(now)
        silence = longest_silence(pace.others, heartbeat.lifetime)
        is_too_soon = slots <= self._slots or (said is None and now - self._signed_at < silence)
        if is_too_soon or slots > SLOTS or self._chain is None:
            return said, None
        self._slots, self._signed_at = slots, now
        return said, LifeSign(self._tag, slots, self._number, self._chain.link(slots))

    def _is_due(self, heartbeat: Heartbeat, others: int, now: float) -> bool:
        if self._last is None or heartbeat.state is PeerState.LEAVING or self._is_over(heartbeat, now):
            return True
        pace = URGENT if _urgent(self._last) != _urgent(heartbeat) else CALM
        return now - self._said_at >= pace * others

    def _slots_at(self, now: float) -> int:
        return int((now - self._chained_at) * 1000 / SLOT)

    def _is_over(self, heartbeat: Heartbeat, now: float) -> bool:
        """Whether there is no chain, or it is used up, or our clock was set forward and is far ahead of it."""
        if self._chain is None:
            return True
        is_used_up = self._slots_at(now) > (1 - RESERVE) * SLOTS or self._number + 1 >= NUMBERS
        return is_used_up or heartbeat.sequence > self._chain.since + (self._slots_at(now) + AHEAD) * SLOT

    def _whole(self, heartbeat: Heartbeat, now: float) -> bytes:
        sequence = heartbeat.sequence
        if self._last is not None and self._chain is not None:
            said = self._chain.since + self._slots * SLOT + self._number
            sequence = max(sequence, self._last.sequence + 1, said + 1)
        if self._chain is None or self._is_over(heartbeat, now):
            self._chain = Chain(self._identity, heartbeat.run, sequence)
            self._chained_at, self._number, self._slots = now, 0, 0
            self._tag = tag_of(self._identity.peer_id, self._chain.seal(0))
        else:
            self._number += 1
        self._said_at = now
        self._last = heartbeat.model_copy(update={"sequence": sequence, "seal": self._chain.seal(self._number)})
        return self._last.sign(self._identity)


def _urgent(heartbeat: Heartbeat) -> tuple[object, ...]:
    """Return what others act upon."""
    return heartbeat.state, heartbeat.index, heartbeat.head, heartbeat.vote, heartbeat.trouble, heartbeat.proposed
