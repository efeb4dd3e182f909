"""Discovery of a run's peers: a new peer finds the first few in the DHT, and asks these for the others."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from peers import metrics
from peers.errors import LocalProtocolError, RemoteProtocolError
from peers.metrics import HEALTH
from peers.network.channel import PeerUnreachableError
from peers.presence.beats import Beats
from peers.presence.calls import PAGE, WHO
from peers.presence.copies import Copies
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.meeting_place import MeetingPlace
from peers.values.system import cancel_and_wait, now, start_task
from peers.values.wire import pack

if TYPE_CHECKING:
    from peers.network.transport import HivemindTransport

logger = logging.getLogger(__name__)

ANSWER_SHARE = 0.3  # fraction of the heartbeat expiry within which a peer must answer a call
FIRST_LIMIT = 2.0  # seconds that a new peer waits for its first answers, at most
LOOK_LIMIT = 5.0  # seconds for which a node outside the run asks peers for more peers, at most
ASK_SHARE, LOOK_SHARE = 0.5, 0.1
"""Fraction of a heartbeat's lifetime between two requests for more peers: by a peer of the run, to which others also
send beats; and by a node outside the run."""
ASKED_FIRST = 3  # number of peers asked by the first request for more peers
PAGES_LIMIT = 32  # pages of heartbeats requested from one peer in a row, at most
NO_NODE = "no node of the DHT takes this peer's heartbeats, so newcomers cannot find it; check its internet connection"


class PeerDiscovery:
    """The known peers of one run, and the calls that send them beats and ask them for more peers."""

    def __init__(self, run: str, network: HivemindTransport) -> None:
        self._network = network
        self.beats = Beats(network.peer_id, run)
        self.meeting_place = MeetingPlace(self.beats)
        self._run = run
        self._published = 0
        self._voters: Collection[str] = ()
        self._calling: set[asyncio.Task[None]] = set()
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = -float("inf")
        self._has_met = False
        self._connected: set[str] = set()

    @property
    def copies(self) -> Copies:
        """The record of heartbeats that other processes have signed with this peer's own key."""
        return self.beats.copies

    @property
    def is_member(self) -> bool:
        """True for a peer of the run; False for a node that only looks for the run's peers."""
        return self.beats.own is not None

    # Our own heartbeats ---------------------------------------------------------------------------------------
    def is_news(self, heartbeat: Heartbeat) -> bool:
        """Return True if our new heartbeat must be signed and published; False if a beat is enough."""
        is_to_be_stored = self.meeting_place.is_to_be_stored(now(), time.time())
        return is_to_be_stored or self.beats.is_news(heartbeat, now())

    def beat(self, heartbeat: Heartbeat, voters: Collection[str] = ()) -> None:
        """Start sending a beat to the other peers, or in a large swarm to some of them, which include the `voters`.
        Before our first heartbeat, send none."""
        self.beats.go_on(heartbeat, now())
        self._voters = voters
        self._call_due()

    async def publish(self, signed: bytes) -> bool:
        """Start sending our signed heartbeat to other peers and, when due, store it in the DHT. Return False if the
        storing failed. If this peer is leaving, also wait until the sending has ended.

        Raises: LocalProtocolError when the heartbeat is no newer than the one before.
        """
        heartbeat = Heartbeat.verify(signed, self._run)
        if heartbeat.sequence <= self._published:
            raise LocalProtocolError(f"heartbeat {heartbeat.sequence} does not follow {self._published}")
        self._published = heartbeat.sequence
        is_farewell = heartbeat.state is PeerState.LEAVING
        is_for_dht = is_farewell or self.meeting_place.is_to_be_stored(now(), time.time())
        self.beats.say(signed, now())
        self._call_due()
        is_stored = True
        if is_for_dht:
            self.meeting_place.stored(now())
            is_stored = await self._network.dht.store_heartbeat(heartbeat, signed)
            if is_stored:
                HEALTH.recovered(f"dht {self._run}")
            else:
                HEALTH.failing(f"dht {self._run}", NO_NODE)
        if is_farewell:
            await asyncio.gather(*self._calling)
            self._call_due()  # calls the peers that were busy with an earlier call
            await asyncio.gather(*self._calling)
        return is_stored

    def _call_due(self) -> None:
        self.beats.choose(self._voters, now())
        for peer in self.beats.audience.due(now()):
            task = start_task(self._call_one(peer))
            self._calling.add(task)
            task.add_done_callback(self._calling.discard)

    async def _call_one(self, peer: str) -> None:
        if self._network.links.port:  # open a link, since many calls to this peer will follow
            self._network.links.prepare(peer)
        timeout = ANSWER_SHARE * self.beats.lifetime / 2
        try:
            while call := self.beats.call_for(peer):
                answer = await self._network.call(peer, call.name, call.payload, timeout)
                if not self.beats.answered(peer, call, answer, now(), time.time()):
                    break
        except asyncio.CancelledError:
            self.beats.failed(peer, now())  # otherwise the cancelled call would count as under way for ever
            raise
        except PeerUnreachableError as error:
            logger.debug("%s", error)
            self.beats.failed(peer, now())
        except RemoteProtocolError as error:
            metrics.DROPPED.labels("heartbeat").inc()
            logger.info("dropped an invalid answer to a beat: %s", error)

    async def close(self) -> None:
        HEALTH.forget(f"dht {self._run}")
        await cancel_and_wait(*self._calling, *([self._asking] if self._asking else []))

    # Known peers ----------------------------------------------------------------------------------------------
    async def heartbeats(self) -> list[Heartbeat]:
        """Return the newest heartbeat of every known peer, including our own, sorted by peer id."""
        if self.meeting_place.is_search_due(now()):
            await self._search()
        if self.beats.others(now()):
            await self._ask_around()
        self.beats.see_out(time.time())
        return self.beats.heartbeats(now())

    def silences(self) -> dict[str, float]:
        """Return the seconds since each other peer was last heard, by peer id. A peer is left out if no sign of it
        arrived within the lifetime of its heartbeats, which is twice the expiry."""
        return self.beats.silences(now())

    async def _search(self) -> None:
        """Search the DHT for heartbeats of the run's peers, and store the valid heartbeats."""
        self.meeting_place.searched(now())
        self.beats.store.forget(time.time())
        for signed in await self._network.dht.find_heartbeats(self._run):
            try:
                self.beats.found(signed, now(), time.time())
            except RemoteProtocolError as error:
                metrics.DROPPED.labels("heartbeat").inc()
                logger.info("dropped an invalid heartbeat from the DHT: %s", error)

    # Requests for more peers ----------------------------------------------------------------------------------
    async def _ask_around(self) -> None:
        """Ask some known peers for more peers. A new peer waits for the first answers, since the DHT names only a
        few peers, and a joiner should choose its donor among all peers."""
        if not self.is_member:
            await self._look(1 if self._asked_at > 0.0 else ASKED_FIRST)
        elif not self._has_met:
            self._has_met = True
            await self._meet()
        elif self._is_due(ASK_SHARE) and (self._asking is None or self._asking.done()):
            self._asking = start_task(self._ask(1))

    def _is_due(self, share: float) -> bool:
        return now() - self._asked_at >= share * self.beats.lifetime

    async def _look(self, count: int) -> None:
        """Connect to `count` known peers, and ask them for more peers. Used by a node outside the run."""
        if not self._is_due(LOOK_SHARE):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_LIMIT):
                for peer in self._sample(count):
                    kept = self.beats.store.get(peer)
                    is_new = peer not in self._connected
                    if kept and is_new and await self._network.connect(peer, kept.heartbeat.addresses):
                        self._connected.add(peer)
                await self._ask(count)

    async def _meet(self) -> None:
        """Call the first known peers, ask some for all other peers, and call those, in FIRST_LIMIT seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LIMIT):
                self._call_due()
                await self._ask(ASKED_FIRST)
                self._call_due()
                if self._calling:
                    await asyncio.wait(self._calling)

    def _sample(self, count: int) -> list[str]:
        """Return up to `count` other peers, chosen at random among the peers heard lately, if any, else among all."""
        others, silences = self.beats.others(now()), self.silences()
        among = [peer for peer in others if peer in silences] or others
        return random.sample(among, min(count, len(among)))

    async def _ask(self, count: int) -> None:
        """Ask `count` peers for heartbeats of peers unknown to us, or for all heartbeats if we are not in the run."""
        known = self.beats.others(now()) if self.is_member else ()
        answers = await asyncio.gather(*(self._ask_one(peer, {*known}) for peer in self._sample(count)))
        if any(answers):
            self._asked_at = now()

    async def _ask_one(self, peer: str, known: set[str]) -> bool:
        """Ask a peer, page after page, for heartbeats of peers not `known`. Return True if the peer answered."""
        timeout = ANSWER_SHARE * self.beats.lifetime / 2
        try:
            for _ in range(PAGES_LIMIT):
                packed = await self._network.call(peer, WHO, pack(self.beats.request(known)), timeout)
                if not packed:
                    return False
                found = self.beats.take_page(peer, packed, now(), time.time())
                known |= found
                if len(found) < PAGE:
                    break
        except PeerUnreachableError as error:
            logger.debug("%s", error)
            return False
        except RemoteProtocolError as error:
            metrics.DROPPED.labels("heartbeat").inc()
            logger.info("dropped an invalid page of heartbeats from a peer: %s", error)
            return False
        return True
