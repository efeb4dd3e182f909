"""Keeps one peer's log: every entry that it applies and, bit by bit, the headers of those before it came; and what
proves their annexes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress

from peers.errors import RemoteProtocolError
from peers.log.chain import Chain
from peers.log.folder import LogFolderError, RunLog
from peers.log.header import Header
from peers.log.payload import Payload
from peers.log.state import LogError
from peers.network.channel import PeerUnreachableError
from peers.protocol.effects import Apply
from peers.protocol.peer import Peer
from peers.transfer.donors import CHANCE, shuffled
from peers.transfer.download import PullTransport
from peers.transfer.headers import add_headers_before
from peers.transfer.proofs import MissingProofs
from peers.values.clock import now

logger = logging.getLogger(__name__)

FINISH_TIMEOUT = 10.0  # seconds


class Recorder:
    """Writes beside everything else, one entry after another."""

    def __init__(
        self,
        log: RunLog,
        peer: Peer,
        transport: PullTransport,
        start: Callable[[Coroutine[None, None, None]], asyncio.Task[None]],
        lies_on_disk: Callable[[Header], None] = lambda header: None,
    ) -> None:
        """`lies_on_disk` is told of every entry whose payload has been written there."""
        self._log = log
        self._peer = peer
        self._transport = transport
        self._start = start
        self._lies_on_disk = lies_on_disk
        self._proofs = MissingProofs(transport, log)
        self._turn = asyncio.Lock()
        self._last: asyncio.Task[None] | None = None
        self._trouble = ""
        """Why the disk did not take the last entry; empty: it did."""

    def add(self, made: Apply, state_digest: bytes | None, payload: Payload | None) -> None:
        """Write down an entry that was applied, with what proves it and its annex. The digest is that of the state
        after its cycle, if the entry is the last one of it to be applied."""
        self._last = self._start(self._add(made, state_digest, payload))

    async def follow(self, chain: Chain, end: int) -> None:
        """Take over what leads up to a snapshot."""
        async with self._turn:
            try:
                await asyncio.to_thread(self._log.follow, chain, end)
            except LogFolderError as error:
                logger.warning("the entries before %d are not kept: %s", end, error)

    async def finish(self) -> None:
        """Wait for what has been added, within seconds."""
        if self._last is not None:
            await asyncio.wait([self._last], timeout=FINISH_TIMEOUT)

    async def _add(self, made: Apply, state_digest: bytes | None, payload: Payload | None) -> None:
        header = made.header
        async with self._turn:
            try:
                await asyncio.to_thread(self._log.append, header, state_digest, payload, made.certificate)
                if made.proofs:
                    await asyncio.to_thread(self._log.keep_proofs, made.proofs)
            except LogFolderError as error:  # the run goes on all the same
                self._note(str(error), header.index)
            else:
                self._note("", header.index)
                if self._log.is_on_disk:
                    self._lies_on_disk(header)
            if self._log.first:
                await self._add_headers_before()
            await asyncio.to_thread(self._proofs.look)
        self._start(self._proofs.fetch(self._donors))

    def _note(self, trouble: str, index: int) -> None:
        """Say what keeps entries from being kept: once, again when it changes, and when it is over."""
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if trouble:
            logger.warning("entries are not kept, from %d on: %s", index, trouble)
        else:
            logger.warning("entries are kept again, from %d on", index)

    @property
    def _donors(self) -> list[str]:
        return list(self._peer.membership.live(now()))

    async def _add_headers_before(self) -> None:
        for donor in shuffled(self._transport, self._donors, CHANCE):
            with suppress(PeerUnreachableError, RemoteProtocolError, LogError, LogFolderError):
                if await add_headers_before(self._transport, donor, self._log):
                    return
