"""Following a run's log without a part in it: a snapshot, and then entry after entry, from whoever is furthest on.

Whoever evaluates or exports a run, mirrors it or looks over its shoulder follows it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from peers.errors import RemoteProtocolError, SwarmUnreachableError
from peers.log.certificate import Certificate, prove
from peers.log.header import Header
from peers.log.outcome import follow
from peers.log.settings import RunSettings
from peers.log.state import LogError, LogState
from peers.presence.heartbeat import Heartbeat
from peers.presence.membership import DONATING
from peers.streams.channel import PeerUnreachableError
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.download import PullTransport
from peers.transfer.headers import fetch_stretch
from peers.transfer.payloads import PayloadError, Payloads
from peers.transfer.snapshot_fetch import ask_size, fetch_snapshot
from peers.transfer.storage import Storage
from peers.values.identity import verify
from peers.values.workload import BadBlocksError, ReplicatedState, SnapshotError


def nobody_trains(run: str) -> SwarmUnreachableError:
    return SwarmUnreachableError(
        f"nobody trains in the run {run} now, so nobody has its state.", "Ask a volunteer to join it again."
    )


class CannotFollowError(SwarmUnreachableError):
    """What follows cannot be had. `least` is the index from which on a snapshot leads further."""

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message, "Begin again, with a new snapshot.")
        self.least = least


class OtherLineageError(LogError):
    """An entry of a log that split off from ours."""


async def next_in_log(transport: PullTransport, donor: str, log: LogState) -> tuple[LogState, Certificate | None]:
    """The log with the entry that follows, as a donor knows it, and what proves that entry.

    Raises: PeerUnreachableError, RemoteProtocolError, LogError; CertificateError where a signature is false;
        OtherLineageError where the donor's log is another.
    """
    index = log.position.index
    stretch = await fetch_stretch(transport, donor, log.run, index, index + 1, is_whole=False)
    told, certificate = next(iter(stretch.told), (None, None))
    if told is None:
        raise LogError(f"it has no entry {index}")
    if told.previous != log.position.head:
        raise OtherLineageError(f"entry {index}: its previous does not follow from the log")
    after = log.append(told) if isinstance(told, Header) else follow(log, told)
    assert after.last is not None
    if certificate is not None:
        prove(certificate, log, after.last, verify)
    return after, certificate


class FollowTransport(PullTransport, Protocol):
    async def connect(self, peer_id: str, addresses: tuple[str, ...]) -> bool: ...
    async def heartbeats(self, run_id: str) -> list[Heartbeat]: ...


class Donors:
    """The peers that have the state of a run."""

    def __init__(self, transport: FollowTransport, log: LogState) -> None:
        """`log`: before its first entry."""
        self.heartbeats: Sequence[Heartbeat] = ()
        """Of all peers of the run, as of the last look."""
        self._transport = transport
        self._log = log
        self._connected: dict[str, tuple[str, ...]] = {}  # peers, and the addresses that they had then

    async def live(self) -> list[Heartbeat]:
        """Those that are there now, the furthest on first. Raises: SwarmUnreachableError if nobody is."""
        self.heartbeats = await self._transport.heartbeats(self._log.run)
        beats = [beat for beat in self.heartbeats if beat.state in DONATING]
        beats.sort(key=lambda beat: (beat.lineage_tokens, beat.sequence), reverse=True)
        for beat in beats:
            known = self._connected.get(beat.peer) == beat.addresses
            if not known and await self._transport.connect(beat.peer, beat.addresses):
                self._connected[beat.peer] = beat.addresses
        if not beats:
            raise nobody_trains(self._log.run)
        return beats

    async def state_size(self) -> int:
        """Bytes of the state, as most say. Raises: SwarmUnreachableError if nobody does."""
        try:
            return await ask_size(self._transport, [beat.peer for beat in await self.live()], self._log)
        except SnapshotError as error:
            raise no_state_given(str(error)) from error


def no_state_given(reasons: str) -> SwarmUnreachableError:
    return SwarmUnreachableError(f"no peer gave its state: {reasons}.", "Try again in a minute.")


class Following:
    """The state of a run on this machine. `log` is where in it `state` is, whose digest is `state_digest`."""

    def __init__(
        self, transport: FollowTransport, state: ReplicatedState, settings: RunSettings, storage: Storage
    ) -> None:
        self.log = settings.empty_log
        self.state_digest = b""
        self.donors = Donors(transport, self.log)
        self._transport = transport
        self._state = state
        self._storage = storage

    async def begin(self, least: int = 0) -> None:
        """Take over a snapshot, at index `least` or later.

        Raises: SwarmUnreachableError, and changes nothing, when no peer gives one that holds up.
        """
        donors = [beat.peer for beat in await self.donors.live()]
        reasons = []
        while donors:
            try:
                snapshot, _ = await fetch_snapshot(
                    self._transport, donors, self.log, least, self._storage, self._state.state_size
                )
                await self._state.restore(snapshot.data, snapshot.state_digest)
            except (SnapshotError, OSError) as error:
                reasons.append(f"{donors.pop(0)}: {error}")
            else:
                self.log, self.state_digest = self.log.at(snapshot.last), snapshot.state_digest
                return
        raise no_state_given("; ".join(reasons))

    async def advance(self) -> tuple[Header, bytes] | None:
        """Apply the next entry: its header, and the state digest after it; None when nobody is further on.

        Raises: SwarmUnreachableError when there is nobody; CannotFollowError when nobody has what follows, or what they
        have does not.
        """
        beats = [beat for beat in await self.donors.live() if beat.lineage_tokens > self.log.lineage_tokens]
        if not beats:
            return None
        index = self.log.position.index
        donors, reasons = [beat.peer for beat in beats if beat.index > index], list[str]()
        least = None if donors else 0  # as the heaviest that answers has it
        tried: set[bytes] = set()
        for donor in donors:
            try:
                log, _ = await next_in_log(self._transport, donor, self.log)
                assert log.last is not None
                least = index + 1 if least is None else least
                if log.last.digest in tried:
                    continue
                tried.add(log.last.digest)
                await self._state.apply(await self._payload(log.last, donors), log.last.index)
                state_digest = await self._state.state_digest()
            except (PeerUnreachableError, RemoteProtocolError, LogError, PayloadError, BadBlocksError) as error:
                reasons.append(f"{donor}: {error}")
                if least is None and isinstance(error, OtherLineageError):
                    least = 0
            else:
                self.log, self.state_digest = log, state_digest
                return log.last, state_digest
        reason = "; ".join(reasons) or "who has trained more took no more outer steps"
        raise CannotFollowError(
            f"nobody could tell what follows outer step {index}: {reason}.", index + 1 if least is None else least
        )

    async def _payload(self, header: Header, donors: Sequence[str]) -> memoryview:
        """Nobody else asks for it here, so it is not kept. Raises: PayloadError."""
        buffers = PayloadBuffers(self._state)
        await Payloads(self._transport, self.log.run, buffers).fetch(header, donors)
        payload = buffers.kept.get(header.payload)
        assert payload is not None
        return payload.data
