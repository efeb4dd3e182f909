"""The runs whose manifests this node has: their admission, and what their organisers and archives have signed since.

Peers exchange lists of revoked tickets and signed heads when a heartbeat names newer ones. An organiser gives an
amendment to some peers.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, TypeAlias, TypeVar

from pydantic import Field

from peers import metrics
from peers.errors import AdmissionError, RemoteProtocolError
from peers.network.channel import PeerUnreachableError, RefusalError
from peers.network.daemon import NETWORK_ERRORS
from peers.presence.admission import RunAdmission
from peers.presence.heartbeat import Heartbeat
from peers.values.manifest import Amendment, SignedManifest, newest
from peers.values.signed_heads import SignedHead, SignedHeads, SignedHeadsError, pack_heads, unpack_heads
from peers.values.system import cancel_and_wait, start_task
from peers.values.tickets import LIST_BYTES, TicketError
from peers.values.wire import RunId, Value, pack, unpack_from

logger = logging.getLogger(__name__)

ASK_TIMEOUT = 10.0  # seconds for one peer's answer to a small question
PAUSE = 30.0  # seconds for which a peer is not asked again
REVOCATIONS = "revocations"  # name of the call; payload: a _RevocationsRequest, answer: a packed Revocations or nothing
STRANGERS_LIMIT = 1000  # runs of others whose organisers a node remembers
SEEK_AGAIN = 600.0  # seconds after which the manifest of a run is searched for again
AMENDMENTS = "amendments"  # name of the call; payload: an _AmendmentRequest, answer: nothing
REQUEST_BYTES = 1024  # of either request, at most: a run id and an amendment
SIGNED_HEADS = "signed-heads"  # name of the call; payload: a _HeadsRequest, answer: packed heads

Call: TypeAlias = Callable[[str, str, bytes, float], Awaitable[bytes]]
"""(peer, name, payload, timeout) -> answer: `HivemindTransport.call`."""
Thing = TypeVar("Thing")


class _RevocationsRequest(Value):
    """A request for the list of a run's revoked tickets, with the list that its sender has (empty: none)."""

    run: RunId
    known: Annotated[bytes, Field(strict=True, max_length=LIST_BYTES)]


