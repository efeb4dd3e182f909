"""The other peers of a run. A peer is live while new heartbeats of it arrive, timed by this machine's clock alone."""

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
"""States in which a peer can send the run's state to others."""
FORGOTTEN = 3600.0
"""Seconds of silence after which a peer is forgotten; heartbeats older than that are expired everywhere."""
SEEN_LIMIT = 10_000
"""Peers that are remembered. Beyond it those silent for longest are forgotten, since made-up peers cost nothing."""
IsFarewell: TypeAlias = Callable[[str, int, int, bytes], bool]
"""Returns whether a farewell is valid, given its peer, incarnation, index and signature."""

DEPARTURES = 4
"""Departed incarnations of one peer that are remembered."""


class Roll(dict[str, Heartbeat]):
    """The latest heartbeats of the other peers that are live and not leaving, by peer.

    It is immutable, because it is long in a large swarm, and used at every event.
    """

    @cached_property
    def trainers(self) -> tuple[Heartbeat, ...]:
        """The heartbeats of peers that train or will train once they have joined: of all except archives."""
        return tuple(beat for beat in self.values() if beat.state is not PeerState.ARCHIVING)

    @cached_property
    def at_work(self) -> tuple[Heartbeat, ...]:
        """The heartbeats of peers that work on the next entry."""
        return tuple(beat for beat in self.values() if beat.state in PARTICIPATING)

    @cached_property
    def ready(self) -> tuple[str, ...]:
        """The ids of the peers that have trained, and wait for a round to begin."""
        return tuple(beat.peer for beat in self.at_work if beat.state is PeerState.READY)


@dataclass(slots=True)
class _Sighting:
    heartbeat: Heartbeat
    heard_at: float  # seconds on our clock when the peer's last heartbeat or message came
    heartbeat_at: float  # seconds on our clock when the peer's last heartbeat came
    reachable: bool = True
    departures: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # by incarnation: farewell index, signature

    @property
    def has_left(self) -> bool:
        return self.heartbeat.state is PeerState.LEAVING or self.heartbeat.incarnation in self.departures

    def departs(self, incarnation: int, departure: int, signature: bytes) -> None:
        self.departures[incarnation] = departure, signature
        while len(self.departures) > DEPARTURES:
            del self.departures[next(iter(self.departures))]


