"""Which chunks of a round are let in. Every driver asks here, so that what is simulated is what is deployed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

from pydantic import Field

from peers.errors import RemoteProtocolError
from peers.log.header import MEMBER_LIMIT
from peers.protocol.events import BadBlocks, ContributionArrived, ReducedArrived
from peers.protocol.messages import Attempt
from peers.protocol.peer import Peer
from peers.transfer.buffers import PayloadBuffers
from peers.values.wire import Count, PeerId, Value
from peers.values.workload import BadBlocksError, Blocks


class ChunkHeader(Value):
    """What comes: an averaged chunk, with the names of those whose blocks are `absent`, or the sender's own blocks."""

    chunk: Count
    reduced: Annotated[bool, Field(strict=True)]
    absent: Annotated[tuple[PeerId, ...], Field(max_length=MEMBER_LIMIT)]


class Admitted(NamedTuple):
    """What became of a chunk: what the protocol is to be told of it, and whether its sender is rid of it."""

    event: ContributionArrived | ReducedArrived | BadBlocks | None
    is_taken: bool


NOT_NOW = Admitted(None, is_taken=False)


class Admission:
    """Checks the chunks that arrive at one peer, and puts those that are waited for into its buffers.

    A chunk that comes too late or too early is not stored, and nobody is blamed for it: the sender learns whether it
    should come again. A chunk that is wrong is blamed on its sender: with RemoteProtocolError where no honest peer
    would have announced it, with BadBlocks where its bytes are not what an encoder makes. The protocol hears of a
    chunk, and never sees its bytes.
    """

    def __init__(self, peer: Peer, buffers: PayloadBuffers, check: Callable[[Blocks, int], None]) -> None:
        """`check` is the training side's, see `Workload.check`."""
        self._peer = peer
        self._buffers = buffers
        self._check = check

    def is_shared(self, round_name: Attempt, sender: str) -> bool:
        """Return whether the sender and this peer are in this round together now."""
        exchange = self._peer.exchange_of(round_name)
        return exchange is not None and exchange.is_with(sender)

    def check_size(self, sender: str, header: ChunkHeader, length: int) -> None:
        """Raises: RemoteProtocolError unless this is a whole chunk of this run's payloads."""
        chunk = header.chunk
        if chunk >= self._buffers.size.chunks:
            raise RemoteProtocolError(sender, f"there is no chunk {chunk} in a payload")
        start, stop = self._buffers.chunk_bytes(chunk)
        if length != stop - start:
            raise RemoteProtocolError(sender, f"its chunk {chunk} has {length} bytes, not {stop - start}")

    def take(self, sender: str, round_name: Attempt, header: ChunkHeader, data: bytes | bytearray) -> Admitted:
        """Store a chunk of the announced size, if the round waits for it. Own blocks are stored as they are, and must
        not change; averaged ones are copied."""
        exchange, current = self._peer.exchange_of(round_name), self._buffers.round(round_name)
        if exchange is None or current is None or not exchange.is_with(sender):
            return NOT_NOW
        chunk = header.chunk
        is_wanted = exchange.wants_reduced if header.reduced else exchange.wants_contribution
        if not is_wanted(sender, chunk):
            return Admitted(None, exchange.is_done_with(sender, chunk, header.reduced))
        try:
            self._check(data, self._buffers.chunking.blocks(chunk)[0])
            if header.absent and not exchange.may_lack(header.absent):
                raise BadBlocksError("nobody is left in it")
        except BadBlocksError as error:
            return Admitted(BadBlocks(round_name, sender, chunk, str(error)), is_taken=False)
        if header.reduced:
            self._buffers.store(round_name, chunk, data)
            return Admitted(ReducedArrived(round_name, sender, chunk, header.absent), is_taken=True)
        current.contributions[chunk][sender] = data
        return Admitted(ContributionArrived(round_name, sender, chunk), is_taken=True)