class Admissions:
    """Admission to every run that this node knows.

    A run without a known manifest counts as open, and its manifest is searched for, one at a time.
    """

    def __init__(self) -> None:
        self._ours: dict[str, RunAdmission] = {}
        self._others: OrderedDict[str, RunAdmission | None] = OrderedDict()  # None: an open run
        self._asked: dict[str, float] = {}
        self._asking: asyncio.Task[None] | None = None
        self._sought: OrderedDict[str, float] = OrderedDict()
        self._seeking: asyncio.Task[None] | None = None
        self.find: Callable[[str], Awaitable[SignedManifest | None]] | None = None
        """Searches the DHT for the manifest of a run."""
        self.on_revoked: Callable[[str, bytes], None] = lambda run, packed: None
        """Called with each newer list of revoked tickets, so that it is kept."""

    def learn(self, manifest: SignedManifest, is_ours: bool = True) -> None:
        """Take in the admission to a run. Of runs that are not `is_ours`, only the newest are remembered."""
        run = manifest.run_id
        if not manifest.is_by_invitation:
            _remember(self._others, run, None)
            return
        if run in self._ours:
            return
        admission = self._others.pop(run, None) or RunAdmission(run, manifest.organiser)
        if is_ours:
            self._ours[run] = admission
        else:
            _remember(self._others, run, admission)

    def forget(self, run: str) -> None:
        self._ours.pop(run, None)
        self._others.pop(run, None)

    def of(self, run: str) -> RunAdmission | None:
        """Return the admission to a run; None if it is open, as far as this node knows."""
        return self._ours.get(run) or self._others.get(run)

    def check(self, run: str, peer: str) -> None:
        """Raise RefusalError unless the peer may take part in the run."""
        admission = self.of(run)
        if admission is not None:
            try:
                admission.check(peer, time.time())
            except AdmissionError as error:
                raise RefusalError(str(error)) from error

    def admits(self, heartbeat: Heartbeat, wall: float) -> bool:
        """Return whether a peer is admitted to the run that its heartbeat names."""
        admission = self.of(heartbeat.run)
        if admission is None:
            self._look_up(heartbeat.run)
        return admission is None or not admission.admit(heartbeat.peer, heartbeat.ticket, wall)

    def _look_up(self, run: str) -> None:
        """Begin to search for the manifest of an unknown run, unless another search is under way."""
        now = time.monotonic()
        was_sought = now - self._sought.get(run, -SEEK_AGAIN) < SEEK_AGAIN
        if self.find is None or _is_busy(self._seeking) or run in self._others or was_sought:
            return
        _remember(self._sought, run, now)
        self._seeking = start_task(self._seek(run, self.find(run)))

    async def _seek(self, run: str, finding: Awaitable[SignedManifest | None]) -> None:
        try:
            manifest = await finding
        except NETWORK_ERRORS as error:
            logger.debug("the manifest of %s was not found: %r", run, error)
            return
        if manifest is not None:
            self.learn(manifest, is_ours=False)

    # Revoked tickets ------------------------------------------------------------------------------------------
    async def answer(self, sender: str, payload: bytes) -> bytes:
        """Answer a _RevocationsRequest, and take in its list. Raises: RemoteProtocolError, RefusalError."""
        request = unpack_from(sender, _RevocationsRequest, payload, LIST_BYTES + 256)
        admission = self.of(request.run)
        if admission is None:
            raise RefusalError(f"no run by invitation called {request.run} is known here")
        self._take_in(sender, request.run, request.known)
        return pack(admission.revocations) if admission.revocations else b""

    async def exchange(self, call: Call, run: str, peer: str) -> None:
        """Send our newest list to a peer, or to a node that remembers runs, and take in its list if that is newer.

        Raises: PeerUnreachableError, RemoteProtocolError.
        """
        admission = self.of(run)
        if admission is None:
            return
        known = pack(admission.revocations) if admission.revocations else b""
        answer = await call(peer, REVOCATIONS, pack(_RevocationsRequest(run=run, known=known)), ASK_TIMEOUT)
        self._take_in(peer, run, answer)

    def _take_in(self, peer: str, run: str, packed: bytes) -> None:
        """Take in a peer's list, if it has sent any. Raises: RemoteProtocolError."""
        admission = self.of(run)
        try:
            if packed and admission is not None and admission.revoke(packed):
                logger.info("run %s: its organiser has revoked tickets", run)
                self.on_revoked(run, packed)
        except TicketError as error:
            raise RemoteProtocolError(peer, f"its list of revoked tickets is not valid: {error}") from error

    def catch_up(self, call: Call, run: str, heartbeats: Iterable[Heartbeat]) -> None:
        """Begin to ask a peer that knows later revocations, unless another one is being asked. A peer is asked again
        only after a while."""
        admission = self.of(run)
        if admission is None or _is_busy(self._asking):
            return
        now = time.monotonic()
        self._asked = {peer: at for peer, at in self._asked.items() if now - at < PAUSE}
        ahead = {beat.peer for beat in heartbeats if beat.revocations > admission.number} - self._asked.keys()
        if ahead:
            peer = random.choice(sorted(ahead))
            self._asked[peer] = now
            self._asking = start_task(self._ask(call, run, peer))

    async def _ask(self, call: Call, run: str, peer: str) -> None:
        try:
            await self.exchange(call, run, peer)
        except PeerUnreachableError as error:
            logger.debug("%s", error)
        except RemoteProtocolError as error:
            metrics.DROPPED.labels("message").inc()
            logger.info("ignored the answer of %s", error)

    async def close(self) -> None:
        await cancel_and_wait(*filter(None, (self._asking, self._seeking)))


def _is_busy(task: asyncio.Task[None] | None) -> bool:
    return task is not None and not task.done()


def _remember(known: OrderedDict[str, Thing], run: str, value: Thing) -> None:
    """Store a value for another's run; only the newest runs are remembered."""
    known[run] = value
    known.move_to_end(run)
    if len(known) > STRANGERS_LIMIT:
        known.popitem(last=False)


class _AmendmentRequest(Value):
    """An amendment for a run, given to a peer."""

    run: RunId
    amendment: Amendment


class _HeadsRequest(Value):
    """A request for the heads that the archives of this run have signed."""

    run: RunId


@dataclass
class _KnownRun:
    """A run: its organiser, the heads that its archives have signed, and the newest amendment given to this node."""

    organiser: str
    heads: SignedHeads
    amendment: Amendment | None = None