class Membership:
    """The other peers of the run, judged by their heartbeats, received messages, and failed deliveries to them."""

    def __init__(self, me: str, expiry: float, is_farewell: IsFarewell) -> None:
        """Create a membership without other peers. A peer is live for `expiry` seconds after it was heard.
        `is_farewell` checks the signature of a farewell."""
        self._me = me
        self._is_farewell = is_farewell
        self._expiry = expiry
        self._seen: dict[str, _Sighting] = {}
        self._departed = set[str]()  # peers that have sent a farewell in any incarnation
        self._live: Roll | None = None  # the last result of `live`; None if something has changed since then
        self._live_until = 0.0  # the first time at which a peer in `_live` may have expired
        self.polled = False

    def observe(self, heartbeats: Iterable[Heartbeat], now: float, silences: Mapping[str, float] | None = None) -> None:
        """Record each heartbeat that is newer than its peer's last one. `silences` has the seconds since peers were
        heard; a peer that is not in it counts as heard now.

        The roll stays the same object if no heartbeat changes its content, so that derived values can be reused.
        """
        self.polled = True
        for heartbeat in heartbeats:
            peer, sighting = heartbeat.peer, self._seen.get(heartbeat.peer)
            if peer == self._me or (sighting and heartbeat.sequence <= sighting.heartbeat.sequence):
                continue
            heard_at = now - silences.get(peer, 0.0) if silences else now
            before = self._live.get(peer) if self._live is not None else None
            if before is None or not heartbeat.repeats(before):
                self._live = None
            if sighting is None:
                sighting = self._seen[peer] = _Sighting(heartbeat, heard_at, heard_at)
            else:
                sighting.heartbeat, sighting.reachable = heartbeat, True
                sighting.heard_at = max(sighting.heard_at, heard_at)
                sighting.heartbeat_at = max(sighting.heartbeat_at, heard_at)
            if heartbeat.state is PeerState.LEAVING:
                self._departs(sighting, heartbeat.incarnation, heartbeat.departure, heartbeat.farewell)
        self._forget(now)

    def _forget(self, now: float) -> None:
        gone = [peer for peer, sighting in self._seen.items() if now - sighting.heard_at > FORGOTTEN]
        if len(self._seen) - len(gone) > SEEN_LIMIT:
            gone = sorted(self._seen, key=lambda peer: self._seen[peer].heard_at)[: len(self._seen) - SEEN_LIMIT]
            self._live = None
        for peer in gone:
            del self._seen[peer]
            self._departed.discard(peer)

    @property
    def met(self) -> Collection[str]:
        """The ids of all peers that were heard in the last hour, and of this peer."""
        return {self._me, *self._seen}

    def unreachable(self, peer: str) -> None:
        """Count a peer as dead until its next heartbeat, because a message to it could not be delivered."""
        if peer in self._seen:
            self._seen[peer].reachable = False
            self._live = None

    def heard_from(self, peer: str, now: float) -> None:
        """Record that a message of a peer arrived, which is as good a sign of life as a heartbeat."""
        sighting = self._seen.get(peer)
        if sighting is not None:
            self._live = self._live if self.is_live(peer, now) else None
            sighting.reachable, sighting.heard_at = True, now

    def departs(self, peer: str, incarnation: int, departure: int, signature: bytes) -> None:
        """Record a peer's farewell: the peer counts in no quorum from the entry `departure` on. Unknown peers'
        farewells are ignored, because these peers are in no quorum."""
        if peer in self._seen:
            self._departs(self._seen[peer], incarnation, departure, signature)
            self._live = None

    def _departs(self, sighting: _Sighting, incarnation: int, departure: int, signature: bytes) -> None:
        if self._is_farewell(sighting.heartbeat.peer, incarnation, departure, signature):
            sighting.departs(incarnation, departure, signature)
            self._departed.add(sighting.heartbeat.peer)

    def departed(self, log: LogState) -> frozenset[str]:
        """Return the voters of the log that left the run before they could vote for the log's next entry."""
        return frozenset(self.farewells(log))

    def farewells(self, log: LogState) -> dict[str, tuple[int, bytes]]:
        """Return the farewells (index, signature) of voters that left before the log's next entry, by peer id."""
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
        """Return the roll of live peers. It is the same object as long as nothing changes."""
        if self._live is None or now > self._live_until:
            live = {
                peer: sighting
                for peer, sighting in self._seen.items()
                if sighting.reachable and now - sighting.heard_at <= self._expiry and not sighting.has_left
            }
            self._live = Roll((peer, sighting.heartbeat) for peer, sighting in live.items())
            oldest = min((sighting.heard_at for sighting in live.values()), default=now)
            self._live_until = oldest + self._expiry
        return self._live

    def spoke_within(self, seconds: float, now: float, even_leavers: bool = False) -> list[Heartbeat]:
        """Return the last heartbeat of each peer that has sent one in the last `seconds`. Peers that have left the run
        are only included with `even_leavers`.

        Only heartbeats count here, and not messages or failed deliveries: a peer may send messages to some and not to
        others, and a link may fail for a moment.
        """
        seen = [sighting for sighting in self._seen.values() if even_leavers or not sighting.has_left]
        return [sighting.heartbeat for sighting in seen if now - sighting.heartbeat_at <= seconds]

    def is_live(self, peer: str, now: float) -> bool:
        sighting = self._seen.get(peer)
        if sighting is None or not sighting.reachable or sighting.has_left:
            return False
        return now - sighting.heard_at <= self._expiry
