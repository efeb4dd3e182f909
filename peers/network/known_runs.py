"""Data about each run whose manifest this node has: its admission, revoked tickets, amendments and signed heads.

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

ASK_TIMEOUT = 10.0  # seconds to wait for a peer's answer to a call of this module
PAUSE = 30.0  # seconds in which a peer that was asked for revoked tickets is not asked for them again
REVOCATIONS = "revocations"  # name of the call; payload: a _RevocationsRequest, answer: packed Revocations or b""
STRANGERS_LIMIT = 1000  # maximum number of runs that Admissions remembers, not counting this node's own runs
SEEK_AGAIN = 600.0  # seconds between two DHT searches for the manifest of the same run
AMENDMENTS = "amendments"  # name of the call; payload: an _AmendmentRequest, answer: b""
REQUEST_BYTES = 1024  # bytes of a packed _AmendmentRequest or _HeadsRequest, at most
SIGNED_HEADS = "signed-heads"  # name of the call; payload: a _HeadsRequest, answer: packed heads

Call: TypeAlias = Callable[[str, str, bytes, float], Awaitable[bytes]]
"""(peer, name, payload, timeout) -> answer: `HivemindTransport.call`."""
Thing = TypeVar("Thing")


class _RevocationsRequest(Value):
    """A request for a run's list of revoked tickets. `known` is the sender's packed list; empty if it has none."""

    run: RunId
    known: Annotated[bytes, Field(strict=True, max_length=LIST_BYTES)]


class Admissions:
    """The admission to all runs whose manifests this node knows: by valid ticket, or open to all.

    A run without a known manifest counts as open, and its manifest is searched for, one at a time.
    """

    def __init__(self) -> None:
        self._ours: dict[str, RunAdmission | None] = {}  # admissions by run id; None: open run
        self._others: OrderedDict[str, RunAdmission | None] = OrderedDict()
        self._asked: dict[str, float] = {}
        self._asking: asyncio.Task[None] | None = None
        self._sought: OrderedDict[str, float] = OrderedDict()
        self._seeking: asyncio.Task[None] | None = None
        self.find: Callable[[str], Awaitable[SignedManifest | None]] | None = None
        """Searches the DHT for the manifest of a run."""
        self.on_revoked: Callable[[str, bytes], None] = lambda run, packed: None
        """Called with each newer list of revoked tickets, so that it is kept."""

    def learn(self, manifest: SignedManifest, is_ours: bool = True) -> None:
        """Record whether a run is open or by invitation. Of runs that are not ours, keep the last STRANGERS_LIMIT."""
        run = manifest.run_id
        if run in self._ours:
            return
        admission = self._others.pop(run, None)
        if manifest.is_by_invitation:
            admission = admission or RunAdmission(run, manifest.organiser, manifest.archives)
        if is_ours:
            self._ours[run] = admission
        else:
            _remember(self._others, run, admission)

    def forget(self, run: str) -> None:
        self._ours.pop(run, None)
        self._others.pop(run, None)

    def of(self, run: str) -> RunAdmission | None:
        """Return the RunAdmission of a run by invitation; None if the run is open or its manifest is not known."""
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
        """Return True if the heartbeat's peer may take part in its run at the time `wall` (seconds since the epoch)."""
        admission = self.of(heartbeat.run)
        if admission is None:
            self._look_up(heartbeat.run)
        return admission is None or not admission.admit(heartbeat.peer, heartbeat.ticket, wall)

    def _look_up(self, run: str) -> None:
        """Start a DHT search for a run's manifest, unless a search is running or this run was searched for lately."""
        now = time.monotonic()
        was_sought = now - self._sought.get(run, -SEEK_AGAIN) < SEEK_AGAIN
        if self.find is None or _is_busy(self._seeking) or run in self._ours or run in self._others or was_sought:
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

    # Lists of revoked tickets ---------------------------------------------------------------------------------
    async def answer(self, sender: str, payload: bytes) -> bytes:
        """Store the list in a _RevocationsRequest if it is newer than ours, and return our packed list.

        Raises: RemoteProtocolError, RefusalError.
        """
        request = unpack_from(sender, _RevocationsRequest, payload, LIST_BYTES + 256)
        admission = self.of(request.run)
        if admission is None:
            raise RefusalError(f"no run by invitation called {request.run} is known here")
        self._take_in(sender, request.run, request.known)
        return pack(admission.revocations) if admission.revocations else b""

    async def exchange(self, call: Call, run: str, peer: str) -> None:
        """Send our list of a run's revoked tickets to a peer or bootstrap node, and store the peer's list if newer.

        Raises: PeerUnreachableError, RemoteProtocolError.
        """
        admission = self.of(run)
        if admission is None:
            return
        known = pack(admission.revocations) if admission.revocations else b""
        answer = await call(peer, REVOCATIONS, pack(_RevocationsRequest(run=run, known=known)), ASK_TIMEOUT)
        self._take_in(peer, run, answer)

    def _take_in(self, peer: str, run: str, packed: bytes) -> None:
        """Store a peer's packed list of revoked tickets if it is newer than ours. Raises: RemoteProtocolError."""
        admission = self.of(run)
        try:
            if packed and admission is not None and admission.revoke(packed):
                logger.info("run %s: its organiser has revoked tickets", run)
                self.on_revoked(run, packed)
        except TicketError as error:
            raise RemoteProtocolError(peer, f"its list of revoked tickets is not valid: {error}") from error

    def catch_up(self, call: Call, run: str, heartbeats: Iterable[Heartbeat]) -> None:
        """If heartbeats name a newer list of revoked tickets than ours, start fetching it from one of their peers,
        unless a fetch is under way. The same peer is asked again only after PAUSE seconds."""
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
            logger.info("ignored the list of revoked tickets from %s", error)

    async def close(self) -> None:
        await cancel_and_wait(*filter(None, (self._asking, self._seeking)))


