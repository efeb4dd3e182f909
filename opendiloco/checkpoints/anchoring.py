"""An archive's part as one of the run's anchors: it signs heads of the log that it keeps, and tells others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from opendiloco.checkpoints.run_folder import RunFolder
from opendiloco.run import Run
from peers.log.anchorer import Anchorer, AnchorFileError, CannotAnchorError
from peers.log.folder import LogFolder
from peers.net.transport import HivemindTransport
from peers.values.anchors import AnchoredHeads
from peers.values.clock import now
from peers.values.identity import Identity
from peers.values.signing import IdentityKeys
from peers.values.wire import pack

logger = logging.getLogger(__name__)

PAUSE = 60.0  # seconds at least between two heads that are signed
RETRY = 5.0  # seconds until peers are asked again that did not answer
ASKED = 32
"""Peers that are asked, before the first head, what this anchor has signed."""


class Anchoring:
    """Signs heads of an archived run's log, where this node is an anchor of the run."""

    def __init__(self, run: Run, identity: Identity, transport: HivemindTransport, folder: RunFolder) -> None:
        """What was signed last is in the folder. Where that can't be read nothing is signed, and a log line says so."""
        self._run = run.run_id
        self._me = identity.peer_id
        self._transport = transport
        self._anchorer: Anchorer | None = None
        self._next_at = 0.0
        self._has_heard = False
        if self._me in run.manifest.anchors:
            try:
                self._anchorer = Anchorer(self._run, self._me, IdentityKeys(identity), folder.path)
            except AnchorFileError as error:
                logger.error("run %s: no outer step is anchored: %s", self._run, error)

    async def sign(self, log: LogFolder, peers: Collection[str]) -> None:
        """Sign the newest head of `log` that was checked, at most once a minute. `peers` are those of the run."""
        if self._anchorer is None or log.first or now() < self._next_at or not (peers or self._has_heard):
            return
        if not await self._hears(peers):
            logger.info("run %s: nobody says what this anchor has signed before: it signs nothing yet", self._run)
            self._next_at = now() + RETRY
            return
        self._next_at = now() + PAUSE
        try:
            # An anchor that comes later in the manifest does not say what we may sign.
            known = self._transport.anchors_of(self._run).up_to(self._me)
            signed = await asyncio.to_thread(self._anchorer.sign, log, known)
        except (CannotAnchorError, AnchorFileError) as error:
            logger.warning("run %s: this anchor does not sign the log that is kept here: %s", self._run, error)
            return
        if signed is None:
            self._next_at = 0.0  # at once when there is something
            return
        self._transport.anchorage.take(self._run, pack(AnchoredHeads(heads=(signed,))))
        logger.info("run %s: outer step %d is anchored", self._run, signed.index)

    async def _hears(self, peers: Collection[str]) -> bool:
        """Whether a peer has told, since this node began, what the run's anchors have signed.

        A disk that was set back knows less of that than others do, and nobody believes an anchor that has signed two
        logs any more.
        """
        if not self._has_heard:
            asked = sorted(peers)[:ASKED]
            self._has_heard = await self._transport.anchorage.exchange_with(self._transport, self._run, asked) > 0
        return self._has_heard
