"""Followers of a run: they fetch a snapshot, and then entry after entry, from the peer with the longest log.

Evaluation, export, mirrors and onlookers follow a run, and take no part in it. A follower takes an entry that no quorum
has signed only after the partition grace, since a minority that goes on alone has waited for it, too. A quorum would
make and certify an entry of its own within that time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from peers.errors import RemoteProtocolError, SwarmUnreachableError
from peers.log.certificate import Certificate, Support
from peers.log.folder import RunLog
from peers.log.header import NO_PAYLOAD, Header, Position
from peers.log.lineage import Walk
from peers.log.settings import RunSettings
from peers.log.state import LogError, LogState
from peers.network.channel import PeerUnreachableError
from peers.presence.branches import reported_state
from peers.presence.heartbeat import Heartbeat
from peers.presence.membership import DONATING
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.download import PullTransport
from peers.transfer.lineage_fetch import LineageError, LineageFetch, best_branch, fetch_stretch
from peers.transfer.payloads import PayloadError, Payloads
from peers.transfer.snapshots import Vouched, ask_size, fetch_snapshot
from peers.transfer.storage import Storage
from peers.values.identity import verify
from peers.values.manifest import Amendment
from peers.values.signed_heads import SignedHeads
from peers.values.system import now
from peers.values.workload import BadBlocksError, Blocks, ReplicatedState, SnapshotError


async def step(state: ReplicatedState, index: int, payloads: Mapping[int, Blocks], amendment: Amendment | None) -> None:
    """Apply outer step `index` to each fragment that has a payload; leave the other fragments unchanged.

    `amendment` is the one in force before the cycle.

    Raises: BadBlocksError, with nothing changed.
    """
    if len(payloads) > 1:  # a single payload is checked when it is applied
        for fragment, payload in payloads.items():
            blocked = state.fragments[fragment]
            if len(payload) != blocked.byte_range(0, blocked.block_count)[1]:
                raise BadBlocksError(f"{len(payload)} bytes are no payload of fragment {fragment}")
            await asyncio.to_thread(blocked.check, payload, 0)
    for fragment in sorted(payloads):
        await state.apply(payloads[fragment], index, fragment, amendment=amendment)


logger = logging.getLogger(__name__)


class UncertifiedWait:
    """The wait of a follower before it follows an entry that no quorum has certified."""

    def __init__(self, grace: float) -> None:
        """Create a wait for a quorum's signatures. After `grace` seconds an entry is followed without them."""
        self._grace = grace
        self._place: Position | None = None
        self._since = 0.0

    def may_follow(self, log: LogState, support: Support, beats: Iterable[Heartbeat]) -> bool:
        """Return True if the follower may now apply an entry after `log`. `support` states how many voters signed the
        entry's certificate, and if they are a quorum.

        An uncertified entry waits until the grace is over. It waits on while `beats` show a quorum that could certify
        one, since any peer may publish an uncertified entry.
        """
        if support.is_certified:
            return True
        index, voters = log.position.index, len(log.electors)
        if self._place != log.position:
            self._place, self._since = log.position, now()
            logger.info("of %d peers only %d have signed entry %d: waiting for more", voters, support.signers, index)
        here = [(beat.peer, beat.incarnation) for beat in beats if beat.head == log.position.head]
        if now() - self._since < self._grace or log.is_quorum(here):
            return False
        logger.info("entry %d is followed without a quorum's signatures, because the partition grace is over", index)
        return True


def no_training_peer_error(run: str) -> SwarmUnreachableError:
    """Return the error for a run in which no peer trains."""
    return SwarmUnreachableError(
        f"no peer trains in the run {run} now, so its state is not available.", "Ask a volunteer to join it again."
    )


class CannotFollowError(SwarmUnreachableError):
    """Error: the next entry is not available, or does not follow from the log. To continue, the follower needs a
    snapshot of outer step `least` or later."""

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message, "Begin again, with a new snapshot.")
        self.least = least


class _OtherLineageError(LogError):
    """Error: an entry does not follow from this follower's log, because the donor's log split off from it."""


@dataclass(frozen=True)
class _Next:
    """The next cycle in a donor's log: the log after the cycle, and the cycle's entries with their certificates.
    `support` states how many voters signed the weakest certificate, and if they are a quorum."""

    donor: str
    log: LogState
    entries: tuple[tuple[Header, Certificate | None], ...]
    support: Support


