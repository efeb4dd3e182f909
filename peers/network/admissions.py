"""Admission to all runs of which this node has the manifests, and the spreading of lists of revoked tickets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from typing import Annotated, TypeVar

from pydantic import Field

from peers.errors import AdmissionError, RemoteProtocolError
from peers.network.asking import ASK_TIMEOUT, Asking, AskingNetwork
from peers.network.channel import RefusalError
from peers.network.daemon import NETWORK_ERRORS
from peers.presence.admission import RunAdmission
from peers.presence.heartbeat import Heartbeat
from peers.values.manifest import SignedManifest
from peers.values.tickets import LIST_BYTES, TicketError
from peers.values.wire import RunId, Value, pack, unpack_from

logger = logging.getLogger(__name__)

REVOCATIONS = "revocations"  # name of the call; payload: a RevocationsRequest, answer: a packed Revocations or nothing
STRANGERS_LIMIT = 1000  # runs of others that a node remembers the organisers of
SEEK_AGAIN = 600.0  # seconds after which the manifest of a run is looked for again

Thing = TypeVar("Thing")


class RevocationsRequest(Value):
    """Asks for the list of a run's revoked tickets, and tells the one that its sender has (empty: none)."""

    run: RunId
    known: Annotated[bytes, Field(strict=True, max_length=LIST_BYTES)]


class Admissions:
    """Admission to every run that this node knows. A run whose manifest is not known here is taken for an open one, and
    its manifest is looked for, one at a time."""

    def __init__(self) -> None:
        self._ours: dict[str, RunAdmission] = {}
        self._others: OrderedDict[str, RunAdmission] = OrderedDict()
        self._asking = Asking()
        self._open: OrderedDict[str, None] = OrderedDict()
        self._sought: OrderedDict[str, float] = OrderedDict()
        self._seeking: asyncio.Task[None] | None = None
        self.find: Callable[[str], Coroutine[None, None, SignedManifest | None]] | None = None
        """Looks for the manifest of a run in the DHT."""
        self.on_revoked: Callable[[str, bytes], None] = lambda run, packed: None
        """Told of each newer list of revoked tickets, so that it is kept."""

    def learn(self, manifest: SignedManifest, is_ours: bool = True) -> None:
        """Take in who may join a run. Of runs that are not `is_ours`, only the newest are remembered."""
        run = manifest.run_id
        if not manifest.is_by_invitation:
            remember(self._open, run, None)
            return
        if run in self._ours:
            return
        admission = self._others.pop(run, None) or RunAdmission(run, manifest.organiser)
        if is_ours:
            self._ours[run] = admission
        else:
            remember(self._others, run, admission)

    def forget(self, run: str) -> None:
        """Forget who may join a run."""
        for known in (self._ours, self._others, self._open):
            known.pop(run, None)

    def of(self, run: str) -> RunAdmission | None:
        """Return the admission to a run; None: it is open, as far as is known here."""
        return self._ours.get(run) or self._others.get(run)

    def check(self, run: str, peer: str) -> None:
        """Raises: RefusalError unless the peer may take part in the run."""
        admission = self.of(run)
        if admission is not None:
            try:
                admission.check(peer, time.time())
            except AdmissionError as error:
                raise RefusalError(str(error)) from error

    def admits(self, heartbeat: Heartbeat, wall: float) -> bool:
        """Whether a peer may say that it is in its run."""
        admission = self.of(heartbeat.run)
        if admission is None:
            self._look_up(heartbeat.run)
        return admission is None or not admission.admit(heartbeat.peer, heartbeat.ticket, wall)

    def _look_up(self, run: str) -> None:
        """Begin to look for the manifest of a run that is not known here, unless another one is looked for."""
        now = time.monotonic()
        is_busy = self._seeking is not None and not self._seeking.done()
        if self.find is None or is_busy or run in self._open or now - self._sought.get(run, -SEEK_AGAIN) < SEEK_AGAIN:
            return
        remember(self._sought, run, now)
        self._seeking = asyncio.create_task(self._seek(run, self.find))

    async def _seek(self, run: str, find: Callable[[str], Coroutine[None, None, SignedManifest | None]]) -> None:
        try:
            manifest = await find(run)
        except NETWORK_ERRORS as error:
            logger.debug("the manifest of %s was not found: %r", run, error)
            return
        if manifest is not None:
            self.learn(manifest, is_ours=False)

    # Revoked tickets ------------------------------------------------------------------------------------------
    def revoke(self, run: str, packed: bytes) -> bool:
        """Take in a list of revoked tickets. Returns whether it is new here. Raises: TicketError."""
        admission = self.of(run)
        is_new = admission is not None and admission.revoke(packed)
        if is_new:
            logger.info("run %s: its organiser has revoked tickets", run)
            self.on_revoked(run, packed)
        return is_new

    async def answer(self, sender: str, payload: bytes) -> bytes:
        """Answer a RevocationsRequest, and take in what it tells. Raises: RemoteProtocolError, RefusalError."""
        request = unpack_from(sender, RevocationsRequest, payload, LIST_BYTES + 256)
        admission = self.of(request.run)
        if admission is None:
            raise RefusalError(f"no run by invitation called {request.run} is known here")
        self._take_in(sender, request.run, request.known)
        return pack(admission.revocations) if admission.revocations else b""

    async def exchange(self, network: AskingNetwork, run: str, peer: str) -> None:
        """Tell a peer, or a node that remembers runs, of the newest list, and take in its own if that is newer.

        Raises: PeerUnreachableError, RemoteProtocolError.
        """
        admission = self.of(run)
        if admission is None:
            return
        known = pack(admission.revocations) if admission.revocations else b""
        answer = await network.call(peer, REVOCATIONS, pack(RevocationsRequest(run=run, known=known)), ASK_TIMEOUT)
        self._take_in(peer, run, answer)

    def _take_in(self, peer: str, run: str, packed: bytes) -> None:
        """Take in the list that a peer has told us, if it has any. Raises: RemoteProtocolError."""
        if packed:
            try:
                self.revoke(run, packed)
            except TicketError as error:
                raise RemoteProtocolError(peer, f"a list of revoked tickets: {error}") from error

    def catch_up(self, network: AskingNetwork, run: str, heartbeats: Iterable[Heartbeat]) -> None:
        """Begin to ask one of the peers that know of later revocations. Whoever has none to give is asked no more for a
        while."""
        admission = self.of(run)
        if admission is None:
            return
        ahead = [
            beat.peer for beat in heartbeats if beat.revocations > admission.number and beat.peer != network.peer_id
        ]
        self._asking.begin(ahead, lambda peer: self.exchange(network, run, peer))

    async def close(self) -> None:
        await self._asking.close()
        if self._seeking is not None:
            self._seeking.cancel()
            await asyncio.gather(self._seeking, return_exceptions=True)


def remember(known: OrderedDict[str, Thing], run: str, what: Thing) -> None:
    """Note something about a run of others; only the newest are remembered."""
    known[run] = what
    known.move_to_end(run)
    if len(known) > STRANGERS_LIMIT:
        known.popitem(last=False)
