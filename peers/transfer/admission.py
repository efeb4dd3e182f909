"""Which chunks of a round are let in. Every driver asks here, so that what is simulated is what is deployed."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field

from peers.errors import RemoteProtocolError
from peers.log.header import MEMBER_LIMIT
from peers.protocol.commitment import EVIDENCE_LIMIT, ChunkProof, Evidence, fault_in
from peers.protocol.effects import SendChunk
from peers.protocol.events import AverageTooEarly, BadBlocks, ContributionArrived, ReducedArrived
from peers.protocol.exchange import Exchange
from peers.protocol.peer import Peer
from peers.protocol.rounds import Attempt
from peers.protocol.signed_averages import Origin
from peers.transfer.buffers import Measure, PayloadBuffers, inspection
from peers.values.identity import Signature
from peers.values.wire import Count, PeerId, Value, digest_of
from peers.values.workload import BadBlocksError, Blocks


class ChunkHeader(Value):
    """What comes: an averaged chunk, with the names of those whose blocks are `absent`; or the sender's own blocks,
    with the proof that it committed to them, and its `signature` of that. Of an average the `origin` says who made it,
    signed."""

    chunk: Count
    reduced: Annotated[bool, Field(strict=True)]
    absent: Annotated[tuple[PeerId, ...], Field(max_length=MEMBER_LIMIT)]
    proof: ChunkProof | None = None
    origin: Origin | None = None
    signature: Signature | None = None

    @classmethod
    def of(cls, send: SendChunk, buffers: PayloadBuffers) -> ChunkHeader:
        """Return what is said of a chunk that goes out."""
        return cls(
            chunk=send.chunk,
            reduced=send.reduced,
            absent=send.absent,
            proof=None if send.reduced else buffers.proof(send.chunk),
            origin=send.origin,
            signature=send.signature,
        )


class Admitted(NamedTuple):
    """What became of a chunk: what the protocol is to be told of it, and whether its sender is rid of it."""

    event: ContributionArrived | ReducedArrived | AverageTooEarly | BadBlocks | None
    is_taken: bool


NOT_NOW = Admitted(None, is_taken=False)


class Admission:
    """Checks the chunks that arrive at one peer, and puts those that are waited for into its buffers.

    A chunk that comes too late or too early is not stored, and nobody is blamed for it: the sender learns whether it
    should come again. A chunk that is wrong is blamed on its sender: with RemoteProtocolError where no honest peer
    would have announced it, with BadBlocks where its bytes are not what an encoder makes. The protocol hears of a
    chunk, and never sees its bytes.
    """

    def __init__(self, peer: Peer, buffers: PayloadBuffers, measure: Measure) -> None:
        self._peer = peer
        self._buffers = buffers
        self._inspect = inspection(measure, buffers)

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
        if header.reduced:
            return self._take_average(sender, round_name, exchange, header, data)
        bad = self._fault(sender, round_name, exchange, header, data)
        if bad is not None:
            return Admitted(bad, is_taken=False)
        current.contributions[chunk][sender] = data
        return Admitted(ContributionArrived(round_name, sender, chunk), is_taken=True)

    def _take_average(
        self, sender: str, round_name: Attempt, exchange: Exchange, header: ChunkHeader, data: Blocks
    ) -> Admitted:
        chunk = header.chunk
        try:
            squares = self._inspect(chunk, data)
            if header.absent and not exchange.may_lack(header.absent):
                raise BadBlocksError("nobody is left in it")
        except BadBlocksError as error:
            return Admitted(BadBlocks(round_name, sender, chunk, str(error)), is_taken=False)
        digest = digest_of(data)
        if not exchange.is_vouched_for(chunk, digest, header.absent, header.origin):
            return Admitted(BadBlocks(round_name, sender, chunk, "its reducer has not signed it"), is_taken=False)
        if exchange.is_too_long(header.origin.reducer if header.origin else sender, squares):
            reason = "what its reducer gives is longer than what it can be made of"
            return Admitted(BadBlocks(round_name, sender, chunk, reason), is_taken=False)
        if not exchange.are_lost(header.absent):
            return Admitted(AverageTooEarly(round_name, sender, chunk), is_taken=False)
        self._buffers.store(round_name, chunk, data, digest)
        arrived = ReducedArrived(round_name, sender, chunk, header.absent, digest, header.origin, squares)
        return Admitted(arrived, is_taken=True)

    def _fault(
        self, sender: str, round_name: Attempt, exchange: Exchange, header: ChunkHeader, data: bytes | bytearray
    ) -> BadBlocks | None:
        """Return what is wrong with blocks to be averaged. It shows that their owner lied if it committed to them."""
        chunk, proof = header.chunk, header.proof
        if proof is None or not exchange.contributions.has(sender, chunk, digest_of(data), proof):
            return BadBlocks(round_name, sender, chunk, "it has not committed to this")
        said = exchange.commitment(sender, header.signature)
        if said is None:
            return BadBlocks(round_name, sender, chunk, "it has not signed what it committed to")
        fault = fault_in(chunk, data, proof, self._inspect)
        if fault is None:
            return None
        is_short = len(data) <= EVIDENCE_LIMIT
        evidence = Evidence(commitment=said, chunk=chunk, proof=proof, data=bytes(data)) if is_short else None
        return BadBlocks(round_name, sender, chunk, fault, evidence)
