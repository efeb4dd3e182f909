"""The other peers of a run. A peer is live while its heartbeats advance, judged on our own clock alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from peers.log.state import LogState
from peers.presence.heartbeat import Heartbeat, PeerState

PARTICIPATING = frozenset({PeerState.TRAINING, PeerState.READY, PeerState.AVERAGING})
"""States in which a peer holds the run's state and works on the next entry."""
DONATING = PARTICIPATING | {PeerState.ARCHIVING}
"""States in which a peer has the run's state to give."""
FORGOTTEN = 3600.0
"""Seconds of silence after which a peer is forgotten; heartbeats older than that are expired everywhere."""
SEEN_LIMIT = 10_000
"""Peers that are remembered. Of more, those silent for longest are forgotten: made-up peers cost nothing."""
IsFarewell: TypeAlias = Callable[[str, int, int, bytes], bool]
"""Given peer, incarnation, index and signature."""

DEPARTURES = 4
"""Incarnations of one peer that are remembered to have left."""


class Roll(dict[str, Heartbeat]):
    """The latest heartbeats of the other peers that are alive and not leaving, by peer. It does not change: in a large
    swarm it is long, and looked at all the time."""

    @cached_property
    def trainers(self) -> tuple[Heartbeat, ...]:
        """Return those of peers that train, or will once they have joined: all but archives."""
        return tuple(beat for beat in self.values() if beat.state is not PeerState.ARCHIVING)

    @cached_property
    def at_work(self) -> tuple[Heartbeat, ...]:
        """Return those of peers that work on the next entry."""
        return tuple(beat for beat in self.values() if beat.state in PARTICIPATING)

    @cached_property
    def ready(self) -> tuple[str, ...]:
        """Return the peers that are done, and wait for a round to begin."""
        return tuple(beat.peer for beat in self.at_work if beat.state is PeerState.READY)


@dataclass(slots=True)
class _Sighting:
    heartbeat: Heartbeat
    advanced_at: float  # when anything came of it
    beaten_at: float  # when a heartbeat did
    reachable: bool = True
    departures: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # of its last incarnations, signed

    @property
    def has_left(self) -> bool:
        return self.heartbeat.state is PeerState.LEAVING or self.heartbeat.incarnation in self.departures

    def departs(self, incarnation: int, departure: int, signature: bytes) -> None:
        self.departures[incarnation] = departure, signature
        while len(self.departures) > DEPARTURES:
            del self.departures[next(iter(self.departures))]