async def next_in_log(
    transport: PullTransport, donor: str, log: LogState, signed: SignedHeads, heads: dict[int, bytes]
) -> _Next:
    """Fetch and return the next cycle in a donor's log. `heads` are the heads of this follower's log at the indices
    that archives have signed.

    Raises: PeerUnreachableError, RemoteProtocolError; LogError, also where it contradicts an archive's signature;
        CertificateError where a signature is false; _OtherLineageError where the donor's log is another.
    """
    index = log.position.index
    stretch = await fetch_stretch(transport, donor, log.run, index, index + 1, is_whole=False)
    walk, entries = Walk(log, verify), list[tuple[Header, Certificate | None]]()
    for content, certificate in stretch.contents[: log.fragments]:
        if content.previous != log.position.head:
            raise _OtherLineageError(f"entry {index}: its previous does not follow from the log")
        entries.append((walk.take(content, certificate), certificate))
    if len(entries) < log.fragments:
        raise LogError(f"it has no entry {index}")
    branch = walk.branch()
    if (head := signed.contradiction({**heads, **branch.heads})) is not None:
        raise LogError(f"entry {index}: the archive {head.archive} has signed another outer step {head.index}")
    support = min(support for _, support in branch.first.values())
    return _Next(donor, branch.end.of(log.fragment), tuple(entries), support)


class FollowTransport(PullTransport, Protocol):
    async def connect(self, peer_id: str, addresses: tuple[str, ...]) -> bool: ...
    async def heartbeats(self, run_id: str) -> list[Heartbeat]: ...
    def signed_heads_of(self, run_id: str) -> SignedHeads: ...


class Donors:
    """The finder of donors: peers of a run that have the run's state, so that a follower can fetch it."""

    def __init__(self, transport: FollowTransport, log: LogState) -> None:
        """Create an object that finds donors when `live` is called. `log` is the run's log before its first entry."""
        self.heartbeats: Sequence[Heartbeat] = ()
        """Of all peers of the run, from the last call of `live`."""
        self._transport = transport
        self._log = log
        self._connected: dict[str, tuple[str, ...]] = {}  # addresses with which each donor was connected, by donor

    async def live(self) -> list[Heartbeat]:
        """Connect to the live donors, and return their heartbeats, most training tokens first. Raises:
        SwarmUnreachableError if there is no live donor."""
        self.heartbeats = await self._transport.heartbeats(self._log.run)
        beats = [beat for beat in self.heartbeats if beat.state in DONATING]
        beats.sort(key=lambda beat: (beat.lineage_tokens, beat.sequence), reverse=True)
        for beat in beats:
            known = self._connected.get(beat.peer) == beat.addresses
            if not known and await self._transport.connect(beat.peer, beat.addresses):
                self._connected[beat.peer] = beat.addresses
        if not beats:
            raise no_training_peer_error(self._log.run)
        return beats

    async def state_size(self, memory: int) -> int:
        """Return the size of the run's state in bytes, as most donors report it. Ignore reports of a state whose
        chunk digests would need more than a small part of `memory`, the free memory in bytes.

        Raises: SwarmUnreachableError.
        """
        try:
            return await ask_size(self._transport, [beat.peer for beat in await self.live()], self._log, memory)
        except SnapshotError as error:
            raise _no_state_given(str(error)) from error


def _no_state_given(reasons: str) -> SwarmUnreachableError:
    return SwarmUnreachableError(f"no peer gave its state: {reasons}.", "Try again in a minute.")


