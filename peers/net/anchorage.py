"""What the anchors of runs have signed, as far as this node knows; and how that gets around.

It goes the way of lists of revoked tickets: heartbeats name what their peer knows by a digest, and whoever knows
something else exchanges all of it with that peer. Nodes that remember runs tell newcomers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Annotated

from pydantic import Field

from peers.errors import RemoteProtocolError
from peers.net.asking import ASK_TIMEOUT, Asking, AskingNetwork
from peers.presence.heartbeat import Heartbeat
from peers.streams.channel import PeerUnreachableError, RefusalError
from peers.values.anchors import HEADS_BYTES, AnchorError, Anchors
from peers.values.manifest import SignedManifest
from peers.values.wire import RunId, Value, pack, unpack_from

logger = logging.getLogger(__name__)

ANCHORS = "anchors"  # name of the call; payload: an AnchorsRequest, answer: packed AnchoredHeads or nothing


class AnchorsRequest(Value):
    """Asks what a run's anchors have signed, and tells what its sender knows of it (empty: nothing)."""

    run: RunId
    known: Annotated[bytes, Field(strict=True, max_length=HEADS_BYTES)]


class Anchorage:
    """The anchors of those runs whose manifests are known here."""

    def __init__(self) -> None:
        self._known: dict[str, Anchors] = {}
        self._asking = Asking()
        self.on_news: Callable[[str, bytes], None] = lambda run, packed: None
        """Told of all that is known of a run's anchors whenever there is more of it, so that it is kept."""

    def learn(self, manifest: SignedManifest) -> None:
        """Take in which anchors a run has, and remember it until told to `forget`.

        A limit of our own would let whoever announces many runs push out what the anchors of another have signed.
        """
        self._known.setdefault(manifest.run_id, Anchors(manifest.run_id, manifest.anchors))

    def forget(self, run: str) -> None:
        """Forget a run and what its anchors have signed."""
        self._known.pop(run, None)

    def of(self, run: str) -> Anchors:
        """Return what is known of a run's anchors."""
        return self._known.get(run, Anchors(run))

    def take(self, run: str, packed: bytes) -> bool:
        """Take in what somebody knows of a run's anchors. Returns whether it is new here. Raises: AnchorError."""
        known = self.of(run)
        if run not in self._known or not packed:
            return False
        taken = self._known[run] = known.taking(packed)
        for key, index in taken.liars.items():
            if known.liars.get(key) != index:
                logger.error(
                    "run %s: the anchor %s has signed two heads at outer step %d: it is not believed from there on",
                    run,
                    key,
                    index,
                )
        if taken != known:
            self.on_news(run, taken.packed)
        return taken != known

    async def answer(self, sender: str, payload: bytes) -> bytes:
        """Answer an AnchorsRequest, and take in what it tells. Raises: RemoteProtocolError, RefusalError."""
        request = unpack_from(sender, AnchorsRequest, payload, HEADS_BYTES + 256)
        if request.run not in self._known:
            raise RefusalError(f"no run called {request.run} is known here")
        self._take_from(sender, request.run, request.known)
        return self.of(request.run).packed

    async def exchange(self, network: AskingNetwork, run: str, peer: str) -> None:
        """Tell a peer, or a node that remembers runs, what we know, and take in what it knows.

        Raises: PeerUnreachableError, RemoteProtocolError.
        """
        request = AnchorsRequest(run=run, known=self.of(run).packed)
        self._take_from(peer, run, await network.call(peer, ANCHORS, pack(request), ASK_TIMEOUT))

    async def exchange_with(self, network: AskingNetwork, run: str, peers: Iterable[str]) -> int:
        """Exchange with all of these. Returns how many answered."""

        async def exchange(peer: str) -> bool:
            try:
                await self.exchange(network, run, peer)
            except (PeerUnreachableError, RemoteProtocolError) as error:
                logger.debug("%s", error)
                return False
            return True

        return sum(await asyncio.gather(*map(exchange, peers)))

    def catch_up(self, network: AskingNetwork, run: str, heartbeats: Iterable[Heartbeat]) -> None:
        """Begin an exchange with one of the peers that know something else."""
        if not self.of(run).keys:
            return
        ours = self.of(run).digest
        others = [beat.peer for beat in heartbeats if beat.anchors not in (b"", ours) and beat.peer != network.peer_id]
        self._asking.begin(others, lambda peer: self.exchange(network, run, peer))

    def _take_from(self, peer: str, run: str, packed: bytes) -> None:
        """Raises: RemoteProtocolError."""
        try:
            self.take(run, packed)
        except AnchorError as error:
            raise RemoteProtocolError(peer, f"heads of the run's anchors: {error}") from error

    async def close(self) -> None:
        await self._asking.close()
