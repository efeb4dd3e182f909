"""Checks that arriving chunks of a round must pass, and the averaging of chunks. Simulated peers run this code, too.

Until it has trained again, each member serves its contribution to the other members of its round. It serves single
chunks, each with the Merkle path to its commitment, so that others can repeat an average (spot checks).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias

from pydantic import Field

from peers.errors import DilocoPeerError, RemoteProtocolError
from peers.log.header import MEMBER_LIMIT
from peers.messages.averages import Averaged, Origin
from peers.messages.commitment import EVIDENCE_LIMIT, ChunkProof, CommittedChunk, fault_in
from peers.messages.rounds import RoundName
from peers.network.channel import PeerUnreachableError, Places, RefusalError
from peers.protocol.effects import ReduceChunk, SendChunk
from peers.protocol.events import BadBlocks, ContributionArrived, ReducedArrived
from peers.protocol.exchange import Exchange
from peers.transfer.buffers import Measure, PayloadBuffers, inspection
from peers.transfer.download import PullTransport
from peers.values.identity import Signature
from peers.values.wire import Buffer, Count, PeerId, RunId, Value, digest_of, pack, unpack_from
from peers.values.workload import BadBlocksError, Blocks, Reduction

if TYPE_CHECKING:
    from peers.protocol.peer import Peer

CONTRIBUTION = "contribution"
READERS = 4  # maximum number of peers to which this peer sends chunks of its contributions at the same time
TIMEOUT = 60.0  # maximum seconds to fetch a chunk for a spot check; its sender sends chunks of open rounds first


# Arriving chunks ------------------------------------------------------------------------------------------------------
class ChunkHeader(Value):
    """The announcement of a chunk, sent before its bytes.

    An average names the members whose blocks are `absent`, and its signed `origin`. The sender's own blocks have the
    `proof` that they belong to its commitment, and its `signature` of the commitment.
    """

    chunk: Count
    reduced: Annotated[bool, Field(strict=True)]
    absent: Annotated[tuple[PeerId, ...], Field(max_length=MEMBER_LIMIT)]
    proof: ChunkProof | None = None
    origin: Origin | None = None
    signature: Signature | None = None

    @classmethod
    def of(cls, send: SendChunk, buffers: PayloadBuffers) -> ChunkHeader:
        """Return the announcement of a chunk that this peer is about to send."""
        return cls(
            chunk=send.chunk,
            reduced=send.reduced,
            absent=send.absent,
            proof=None if send.reduced else buffers.proof(send.chunk),
            origin=send.origin,
            signature=send.signature,
        )


class Admitted(NamedTuple):
    """The decision on a chunk that arrived: the event to hand to the protocol (or None), and `is_taken`, which is True
    if the sender need not send the chunk again."""

    event: ContributionArrived | ReducedArrived | BadBlocks | None
    is_taken: bool


class Admission:
    """The checker of the chunks that arrive at one peer. It stores, in the buffers of a round, the chunks
    that the round waits for.

    Any other chunk is not stored, and its sender learns whether to send it again. A wrong chunk is its sender's fault:
    it raises RemoteProtocolError if no honest peer would have announced it, else it gives BadBlocks. The protocol gets
    events about chunks, and never their bytes.
    """

    def __init__(self, peer: Peer, buffers: PayloadBuffers, measure: Measure) -> None:
        self._peer = peer
        self._buffers = buffers
        self._inspect = inspection(measure, buffers)

    def is_shared(self, round_name: RoundName, sender: str) -> bool:
        """Return True if the sender and this peer are both in this round now."""
        exchange = self._peer.exchange_of(round_name)
        return exchange is not None and exchange.is_with(sender)

    def check_size(self, sender: str, round_name: RoundName, header: ChunkHeader, length: int) -> None:
        """Raise RemoteProtocolError unless a chunk has the length, in bytes, that its format demands.

        Formats are those of averages or of this sender; any format of the run for a round that this peer is not in.
        """
        chunk, exchange = header.chunk, self._peer.exchange_of(round_name)
        if chunk >= self._buffers.size.chunks:
            raise RemoteProtocolError(sender, f"there is no chunk {chunk} in a payload")
        formats = [0]
        if not header.reduced:
            known = range(len(self._buffers.size.by_format))
            formats = list(known) if exchange is None else [exchange.format_of(sender)]
        right = [self._buffers.chunk_length(chunk, format) for format in formats]
        if length not in right:
            wanted = " or ".join(map(str, right))
            raise RemoteProtocolError(sender, f"its chunk {chunk} has {length} bytes, not {wanted}")

    def take(self, sender: str, round_name: RoundName, header: ChunkHeader, data: bytes | bytearray) -> Admitted:
        """Store a chunk whose size was checked, if the round waits for it. Return the decision on the chunk.

        Members' own blocks are stored without a copy, and must not change; averages are copied. The caller must hand
        the event to the protocol before any other event.
        """
        exchange, current = self._peer.exchange_of(round_name), self._buffers.round(round_name)
        if exchange is None or current is None or not exchange.is_with(sender):
            return Admitted(None, is_taken=False)
        chunk = header.chunk
        if not (exchange.wants_average(chunk) if header.reduced else exchange.wants_blocks(sender, chunk)):
            return Admitted(None, exchange.is_done_with(sender, chunk, header.reduced))
        if header.reduced:
            return self._take_average(sender, exchange, header, data)
        bad = self._fault(sender, exchange, header, data)
        if bad is not None:
            return Admitted(bad, is_taken=False)
        current.contributions[chunk][sender] = data
        return Admitted(ContributionArrived(round_name, sender, chunk), is_taken=True)

    def _take_average(self, sender: str, exchange: Exchange, header: ChunkHeader, data: Blocks) -> Admitted:
        """Store an average, which any member may send, if the chunk's reducer has signed it. Once the leader has
        proposed an average of the chunk, store no other."""
        chunk, digest, origin, name = header.chunk, digest_of(data), header.origin, exchange.name
        unsigned = BadBlocks(name, sender, chunk, "its reducer has not signed it", reduced=True)
        if origin is None:
            return Admitted(unsigned, is_taken=False)
        averaged = Averaged(chunk=chunk, digest=digest, absent=header.absent, origin=origin)
        if not exchange.is_wanted(averaged):
            return Admitted(None, is_taken=True)
        if not exchange.is_vouched_for(averaged):
            return Admitted(unsigned, is_taken=False)
        try:
            squares = self._inspect(chunk, data, 0)
            if exchange.is_too_long(averaged, squares):
                raise BadBlocksError("the reducer's average is longer than its contributions allow")
        except BadBlocksError as error:
            return Admitted(BadBlocks(name, origin.reducer, chunk, str(error), reduced=True), is_taken=False)
        self._buffers.store(name, chunk, data, digest)
        return Admitted(ReducedArrived(name, sender, chunk, header.absent, digest, origin, squares), is_taken=True)

    def _fault(self, sender: str, exchange: Exchange, header: ChunkHeader, data: bytes | bytearray) -> BadBlocks | None:
        """Return the fault in the blocks that a member sent; None if they are valid. The fault contains evidence if the
        member committed to the blocks, and they have at most EVIDENCE_LIMIT bytes."""
        round_name, chunk, proof = exchange.name, header.chunk, header.proof
        if proof is None or not exchange.contributions.has(sender, chunk, digest_of(data), proof):
            return BadBlocks(round_name, sender, chunk, "it has not committed to these blocks")
        commitment = exchange.commitment(sender, header.signature)
        if commitment is None:
            return BadBlocks(round_name, sender, chunk, "it has not signed its commitment")
        fault = fault_in(chunk, data, proof, self._inspect, exchange.format_of(sender))
        if fault is None:
            return None
        is_short = len(data) <= EVIDENCE_LIMIT
        evidence = (
            CommittedChunk(commitment=commitment, chunk=chunk, proof=proof, data=bytes(data)) if is_short else None
        )
        return BadBlocks(round_name, sender, chunk, fault, evidence)


# Averaging ------------------------------------------------------------------------------------------------------------
Average: TypeAlias = Callable[[Reduction], Awaitable[Blocks]]
"""`Workload.reduce`."""


async def average_chunk(
    average: Average, buffers: PayloadBuffers, exchange: Exchange, reduce: ReduceChunk
) -> ReducedArrived | BadBlocks | None:
    """Average the blocks of a chunk, and store the result. Return the event for the protocol, or None if the round no
    longer waits for the average. The caller must hand the event to the protocol before any other event.

    Blocks may pass every check on arrival, and still have no average: then BadBlocks names the member that sent them.
    Raises: BadBlocksError or DilocoPeerError when they are this peer's own.
    """
    round_name, chunk, me = reduce.round_name, reduce.chunk, exchange.me
    if not buffers.round(round_name) or not exchange.wants_own(chunk):
        return None
    contributions = buffers.contributions(round_name, chunk, me, reduce.weights)
    room, formats = buffers.room(buffers.chunk_length(chunk)), exchange.formats(reduce)
    try:
        averaged = await average(_reduction(reduce, contributions, formats, buffers, room))
    except (BadBlocksError, DilocoPeerError) as error:
        if not exchange.wants_own(chunk):
            return None
        first_block = buffers.chunking.blocks(chunk)[0]
        tried = Reduction(contributions, first_block, fragment=buffers.fragment, formats=formats)
        spoiler, _ = reduce.members[await _find_spoiler(average, tried)]
        if spoiler == me:
            raise
        return BadBlocks(round_name, spoiler, chunk, str(error))
    if not buffers.round(round_name) or not exchange.wants_own(chunk):
        return None
    digest = buffers.store(round_name, chunk, averaged)
    buffers.release(round_name, chunk, room)
    return ReducedArrived(round_name, me, chunk, reduce.absent, digest)


def _reduction(
    reduce: ReduceChunk,
    contributions: Sequence[tuple[Blocks, float]],
    formats: Sequence[int],
    buffers: PayloadBuffers,
    room: bytearray,
) -> Reduction:
    first_block, place = buffers.chunking.blocks(reduce.chunk)[0], reduce.round_name.position
    tokens = sum(weight for _, weight in reduce.members)
    return Reduction(contributions, first_block, memoryview(room), tokens, place.fragment, place.index, formats)


async def _find_spoiler(average: Average, failing: Reduction) -> int:
    """Return the index of the first contribution that, added to all contributions before it, makes averaging fail.
    Averaging all contributions of `failing` must fail.

    Bisection finds it: beside a contribution that makes a sum overflow, honest ones are within its rounding.
    """
    # averaging the first `good` contributions works, averaging the first `bad` fails
    good, bad = 0, len(failing.contributions)
    while bad - good > 1:
        middle = (good + bad) // 2
        tried = replace(failing, contributions=failing.contributions[:middle], formats=failing.formats[:middle])
        try:
            if any(weight for _, weight in tried.contributions):  # contributions that all have weight 0 have no average
                await average(tried)
            good = middle
        except (BadBlocksError, DilocoPeerError):
            bad = middle
    return good


# Contributions for spot checks ----------------------------------------------------------------------------------------
class ContributionRequest(Value):
    """A request to a member for one chunk of its last contribution to a fragment."""

    run: RunId
    fragment: Count
    chunk: Count


async def serve_contributions(
    transport: PullTransport, run: str, buffers: Sequence[PayloadBuffers], is_member: Callable[[int, str], bool]
) -> None:
    """Begin to answer each ContributionRequest. Send the chunk to a member of the fragment's last round, as `is_member`
    reports; refuse any other peer."""
    places = Places(READERS, 1)

    @asynccontextmanager
    async def serve(sender: str, packed: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
        request = unpack_from(sender, ContributionRequest, packed)
        transport.check_admitted(request.run, sender)
        if request.fragment >= len(buffers):
            raise RemoteProtocolError(sender, f"there is no fragment {request.fragment}")
        own = buffers[request.fragment]
        if request.run != run or not is_member(request.fragment, sender) or own.tree is None:
            raise RefusalError("there was no round with you to which this peer contributed")
        if request.chunk >= own.size.chunks:
            raise RemoteProtocolError(sender, f"there is no chunk {request.chunk} in a payload")
        async with places.one_for(sender):
            yield pack(own.proof(request.chunk)), own.own_chunk(request.chunk)

    await transport.on_pull(CONTRIBUTION, serve, gives_way=True)


async def ask_for_contributions(
    transport: PullTransport, run: str, me: str, own: PayloadBuffers, peers: Mapping[str, int], chunk: int
) -> list[tuple[ChunkProof, Blocks] | None]:
    """Ask each of `peers`, a mapping from peer to format, for a chunk of its contribution. Return the blocks with their
    proofs, in the order of `peers`, None for a peer that sends none. `own` has those of this peer, `me`."""
    request = pack(ContributionRequest(run=run, fragment=own.fragment, chunk=chunk))

    async def ask(peer: str) -> tuple[ChunkProof, Blocks] | None:
        try:
            if peer == me:
                return own.proof(chunk), bytes(own.own_chunk(chunk))
            length = own.chunk_length(chunk, peers[peer])
            packed, blocks = await transport.pull(peer, CONTRIBUTION, request, length, TIMEOUT)
            return unpack_from(peer, ChunkProof, packed), blocks
        except (KeyError, PeerUnreachableError, RemoteProtocolError):
            return None

    return await asyncio.gather(*map(ask, peers))
