"""What the archives of runs have signed, as far as this node knows; and how that gets around.

An archive's heartbeat carries the head that it has signed last. Whoever begins asks the nodes that it knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from peers.errors import RemoteProtocolError
from peers.network.asking import ASK_TIMEOUT, AskingNetwork
from peers.network.channel import PeerUnreachableError, RefusalError
from peers.presence.heartbeat import Heartbeat
from peers.values.manifest import SignedManifest
from peers.values.signed_heads import SignedHead, SignedHeads, SignedHeadsError, pack_heads, unpack_heads
from peers.values.wire import RunId, Value, pack, unpack_from

logger = logging.getLogger(__name__)

SIGNED_HEADS = "signed-heads"  # name of the call; payload: a HeadsRequest, answer: packed heads
REQUEST_BYTES = 256


class HeadsRequest(Value):
    """A question: what have the archives of this run signed?"""

    run: RunId


class HeadStore:
    """The signed heads of those runs whose manifests are known here."""

    def __init__(self) -> None:
        self._known: dict[str, SignedHeads] = {}
        self.on_news: Callable[[str, bytes], None] = lambda run, packed: None
        """Called with all packed heads of a run whenever there are new ones, so that they are kept."""

    def learn(self, manifest: SignedManifest) -> None:
        """Take in which archives a run has, and remember them until told to `forget`.

        A limit of our own would let whoever announces many runs push out what the archives of another have signed.
        """
        self._known.setdefault(manifest.run_id, SignedHeads(manifest.run_id, manifest.archives))

    def forget(self, run: str) -> None:
        """Forget a run and what its archives have signed."""
        self._known.pop(run, None)

    def of(self, run: str) -> SignedHeads:
        """Return what is known of a run's signed heads."""
        return self._known.get(run, SignedHeads(run))

    def take(self, run: str, heads: Iterable[SignedHead]) -> None:
        """Take in heads of a run. Raises: SignedHeadsError."""
        if run not in self._known:
            return
        known = self._known[run]
        taken = self._known[run] = known.taking(heads)
        for key, index in taken.disbelieved.items():
            if known.disbelieved.get(key) != index:
                text = "run %s: outer step %d is signed in two ways: the archive %s is not believed from there on"
                logger.error(text, run, index, key)
        if taken is not known:
            self.on_news(run, pack_heads(taken.heads))

    def hear(self, run: str, heartbeats: Iterable[Heartbeat]) -> None:
        """Take in what archives say in their heartbeats that they have signed."""
        for beat in heartbeats:
            if beat.signed is not None:
                try:
                    self.take(run, [beat.signed])
                except SignedHeadsError as error:
                    logger.debug("a signed head in a heartbeat of %s: %s", beat.peer, error)

    async def answer(self, sender: str, payload: bytes) -> bytes:
        """Answer a HeadsRequest. Raises: RemoteProtocolError, RefusalError."""
        request = unpack_from(sender, HeadsRequest, payload, REQUEST_BYTES)
        if request.run not in self._known:
            raise RefusalError(f"no run called {request.run} is known here")
        return pack_heads(self.of(request.run).heads)

    async def ask(self, network: AskingNetwork, run: str, peers: Iterable[str]) -> int:
        """Ask these peers what a run's archives have signed. Return how many answered."""
        request = pack(HeadsRequest(run=run))

        async def ask(peer: str) -> bool:
            try:
                self.take(run, unpack_heads(await network.call(peer, SIGNED_HEADS, request, ASK_TIMEOUT)))
            except (PeerUnreachableError, RemoteProtocolError) as error:
                logger.debug("%s", error)
            except SignedHeadsError as error:
                logger.warning("dropped the signed heads that %s tells: %s", peer, error)
            else:
                return True
            return False

        return sum(await asyncio.gather(*map(ask, peers)))
