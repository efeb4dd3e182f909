"""The chunks of one peer's rounds on their way, and how fast they go."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from peers.driver.host import Host
from peers.driver.incoming import Incoming, IncomingTransport
from peers.driver.outgoing import Outgoing, OutgoingTransport
from peers.protocol.effects import SendChunk
from peers.protocol.rounds import Attempt
from peers.streams.throttle import Caps
from peers.transfer.admission import Admission
from peers.transfer.buffers import PayloadBuffers
from peers.values.workload import Workload


class StreamTransport(IncomingTransport, OutgoingTransport, Protocol):
    caps: Caps


class Traffic:
    """Both directions together."""

    def __init__(self, transport: StreamTransport, workload: Workload, buffers: PayloadBuffers, host: Host) -> None:
        self._transport = transport
        self._outgoing = Outgoing(transport, buffers, host)
        self._incoming = Incoming(transport, Admission(host.peer, buffers, workload), buffers, host)

    async def serve(self) -> None:
        await self._incoming.serve()

    def begin(self, round_name: Attempt, others: int) -> None:
        """Move chunks of this round, which has so many other members."""
        self._outgoing.begin(round_name, others)
        self._incoming.begin()

    def tidy(self, present: Attempt | None, members: Collection[str]) -> None:
        """End streams that nobody waits for: of other rounds than `present`, and with members that are lost."""
        self._outgoing.tidy(present, members)
        self._incoming.tidy(present, members)

    def send(self, send: SendChunk) -> None:
        self._outgoing.send(send)

    @property
    def sent_bytes(self) -> int:
        """Bytes of chunks that other members took from this peer, in all rounds."""
        return self._outgoing.sent_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes of chunks that came from other members, in all rounds."""
        return self._incoming.received_bytes

    @property
    def rate(self) -> int:
        """Bytes a second that the link was seen to carry each way in rounds; 0: not known."""
        return int(self._transport.caps.of_both(self._outgoing.meter.rate, self._incoming.meter.rate))

    @property
    def rates(self) -> dict[str, int]:
        """Bytes a second at which other members' data came in, in the last rounds."""
        return self._incoming.rates

    def knows(self, upload: float, download: float) -> None:
        """Take these for the rates of a round, since they were measured otherwise."""
        self._outgoing.meter.knows(upload)
        self._incoming.meter.knows(download)
