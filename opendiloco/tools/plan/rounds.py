"""How long a round of our own protocol takes over given links. docs/planning.md says what is left out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from peers.protocol.planning import deal
from peers.values.chunks import Chunking, payloads_moved

LINK_SHARE = 0.95
"""Of a link's bits, that are data: a packet of 1,514 bytes carries 1,448, less what TLS and chunk headers take."""
DELAYS = 6
"""One way, in a round: Ready, Begin, a block to its reducer, its average back, Prepared, Complete."""
QUANTIZED, QUANTIZED_SPARSE = 1.67e9, 0.37e9
"""Values a second that one thread encodes, and as sparse payloads with error feedback (docs/codecs.md)."""
STEPPED = 1.69e9
"""Values a second for which one thread takes the outer step (docs/codecs.md)."""
BLOCK_VALUES = 1024


@dataclass(frozen=True)
class Peer:
    """So many equal peers. Bits a second, the seconds of a round trip to a well-connected server, and of an inner step.

    `gpus` 0 trains on the CPU. Bytes and prices are None where nobody has said them.
    """

    name: str
    count: int
    up: float
    down: float
    latency: float
    step_seconds: float
    gpus: int = 1
    gpu_memory: float | None = None
    main_memory: float | None = None
    price_per_hour: float | None = None

    @property
    def rate(self) -> float:
        """Return the bits of data that its link carries in a second, both ways at once."""
        return LINK_SHARE * min(self.up, self.down)


@dataclass(frozen=True)
class Swarm:
    """All peers of a planned run."""

    peers: tuple[Peer, ...]

    @property
    def count(self) -> int:
        return sum(peer.count for peer in self.peers)

    @property
    def slowest_rate(self) -> float:
        return min(peer.rate for peer in self.peers)

    @property
    def delay(self) -> float:
        """Return the seconds one way between the two peers that are furthest apart."""
        all_latencies = (peer.latency for peer in self.peers for _ in range(min(2, peer.count)))
        return sum(sorted(all_latencies)[-2:]) / 2


@dataclass(frozen=True)
class Round:
    """One round: its seconds, and how many payloads each of the swarm's kinds of peers sends, and gets, in it."""

    arithmetic: float
    delays: float
    transfer: float
    payload_bits: float
    moved: tuple[float, ...]

    @property
    def lag(self) -> float:
        """Return the seconds that it takes beside its transfer; meanwhile the link is free for the next round."""
        return self.arithmetic + self.delays

    @property
    def seconds(self) -> float:
        return self.transfer + self.lag


def round_of(swarm: Swarm, values: int, bits: float, encoded: float = QUANTIZED) -> Round:
    """Return the round that averages so many values at so many bits each, of which each peer encodes `encoded` a
    second. Parts are dealt as a leader deals them."""
    rates = [peer.rate for peer in swarm.peers for _ in range(peer.count)]
    names = [str(place) for place in range(len(rates))]
    chunks = deal(Chunking(-(-values // BLOCK_VALUES)).count, len(names), names, dict(zip(names, rates, strict=True)))
    moved = [payloads_moved(len(names), chunks[name] / sum(chunks.values())) for name in names]
    payload = values * bits
    starts = [sum(peer.count for peer in swarm.peers[:place]) for place in range(len(swarm.peers))]
    return Round(
        arithmetic=values / encoded + values / STEPPED,
        delays=DELAYS * swarm.delay,
        transfer=max(payload * share / rate for share, rate in zip(moved, rates, strict=True)),
        payload_bits=payload,
        moved=tuple(
            math.fsum(moved[start : start + peer.count]) / peer.count
            for start, peer in zip(starts, swarm.peers, strict=True)
        ),
    )
