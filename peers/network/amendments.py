"""How an organiser's amendment comes to the peers of a run: whoever signs it calls some of them.

These tell all others in their heartbeats, until an entry of the log has it. Nodes that are no peers keep nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from peers.errors import RemoteProtocolError
from peers.network.asking import ASK_TIMEOUT, AskingNetwork
from peers.network.channel import PeerUnreachableError, RefusalError
from peers.values.manifest import Amendment, SignedManifest, newest
from peers.values.wire import RunId, Value, pack, unpack_from

logger = logging.getLogger(__name__)

AMENDMENTS = "amendments"  # name of the call; payload: an AmendmentRequest, answer: nothing
REQUEST_BYTES = 1024


class AmendmentRequest(Value):
    """Gives a peer an amendment of a run."""

    run: RunId
    amendment: Amendment


class Amendments:
    """The newest amendments that were given to this node, of those runs whose manifests are known here."""

    def __init__(self) -> None:
        self._organisers: dict[str, str] = {}
        self._given: dict[str, Amendment] = {}

    def learn(self, manifest: SignedManifest) -> None:
        """Take in who may amend a run, until told to `forget` it."""
        self._organisers[manifest.run_id] = manifest.organiser

    def forget(self, run: str) -> None:
        """Forget a run and its amendment."""
        self._organisers.pop(run, None)
        self._given.pop(run, None)

    def of(self, run: str) -> Amendment | None:
        """Return the newest amendment of a run that was given to this node."""
        return self._given.get(run)

    async def answer(self, sender: str, payload: bytes) -> bytes:
        """Take in an AmendmentRequest. Raises: RemoteProtocolError, RefusalError."""
        request = unpack_from(sender, AmendmentRequest, payload, REQUEST_BYTES)
        organiser = self._organisers.get(request.run)
        if organiser is None:
            raise RefusalError(f"no run called {request.run} is known here")
        if not request.amendment.is_signed(request.run, organiser):
            raise RefusalError(f"the organiser of {request.run} has not signed that amendment")
        known = self._given.get(request.run)
        if known is not None and known.number == request.amendment.number and known != request.amendment:
            raise RefusalError(f"{known} was given here already")
        if newest(known, request.amendment) is not known:
            self._given[request.run] = request.amendment
            logger.info("run %s: its organiser gives us %s", request.run, request.amendment)
        return b""


async def give(network: AskingNetwork, run: str, amendment: Amendment, peers: Iterable[str]) -> int:
    """Give an amendment to these peers. Returns how many took it."""
    request = pack(AmendmentRequest(run=run, amendment=amendment))

    async def tell(peer: str) -> bool:
        try:
            await network.call(peer, AMENDMENTS, request, ASK_TIMEOUT)
        except (PeerUnreachableError, RemoteProtocolError) as error:
            logger.debug("%s", error)
            return False
        return True

    return sum(await asyncio.gather(*map(tell, peers)))