class Following:
    """The follower of a run. It fetches the run's state, then applies one outer step after another to it. The state at
    the end of `log` has the digest `state_digest`."""

    def __init__(self, transport: FollowTransport, state: ReplicatedState, settings: RunSettings) -> None:
        self.log = settings.empty_log
        self.state_digest = b""
        self.donors = Donors(transport, self.log)
        self.past = RunLog(self.log, 0)
        """The entries of the log that was followed, as far as they are known here."""
        self._uncertified_wait = UncertifiedWait(settings.timing.partition_grace)
        self._transport = transport
        self._state = state

    @property
    def _signed(self) -> SignedHeads:
        return self._transport.signed_heads_of(self.log.run)

    @property
    def _heads(self) -> dict[int, bytes]:
        """The heads of this follower's log at the indices that archives have signed."""
        end = self.log.position.index
        return self.past.heads_at(index for index in self._signed.indices if index <= end)

    async def begin(self, least: int = 0) -> None:
        """Fetch a snapshot of outer step `least` or later, and continue from there.

        Raises: SwarmUnreachableError, with nothing changed, when no peer gives a valid one.
        """
        beats, empty_log = await self.donors.live(), self.log.at(None)
        donors, reasons = [beat.peer for beat in beats], list[str]()
        was_asked = False

        async def vouch() -> Vouched:
            nonlocal beats, was_asked
            if was_asked:
                beats = await self.donors.live()  # newer heartbeats may report a state that earlier ones did not
            was_asked = True
            branch, self.past = await best_branch(self._transport, beats, empty_log, self._signed)
            return Vouched(branch, partial(reported_state, branch, beats), least, is_wary=True)

        while donors:
            try:
                snapshot = await fetch_snapshot(
                    self._transport, donors, self.log, least, vouch, Storage(), self._state.state_size
                )
                await self._state.restore(snapshot.data, snapshot.state_digest)
            except (SnapshotError, LineageError, OSError) as error:
                reasons.append(f"{donors.pop(0)}: {error}")
            else:
                self.log, self.state_digest = self.log.at(snapshot.last, snapshot.ends), snapshot.state_digest
                return
        raise _no_state_given("; ".join(reasons))

    async def advance(self) -> tuple[Header, bytes] | None:
        """Apply the next outer step. Return its closing entry's header, and the digest of the state after the step.
        Return None if no peer is further on, or while the next entry may still get a quorum's signatures.

        Raises: SwarmUnreachableError when there is no peer; CannotFollowError when no peer has the next entry, or it
        does not fit.
        """
        live = await self.donors.live()
        if (head := self._signed.contradiction(self._heads)) is not None:
            signed = f"the archive {head.archive} has signed another outer step {head.index}"
            raise CannotFollowError(f"{signed} than the one followed here.", 0)
        index, tokens = self.log.position.index, self.log.lineage_tokens
        beats = [beat for beat in live if beat.index > index or beat.lineage_tokens > tokens]
        donors, reasons, followers = [beat.peer for beat in beats if beat.index > index], list[str](), list[_Next]()
        least = None  # minimum outer step of a snapshot to begin again with; None until a peer shows a better log
        is_waiting = False
        for beat in beats:
            try:
                found = await self._next(beat, donors)
            except (PeerUnreachableError, RemoteProtocolError, LogError) as error:
                reasons.append(f"{beat.peer}: {error}")
                least = 0 if least is None and isinstance(error, _OtherLineageError) else least
                continue
            if found is None:
                continue
            if not self._uncertified_wait.may_follow(self.log, found.support, live):
                is_waiting = True
                continue
            least = index + 1 if least is None else least
            if all(found.log.position != other.log.position for other in followers):
                followers.append(found)
            if found.support.is_certified:
                break  # no other entry at this position can be certified
        if not (reasons or followers) or (is_waiting and least is None):
            return None
        for found in sorted(followers, key=lambda one: one.support, reverse=True):
            header = found.log.last
            assert header is not None
            try:
                payloads = await self._payloads([header for header, _ in found.entries], donors)
                await step(self._state, index, payloads, self.log.amendment)
                state_digest = await self._state.state_digest()
            except (PayloadError, BadBlocksError) as error:
                reasons.append(f"{found.donor}: {error}")
            else:
                for entry, certificate in found.entries:
                    self.past.append(entry, state_digest, None, certificate)
                self.log, self.state_digest = found.log, state_digest
                return header, state_digest
        raise CannotFollowError(
            f"no peer could show what follows outer step {index}: {'; '.join(reasons)}.",
            index + 1 if least is None else least,
        )

    async def _next(self, beat: Heartbeat, donors: Sequence[str]) -> _Next | None:
        """Return the next cycle of a peer's log; None if this log and the follower's have split, and the peer's branch
        is not better (R21).

        Raises: PeerUnreachableError, RemoteProtocolError, LogError; _OtherLineageError if the peer's branch is better.
        """
        try:
            if beat.index <= self.log.position.index:
                raise _OtherLineageError("its log has more training tokens in no more outer steps")
            return await next_in_log(self._transport, beat.peer, self.log, self._signed, self._heads)
        except _OtherLineageError:
            fetch = LineageFetch(self._transport, self.past)
            found = await fetch.compare(beat.peer, beat.index, donors, self.log)
            if not found.theirs.is_better_than(found.ours, self._signed):
                return None
            raise

    async def _payloads(self, headers: Sequence[Header], donors: Sequence[str]) -> dict[int, memoryview]:
        """Fetch and return the payloads of a cycle's entries, by fragment. Unchanged fragments have no payload.

        Raises: PayloadError.
        """
        buffers = PayloadBuffers.of_each(self._state.fragments)
        fetching, payloads = Payloads(self._transport, self.log.run, buffers), dict[int, memoryview]()
        for header in headers:
            if header.payload != NO_PAYLOAD:
                await fetching.fetch(header, donors)
                payload = buffers[header.fragment].kept.get(header.payload)
                assert payload is not None
                payloads[header.fragment] = payload.data
        return payloads
