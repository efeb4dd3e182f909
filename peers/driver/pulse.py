"""The pulse of a peer, which publishes its own heartbeats and beats, and collects those of other peers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from peers import metrics
from peers.log.lineage import RECENT_ENTRIES
from peers.metrics import HEALTH
from peers.network.links import EAGER
from peers.presence.heartbeat import Heartbeat, HeldOutLoss, PeerState, name_peers
from peers.protocol.events import AmendmentSeen, Event, HeadsSeen, HeartbeatsSeen, SignedHeadsSeen
from peers.protocol.states import SHOWN_AS
from peers.values.identity import Identity
from peers.values.system import next_sequence, now
from peers.values.wire import printable

if TYPE_CHECKING:
    from peers.driver.driver import Driver
    from peers.network.transport import HivemindTransport

REFRESH_BEATS = 15  # heartbeats between two updates of this peer's own addresses
SHARE_FOR_SILENCE = 0.25
"""Share of a heartbeat's expiry for which a beat may wait for a silent DHT node. A beat has two such waits at most, and
must still arrive in time: one frozen machine must not keep all others from hearing each other."""


class Pulse:
    """The maker of one peer's heartbeats, which signs and publishes them, and collects those of other peers."""

    def __init__(
        self, identity: Identity, transport: HivemindTransport, host: Driver, team: str = "", name: str = ""
    ) -> None:
        self._peer = host.peer
        self._host = host
        self._identity = identity
        self._transport = transport
        self._team, self._name = team, name
        self._sequence = 0
        self._beats = 0
        self.held_out: HeldOutLoss | None = None
        self._connected: set[str] = set()
        transport.dht.expect_answers_within(SHARE_FOR_SILENCE * host.peer.settings.timing.heartbeat_expiry)

    def known(self) -> Iterator[Event]:
        """Yield events for the heads that the run's archives have signed, for an amendment that this machine received
        from the organiser, and for earlier heads of this peer's log if the protocol remembers too few of them."""
        run, log, lineage = self._peer.settings.run, self._host.entries, self._peer.lineage
        signed = self._transport.runs.signed_heads_of(run)
        yield SignedHeadsSeen(signed, log.heads_at(signed.indices))
        if (given := self._transport.runs.amendment_of(run)) is not None:
            yield AmendmentSeen(given)
        last = lineage.known_from
        heads = log.heads(last - RECENT_ENTRIES, last) if lineage.is_short else []
        if len(heads) > 1:
            yield HeadsSeen(last, tuple(heads))

    async def beat(self) -> HeartbeatsSeen:
        """Publish this peer's heartbeat, and start connecting to new peers. Return an event with the heartbeats of
        peers heard lately, and the ids of training peers not heard within the expiry."""
        if self._beats % REFRESH_BEATS == 0:
            await self._transport.refresh_addresses()
        self._beats += 1
        await self.publish()
        run = self._peer.settings.run
        heartbeats = await self._transport.heartbeats(run)
        self._connect_to_new(heartbeats)
        self._measure()
        silences = self._transport.discovery_of(run).silences()
        expiry = self._peer.settings.timing.heartbeat_expiry
        trainers = [beat.peer for beat in heartbeats if beat.state not in (PeerState.ARCHIVING, PeerState.LEAVING)]
        unheard = frozenset(peer for peer in trainers if silences.get(peer, math.inf) > expiry) - {self._peer.me}
        return HeartbeatsSeen(tuple(beat for beat in heartbeats if beat.peer in silences), silences, unheard)

    def _connect_to_new(self, heartbeats: Sequence[Heartbeat]) -> None:
        """Start connecting to new peers; in a large swarm do nothing, since peers connect at their first message."""
        self._connected &= {heartbeat.peer for heartbeat in heartbeats}
        for stranger in heartbeats if len(heartbeats) <= EAGER else ():
            if stranger.peer not in self._connected | {self._peer.me}:
                self._connected.add(stranger.peer)
                self._host.start(self._connect(stranger))  # a task, since connecting to a dead peer takes long

    async def publish(self) -> None:
        """Publish a signed heartbeat if its content has changed, otherwise a beat."""
        run, heartbeat = self._peer.settings.run, self.heartbeat()
        discovery = self._transport.discovery_of(run)
        if discovery.is_news(heartbeat):
            await self._transport.publish(heartbeat.sign(self._identity), run)
        else:
            discovery.beat(heartbeat, {peer for peer, _ in self._peer.settled.electors})
        metrics.HEARTBEATS.inc()
        HEALTH.expect("heartbeat", self._peer.settings.timing.heartbeat_expiry, "no heartbeat was published")

    def heartbeat(self) -> Heartbeat:
        """Return a new heartbeat of this peer. Its sequence number is higher than any used before with this key."""
        before = self._transport.discovery_of(self._peer.settings.run).copies.highest
        self._sequence = next_sequence(self._sequence, before)
        peer, progress, log = self._peer, self._peer.trainer.progress, self._peer.settled
        goodbye = peer.goodbye
        ticket, revocations = self._transport.credentials(peer.settings.run)
        return Heartbeat(
            run=peer.settings.run,
            peer=peer.me,
            incarnation=peer.incarnation,
            sequence=self._sequence,
            lifetime=peer.settings.timing.heartbeat_expiry * 2,
            state=SHOWN_AS[peer.state],
            index=log.position.index,
            head=log.position.head,
            state_digest=peer.state_digest,
            lineage_tokens=log.lineage_tokens,
            inner_step=progress.inner_step if progress else 0,
            tokens_per_second=progress.tokens_per_second if progress else 0.0,
            loss=progress.loss if progress else None,
            speed=peer.trainer.speed,
            addresses=self._transport.addresses,
            roster_size=len(log.roster),
            held_out=self.held_out,
            endpoints=self._transport.endpoints,
            relays=self._transport.links.arranging.addresses,
            relayed=name_peers(peer.presence.reachability.relayed),
            unreached=name_peers(peer.presence.unreached),
            view=peer.view,
            leads=peer.presence.can_lead,
            trouble=printable(peer.hindrances.reported_reason),
            departure=goodbye.departure if goodbye else 0,
            farewell=goodbye.signature if goodbye else b"",
            ticket=ticket,
            revocations=revocations,
            team=self._team,
            name=self._name,
            amendment=log.amendment,
            proposed=peer.proposed_amendment,
            start=peer.start,
        )

    async def _connect(self, stranger: Heartbeat) -> None:
        if not await self._transport.connect(stranger.peer, stranger.addresses):
            self._connected.discard(stranger.peer)

    def _measure(self) -> None:
        metrics.OUTER_STEP.set(self._peer.log.position.index)
        metrics.LINEAGE_TOKENS.set(self._peer.log.lineage_tokens)
        metrics.RELAYED_PEERS.set(len(self._peer.presence.reachability.relayed))
        metrics.UNREACHED_PEERS.set(len(self._peer.presence.unreached))
        metrics.LIVE_PEERS.set(len(self._peer.membership.live(now())))
        progress = self._peer.trainer.progress
        metrics.TOKENS_PER_SECOND.set(progress.tokens_per_second if progress else 0)
        metrics.LOSS.set(math.nan if progress is None or progress.loss is None else progress.loss)
