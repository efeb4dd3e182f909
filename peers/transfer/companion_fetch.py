"""Getting a companion state: from one peer, beside the first training, so that nobody waits for it.

Nothing vouches for it but that peer; the training side sees whether it is of use. Who gets none goes on without.
"""

from __future__ import annotations

import asyncio
import logging
import random

from peers.errors import RemoteProtocolError
from peers.protocol.peer import Peer
from peers.streams.channel import PeerRefusedError, PeerUnreachableError
from peers.transfer.companion import COMPANION, CompanionOffer, CompanionRequest, Host
from peers.transfer.donors import CHANCE, shuffled
from peers.transfer.download import Download, DownloadError, PullTransport, Wanted
from peers.transfer.memory_file import MemoryFile
from peers.transfer.state_chunks import StateChunking, chunks_of
from peers.transfer.storage import Storage
from peers.values.wire import DIGEST_BYTES, pack, unpack_from
from peers.values.workload import CompanionState, SnapshotError

logger = logging.getLogger(__name__)

DONORS = 2  # that are tried, one after the other
OFFER_TIMEOUT = 60.0  # seconds for one answer
PAUSE = 5.0  # seconds until a donor that said no is asked again
PATIENCE = 300.0  # seconds for which it is; then another
FETCH_TIMEOUT = 3600.0  # seconds for all of it; then our own is as good
RANGE = 8  # chunks asked for at once


class CompanionJoiner:
    """Fetches another peer's companion state once, if this one is new to a run that has begun."""

    def __init__(
        self,
        peer: Peer,
        state: CompanionState,
        transport: PullTransport,
        storage: Storage,
        host: Host,
        chance: random.Random = CHANCE,
    ) -> None:
        """`chance` decides who of those that are reached well is asked."""
        self._peer = peer
        self._state = state
        self._transport = transport
        self._storage = storage
        self._host = host
        self._chance = chance
        self._has_trained = False

    def training_begins(self, index: int) -> None:
        """If it is the first one here, and in the middle of the run, fetch what another has learned so far."""
        is_first, self._has_trained = not self._has_trained, True
        if is_first and index:
            self._host.start(self._fetch_from_others())

    async def _fetch_from_others(self) -> None:
        """From one of those who took the last outer step, or another one; what fails leaves everything as it is."""
        others = [peer for peer in self._peer.log.roster if peer != self._peer.me and self._peer.is_live(peer)]
        for donor in shuffled(self._transport, others, self._chance)[:DONORS]:
            try:
                memory = await self._fetch(donor, await self._ask(donor))
                await self._state.restore(memory.data)
            except (PeerUnreachableError, RemoteProtocolError, SnapshotError, OSError) as error:
                logger.warning("no companion state from %s: %s", donor, error)
            else:
                logger.info("the worker goes on with the companion state of %s", donor)
                return
        logger.warning("nobody gave a companion state that is of use: the worker goes on with a fresh one")

    async def _ask(self, donor: str) -> tuple[bytes, tuple[bytes, ...]]:
        """The digest of a donor's copy, and those of its chunks, as soon as it has one.

        Raises: SnapshotError, PeerUnreachableError, RemoteProtocolError.
        """
        request = pack(CompanionRequest(run=self._peer.settings.run, digest=None, first=0, last=0))
        limit = DIGEST_BYTES * StateChunking(self._state.size).count
        clock = asyncio.get_running_loop().time
        give_up = clock() + PATIENCE
        while True:
            try:
                packed, digests = await self._transport.pull(donor, COMPANION, request, limit, OFFER_TIMEOUT)
                break
            except PeerRefusedError as error:
                if clock() + PAUSE > give_up:
                    raise SnapshotError(f"not within {PATIENCE:g} s: {error.reason}") from error
            await asyncio.sleep(PAUSE)
        offer = unpack_from(donor, CompanionOffer, packed)
        if offer.bytes != self._state.size:
            raise RemoteProtocolError(donor, f"its companion state has {offer.bytes} bytes, not {self._state.size}")
        return offer.digest, chunks_of(donor, COMPANION, digests, offer.bytes, offer.digest)

    async def _fetch(self, donor: str, offered: tuple[bytes, tuple[bytes, ...]]) -> MemoryFile:
        """The copy with these digests. Raises: SnapshotError; OSError without room."""
        run, (digest, digests) = self._peer.settings.run, offered
        wanted = Wanted(
            name=COMPANION,
            digests=digests,
            bounds=StateChunking(self._state.size).bounds,
            request=lambda first, last: pack(CompanionRequest(run=run, digest=digest, first=first, last=last)),
            range=RANGE,
        )
        memory = await asyncio.to_thread(self._storage.snapshot, self._state.size)
        try:
            async with asyncio.timeout(FETCH_TIMEOUT):
                await Download(self._transport, wanted, memory.data).run([donor])
        except DownloadError as error:
            raise SnapshotError(str(error)) from error
        except TimeoutError:
            raise SnapshotError(f"it takes longer than {FETCH_TIMEOUT:g} s") from None
        return memory
