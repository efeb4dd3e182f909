"""The chunks of a round: which are let in, and how they are averaged. Every driver asks here, so that what is simulated
is what is deployed.

Until it has trained again, each member shows what it contributed to all that were in the round with it, a chunk at a
time, with the path to what it has committed to: then others can make an average again (spot checks).
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
READERS = 4  # chunks that are given away at once
TIMEOUT = 60.0  # seconds for one; it gives way to rounds


# What is let in -------------------------------------------------------------------------------------------------------
class ChunkHeader(Value):
    """The announcement of a chunk: an average, with those whose blocks are `absent`, signed by its `origin`; or the
    sender's own blocks, with the proof that it committed to them, and its `signature` of the commitment."""

    chunk: Count
    reduced: Annotated[bool, Field(strict=True)]
    absent: Annotated[tuple[PeerId, ...], Field(max_length=MEMBER_LIMIT)]
    proof: ChunkProof | None = None
    origin: Origin | None = None
    signature: Signature | None = None

    @classmethod
    def of(cls, send: SendChunk, buffers: PayloadBuffers) -> ChunkHeader:
        """Return the announcement of a chunk that goes out."""
        return cls(
            chunk=send.chunk,
            reduced=send.reduced,
            absent=send.absent,
            proof=None if send.reduced else buffers.proof(send.chunk),
            origin=send.origin,
            signature=send.signature,
        )


class Admitted(NamedTuple):
    """The decision on a chunk: the protocol's event, if any, and whether its sender is rid of it."""

    event: ContributionArrived | ReducedArrived | BadBlocks | None
    is_taken: bool


class Admission:
    """Checks the chunks that arrive at one peer, and puts those that are waited for into its buffers.

    A chunk that is not waited for is not stored, and its sender learns whether to send it again. A chunk that is wrong
    is its sender's fault: RemoteProtocolError where no honest peer would have announced it, else BadBlocks. The
    protocol hears of a chunk, and never sees its bytes.
    """

    def __init__(self, peer: Peer, buffers: PayloadBuffers, measure: Measure) -> None:
        self._peer = peer
        self._buffers = buffers
        self._inspect = inspection(measure, buffers)

    def is_shared(self, round_name: RoundName, sender: str) -> bool:
        """Return whether the sender and this peer are in this round together now."""
        exchange = self._peer.exchange_of(round_name)
        return exchange is not None and exchange.is_with(sender)

    def check_size(self, sender: str, round_name: RoundName, header: ChunkHeader, length: int) -> None:
        """Raises: RemoteProtocolError unless this is a whole chunk, in the format of an average or of this sender; of a
        round that we are not in, in any format."""
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
        """Store a chunk of the announced size, if the round waits for it. Own blocks are stored as they are, and must
        not change; averaged ones are copied. The protocol must hear of the event before anything else."""
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
        """Store an average that is signed, by whomever it comes; and where one is proposed, that one only."""
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
                raise BadBlocksError("what its reducer gives is longer than what it can be made of")
        except BadBlocksError as error:
            return Admitted(BadBlocks(name, origin.reducer, chunk, str(error), reduced=True), is_taken=False)
        self._buffers.store(name, chunk, data, digest)
        return Admitted(ReducedArrived(name, sender, chunk, header.absent, digest, origin, squares), is_taken=True)

    def _fault(self, sender: str, exchange: Exchange, header: ChunkHeader, data: bytes | bytearray) -> BadBlocks | None:
        """Return what is wrong with blocks to be averaged. It shows that their owner lied if it committed to them."""
        round_name, chunk, proof = exchange.name, header.chunk, header.proof
        if proof is None or not exchange.contributions.has(sender, chunk, digest_of(data), proof):
            return BadBlocks(round_name, sender, chunk, "it has not committed to this")
        said = exchange.commitment(sender, header.signature)
        if said is None:
            return BadBlocks(round_name, sender, chunk, "it has not signed what it committed to")
        fault = fault_in(chunk, data, proof, self._inspect, exchange.format_of(sender))
        if fault is None:
            return None
        is_short = len(data) <= EVIDENCE_LIMIT
        evidence = CommittedChunk(commitment=said, chunk=chunk, proof=proof, data=bytes(data)) if is_short else None
        return BadBlocks(round_name, sender, chunk, fault, evidence)


# What is averaged -----------------------------------------------------------------------------------------------------
Average: TypeAlias = Callable[[Reduction], Awaitable[Blocks]]
"""`Workload.reduce`."""


async def average_chunk(
    average: Average, buffers: PayloadBuffers, exchange: Exchange, reduce: ReduceChunk
) -> ReducedArrived | BadBlocks | None:
    """Average the blocks of a chunk, and store the result. Return the event, which the protocol must hear of before
    anything else; None: the average is not wanted any more.

    Blocks may pass every check at the door and still have no average: BadBlocks names the member that sent them.
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
    """Return what there is to average of a chunk, given the members' blocks and room for the average."""
    first_block, place = buffers.chunking.blocks(reduce.chunk)[0], reduce.round_name.position
    tokens = sum(weight for _, weight in reduce.members)
    return Reduction(contributions, first_block, memoryview(room), tokens, place.fragment, place.index, formats)


async def _find_spoiler(average: Average, failing: Reduction) -> int:
    """Return the place of the contribution with which averaging begins to fail, given that it fails for all of them.

    Sums only grow from honest contributions by what rounding ignores beside one that makes them overflow.
    """
    good, bad = 0, len(failing.contributions)  # so many can be averaged, so many can't
    while bad - good > 1:
        middle = (good + bad) // 2
        tried = replace(failing, contributions=failing.contributions[:middle], formats=failing.formats[:middle])
        try:
            if any(weight for _, weight in tried.contributions):  # there is no average of nothing
                await average(tried)
            good = middle
        except (BadBlocksError, DilocoPeerError):
            bad = middle
    return good


# What others may make again -------------------------------------------------------------------------------------------
class ContributionRequest(Value):
    """One chunk of what the peer contributed last to a fragment."""

    run: RunId
    fragment: Count
    chunk: Count


async def serve_contributions(
    transport: PullTransport, run: str, buffers: Sequence[PayloadBuffers], is_member: Callable[[int, str], bool]
) -> None:
    """Show what this peer contributes to those that are members of the fragment's round that it is in, from now on."""
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
    """Ask these peers at once for their contributions to a chunk, each in its format. Return one answer for each, None
    where there is none. This peer, which shows its `own`, may be among them."""
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