def _is_busy(task: asyncio.Task[None] | None) -> bool:
    return task is not None and not task.done()


def _remember(known: OrderedDict[str, Thing], run: str, value: Thing) -> None:
    known[run] = value
    known.move_to_end(run)
    if len(known) > STRANGERS_LIMIT:
        known.popitem(last=False)


class _AmendmentRequest(Value):
    """The payload of an AMENDMENTS call: an amendment that the receiving peer should put into the run's log."""

    run: RunId
    amendment: Amendment


class _HeadsRequest(Value):
    """The payload of a SIGNED_HEADS call: a request for all heads that the archives of `run` have signed."""

    run: RunId


@dataclass
class _KnownRun:
    """Data about one run: its organiser's id, its archives' signed heads, and the newest amendment sent to us."""

    organiser: str
    heads: SignedHeads
    amendment: Amendment | None = None


class KnownRuns:
    """The admissions, signed heads and amendments of all runs whose manifests this node has, until `forget`.

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
        """The handlers of REVOCATIONS, SIGNED_HEADS and AMENDMENTS calls, by the call's name."""
        return {
            REVOCATIONS: self.admissions.answer,
            SIGNED_HEADS: self.answer_heads,
            AMENDMENTS: self.answer_amendment,
        }

    def _find(self, run: str) -> _KnownRun:
        """Return the data about a run. Raises: RefusalError if this node does not know the run."""
        if run not in self._known:
            raise RefusalError(f"no run called {run} is known here")
        return self._known[run]

    # Amendments -----------------------------------------------------------------------------------------------
    def amendment_of(self, run: str) -> Amendment | None:
        """Return the newest amendment of a run that its organiser has sent us for the log; None without one."""
        return self._known[run].amendment if run in self._known else None

    async def answer_amendment(self, sender: str, payload: bytes) -> bytes:
        """Store the amendment that a request contains, if it is newer than ours. Return an empty answer.

        Raises: RemoteProtocolError; RefusalError if the run is unknown, its organiser has not signed the amendment, or
        ours has the same number and another content.
        """
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
        """Add `heads` to the signed heads that we have of a run; ignore an unknown run. Raises: SignedHeadsError."""
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
        """Add the signed heads in these heartbeats to the signed heads that we have of the run; ignore invalid ones."""
        for beat in heartbeats:
            if beat.signed is not None:
                try:
                    self.take_heads(run, [beat.signed])
                except SignedHeadsError as error:
                    logger.debug("a signed head in a heartbeat of %s: %s", beat.peer, error)

    async def answer_heads(self, sender: str, payload: bytes) -> bytes:
        """Return the packed signed heads of the run in a _HeadsRequest. Raises: RemoteProtocolError, RefusalError."""
        request = unpack_from(sender, _HeadsRequest, payload, REQUEST_BYTES)
        return pack_heads(self._find(request.run).heads.heads)

    async def ask_for_heads(self, call: Call, run: str, peers: Iterable[str]) -> int:
        """Ask `peers` for the signed heads of a run, and add them to ours. Return the number of valid answers."""
        taken = 0
        for peer, answer in (await _ask_all(call, SIGNED_HEADS, pack(_HeadsRequest(run=run)), peers)).items():
            try:
                self.take_heads(run, unpack_heads(answer))
                taken += 1
            except SignedHeadsError as error:
                logger.info("dropped the signed heads from %s: %s", peer, error)
        return taken


async def send_amendment(call: Call, run: str, amendment: Amendment, peers: Iterable[str]) -> int:
    """Send an amendment to `peers`. Return the number of peers that accepted the amendment."""
    return len(await _ask_all(call, AMENDMENTS, pack(_AmendmentRequest(run=run, amendment=amendment)), peers))


async def _ask_all(call: Call, name: str, request: bytes, peers: Iterable[str]) -> dict[str, bytes]:
    """Send one request to all `peers`. Return the answers by peer id, without peers that failed or refused."""

    async def ask(peer: str) -> tuple[str, bytes | None]:
        try:
            return peer, await call(peer, name, request, ASK_TIMEOUT)
        except (PeerUnreachableError, RemoteProtocolError) as error:
            logger.debug("%s", error)
            return peer, None

    answers = await asyncio.gather(*map(ask, peers))
    return {peer: answer for peer, answer in answers if answer is not None}
