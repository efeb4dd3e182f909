"""The chunks of one peer's rounds on their way, and how fast they go."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from peers.driver.host import Host
from peers.driver.incoming import Incoming, IncomingTransport
from peers.driver.outgoing import Outgoing, OutgoingTransport
from peers.driver.uplink import Uplink
from peers.network.throttle import Caps
from peers.protocol.effects import SendChunk
from peers.protocol.rounds import Attempt
from peers.transfer.admission import Admission
from peers.transfer.buffers import PayloadBuffers
from peers.values.workload import Workload


class StreamTransport(IncomingTransport, OutgoingTransport, Protocol):
    caps: Caps


class Traffic:
    """Both directions together."""

    def __init__(
        self, transport: StreamTransport, workload: Workload, buffers: Sequence[PayloadBuffers], host: Host
    ) -> None:
        """`buffers` are of each fragment."""
        self._transport = transport
        self._uplink = Uplink()
        self._outgoing = [Outgoing(transport, each, host, self._uplink) for each in buffers]
        admissions = [Admission(host.peer, each, workload) for each in buffers]
        self._incoming = Incoming(transport, admissions, buffers, host)

    async def serve(self) -> None:
        await self._incoming.serve()

    def begin(self, round_name: Attempt, others: int) -> None:
        """Move chunks of this round, which has so many other members."""
        self._outgoing[round_name.position.fragment].begin(round_name, others)
        self._incoming.begin()

    def tidy(self, present: Mapping[Attempt, Collection[str]]) -> None:
        """End streams that nobody waits for: of other rounds than the `present` ones, and with peers that are not among
        their members any more."""
        of_fragment = {name.position.fragment: name for name in present}
        for fragment, outgoing in enumerate(self._outgoing):
            name = of_fragment.get(fragment)
            outgoing.tidy(name, present[name] if name else ())
        self._incoming.tidy(present)

    def send(self, send: SendChunk) -> None:
        self._outgoing[send.round_name.position.fragment].send(send)

    @property
    def sent_bytes(self) -> int:
        """Bytes of chunks that other members took from this peer, in all rounds."""
        return self._uplink.sent_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes of chunks that came from other members, in all rounds."""
        return self._incoming.received_bytes

    @property
    def peaks(self) -> tuple[float, float]:
        """Bytes a second that the link was seen to carry away, and to bring, in rounds; 0: not known."""
        return self._uplink.meter.rate, self._incoming.meter.rate

    @property
    def rate(self) -> int:
        """Bytes a second that the link was seen to carry each way in rounds; 0: not known."""
        return int(self._transport.caps.of_both(*self.peaks))

    @property
    def rates(self) -> dict[str, int]:
        """Bytes a second at which other members' data came in, in the last rounds."""
        return self._incoming.rates

    @property
    def known_for(self) -> float:
        """Return how many seconds ago the link was measured without a round; infinity if it never was."""
        return self._uplink.meter.known_for

    def knows(self, upload: float, download: float) -> None:
        """Take in what the link carries, measured while there was no round."""
        self._uplink.meter.knows(upload)
        self._incoming.meter.knows(download)