class Membership:
    """The other peers of the run, from their heartbeats and from what became of messages to them."""

    def __init__(self, me: str, expiry: float, is_farewell: IsFarewell) -> None:
        """`is_farewell` checks whether a signature of a departure is the peer's own."""
        self._me = me
        self._is_farewell = is_farewell
        self._expiry = expiry
        self._seen: dict[str, _Sighting] = {}
        self._departed = set[str]()  # in some incarnation
        self._live: Roll | None = None  # as found last; None: something has changed since
        self._live_until = 0.0  # then a peer may have expired
        self.polled = False

    def observe(self, heartbeats: Iterable[Heartbeat], now: float, silences: Mapping[str, float] | None = None) -> None:
        """Take in the heartbeats that we heard, some of them `silences` seconds ago; old ones change nothing.

        The roll stays the same object where all say what they said before: what follows from it need not be worked out
        again.
        """
        self.polled = True
        for heartbeat in heartbeats:
            peer, sighting = heartbeat.peer, self._seen.get(heartbeat.peer)
            if peer == self._me or (sighting and heartbeat.sequence <= sighting.heartbeat.sequence):
                continue
            heard_at = now - silences.get(peer, 0.0) if silences else now
            said_before = self._live.get(peer) if self._live is not None else None
            if said_before is None or not heartbeat.repeats(said_before):
                self._live = None
            if sighting is None:
                sighting = self._seen[peer] = _Sighting(heartbeat, heard_at, heard_at)
            else:
                sighting.heartbeat, sighting.reachable = heartbeat, True
                sighting.advanced_at = max(sighting.advanced_at, heard_at)
                sighting.beaten_at = max(sighting.beaten_at, heard_at)
            if heartbeat.state is PeerState.LEAVING:
                self._departs(sighting, heartbeat.incarnation, heartbeat.departure, heartbeat.farewell)
        self._forget(now)

    def _forget(self, now: float) -> None:
        gone = [peer for peer, sighting in self._seen.items() if now - sighting.advanced_at > FORGOTTEN]
        if len(self._seen) - len(gone) > SEEN_LIMIT:
            gone = sorted(self._seen, key=lambda peer: self._seen[peer].advanced_at)[: len(self._seen) - SEEN_LIMIT]
            self._live = None
        for peer in gone:
            del self._seen[peer]
            self._departed.discard(peer)

    @property
    def met(self) -> Collection[str]:
        """Return all peers that we heard in the last hour, and ourselves."""
        return {self._me, *self._seen}

    def unreachable(self, peer: str) -> None:
        """Take a peer for dead until its next heartbeat: a message could not be delivered."""
        if peer in self._seen:
            self._seen[peer].reachable = False
            self._live = None

    def heard_from(self, peer: str, now: float) -> None:
        """Note that a message of a peer arrived, which is as good as a heartbeat for being alive."""
        sighting = self._seen.get(peer)
        if sighting is not None:
            self._live = self._live if self.is_live(peer, now) else None
            sighting.reachable, sighting.advanced_at = True, now

    def departs(self, peer: str, incarnation: int, departure: int, signature: bytes) -> None:
        """Note that a peer said farewell: it counts in no quorum from the entry `departure` on. Strangers are in none,
        and not remembered."""
        if peer in self._seen:
            self._departs(self._seen[peer], incarnation, departure, signature)
            self._live = None

    def _departs(self, sighting: _Sighting, incarnation: int, departure: int, signature: bytes) -> None:
        if self._is_farewell(sighting.heartbeat.peer, incarnation, departure, signature):
            sighting.departs(incarnation, departure, signature)
            self._departed.add(sighting.heartbeat.peer)

    def departed(self, log: LogState) -> frozenset[str]:
        """Return the voters of the log that have left before they could vote for its next entry."""
        return frozenset(self.farewells(log))

    def farewells(self, log: LogState) -> dict[str, tuple[int, bytes]]:
        """Return the same, with what they signed: from which index on."""
        if not self._departed:
            return {}
        index, gone = log.position.index, dict[str, tuple[int, bytes]]()
        for peer in self._departed & log.incarnations.keys():
            sighting = self._seen.get(peer)
            farewell = sighting.departures.get(log.incarnations[peer]) if sighting else None
            if farewell is not None and farewell[0] <= index:
                gone[peer] = farewell
        return gone

    def live(self, now: float) -> Roll:
        """Return who is alive and not leaving: the same object as long as nothing changes."""
        if self._live is None or now > self._live_until:
            live = {
                peer: sighting
                for peer, sighting in self._seen.items()
                if sighting.reachable and now - sighting.advanced_at <= self._expiry and not sighting.has_left
            }
            self._live = Roll((peer, sighting.heartbeat) for peer, sighting in live.items())
            oldest = min((sighting.advanced_at for sighting in live.values()), default=now)
            self._live_until = oldest + self._expiry
        return self._live

    def spoke_within(self, seconds: float, now: float, even_leavers: bool = False) -> list[Heartbeat]:
        """Return the last heartbeats of the peers that have not left, and gave one so short a while ago; with
        `even_leavers` also of those that go on after a farewell.

        A message is no heartbeat here, nor does it count when one could not be delivered: a peer may send messages to
        some and not to others, and a link may fail for a moment.
        """
        seen = [sighting for sighting in self._seen.values() if even_leavers or not sighting.has_left]
        return [sighting.heartbeat for sighting in seen if now - sighting.beaten_at <= seconds]

    def is_live(self, peer: str, now: float) -> bool:
        sighting = self._seen.get(peer)
        if sighting is None or not sighting.reachable or sighting.has_left:
            return False
        return now - sighting.advanced_at <= self._expiry