class KnownRuns:
    """Knowledge about the runs whose manifests this node has, until `forget`.

    All of these runs are remembered: with a limit, a stranger who announces many runs would displace the signed heads
    of others.
    """

    def __init__(self) -> None:
        self.admissions = Admissions()
        """Admission to each run."""
        self._known: dict[str, _KnownRun] = {}
        self.on_heads: Callable[[str, bytes], None] = lambda run, packed: None
        """Called with all packed heads of a run whenever there are new ones, so that they are kept."""

    def learn(self, manifest: SignedManifest) -> None:
        run = manifest.run_id
        self.admissions.learn(manifest)
        self._known.setdefault(run, _KnownRun(manifest.organiser, SignedHeads(run, manifest.archives)))

    def forget(self, run: str) -> None:
        self.admissions.forget(run)
        self._known.pop(run, None)

    @property
    def answers(self) -> dict[str, Callable[[str, bytes], Awaitable[bytes]]]:
        """The handlers of the calls about these runs, by the call's name."""
        return {
            REVOCATIONS: self.admissions.answer,
            SIGNED_HEADS: self.answer_heads,
            AMENDMENTS: self.answer_amendment,
        }

    def _find(self, run: str) -> _KnownRun:
        """Return a known run. Raises: RefusalError."""
        if run not in self._known:
            raise RefusalError(f"no run called {run} is known here")
        return self._known[run]

    # Amendments -----------------------------------------------------------------------------------------------
    def amendment_of(self, run: str) -> Amendment | None:
        """Return the newest amendment that the run's organiser has given us to put into the log."""
        return self._known[run].amendment if run in self._known else None

    async def answer_amendment(self, sender: str, payload: bytes) -> bytes:
        """Take in an _AmendmentRequest. Raises: RemoteProtocolError, RefusalError."""
        request = unpack_from(sender, _AmendmentRequest, payload, REQUEST_BYTES)
        known, amendment = self._find(request.run), request.amendment
        if not amendment.is_signed(request.run, known.organiser):
            raise RefusalError(f"the organiser of {request.run} has not signed that amendment")
        before = known.amendment
        if before is not None and before.number == amendment.number and before != amendment:
            raise RefusalError(f"{before} was given here already")
        if newest(before, amendment) is not before:
            known.amendment = amendment
            logger.info("run %s: its organiser has sent %s", request.run, amendment)
        return b""

    # Signed heads ---------------------------------------------------------------------------------------------
    def signed_heads_of(self, run: str) -> SignedHeads:
        return self._known[run].heads if run in self._known else SignedHeads(run)

    def take_heads(self, run: str, heads: Iterable[SignedHead]) -> None:
        """Take in heads of a run. Raises: SignedHeadsError."""
        if run not in self._known:
            return
        known = self._known[run].heads
        taken = self._known[run].heads = known.taking(heads)
        for key, index in taken.disbelieved.items():
            if known.disbelieved.get(key) != index:
                text = "run %s: outer step %d is signed in two ways: the archive %s is not believed from there on"
                logger.error(text, run, index, key)
        if taken is not known:
            self.on_heads(run, pack_heads(taken.heads))

    def hear_heads(self, run: str, heartbeats: Iterable[Heartbeat]) -> None:
        """Take in the signed heads in archives' heartbeats."""
        for beat in heartbeats:
            if beat.signed is not None:
                try:
                    self.take_heads(run, [beat.signed])
                except SignedHeadsError as error:
                    logger.debug("a signed head in a heartbeat of %s: %s", beat.peer, error)

    async def answer_heads(self, sender: str, payload: bytes) -> bytes:
        """Answer a _HeadsRequest. Raises: RemoteProtocolError, RefusalError."""
        request = unpack_from(sender, _HeadsRequest, payload, REQUEST_BYTES)
        return pack_heads(self._find(request.run).heads.heads)

    async def ask_for_heads(self, call: Call, run: str, peers: Iterable[str]) -> int:
        """Ask these peers for the heads that a run's archives have signed. Return how many have answered."""
        taken = 0
        for peer, answer in (await _ask_all(call, SIGNED_HEADS, pack(_HeadsRequest(run=run)), peers)).items():
            try:
                self.take_heads(run, unpack_heads(answer))
                taken += 1
            except SignedHeadsError as error:
                logger.info("dropped the signed heads from %s: %s", peer, error)
        return taken


async def send_amendment(call: Call, run: str, amendment: Amendment, peers: Iterable[str]) -> int:
    """Send an amendment to these peers. Return how many took it."""
    return len(await _ask_all(call, AMENDMENTS, pack(_AmendmentRequest(run=run, amendment=amendment)), peers))


async def _ask_all(call: Call, name: str, request: bytes, peers: Iterable[str]) -> dict[str, bytes]:
    """Return the answers to a request, by peer, without peers that do not answer."""

    async def ask(peer: str) -> tuple[str, bytes | None]:
        try:
            return peer, await call(peer, name, request, ASK_TIMEOUT)
        except (PeerUnreachableError, RemoteProtocolError) as error:
            logger.debug("%s", error)
            return peer, None

    answers = await asyncio.gather(*map(ask, peers))
    return {peer: answer for peer, answer in answers if answer is not None}
