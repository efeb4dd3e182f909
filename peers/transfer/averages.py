"""The chunks of a round: which are let in, how they are averaged, and how the averages of others are checked after it.
Every driver asks here, so that what is simulated is what is deployed.

Reducers sign what they give. Until it has trained again, each member shows what it contributed to all who were in the
round with it, a chunk at a time, with the way up to what it has committed to. A member that has a chunk of all of them
makes their average again, which comes out with the same bits, or is not what its reducer has signed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, NamedTuple, TypeAlias

from pydantic import Field

from peers.errors import DilocoPeerError, RemoteProtocolError
from peers.log.header import MEMBER_LIMIT
from peers.network.channel import PeerUnreachableError, Places, RefusalError
from peers.protocol.commitment import EVIDENCE_LIMIT, ChunkProof, Evidence, fault_in
from peers.protocol.effects import ReduceChunk, SendChunk
from peers.protocol.events import AverageRefuted, AverageTooEarly, BadBlocks, ContributionArrived, ReducedArrived
from peers.protocol.exchange import Exchange
from peers.protocol.peer import Peer
from peers.protocol.rounds import Attempt
from peers.protocol.signed_averages import Origin
from peers.transfer.buffers import Measure, PayloadBuffers, inspection
from peers.transfer.download import CHANCE, PullTransport
from peers.values.identity import Signature
from peers.values.wire import Buffer, Count, PeerId, RunId, Value, digest_of, pack, unpack_from
from peers.values.workload import BadBlocksError, Blocks, Reduction

CONTRIBUTION = "contribution"
READERS = 4  # chunks that are given away at once
TIMEOUT = 60.0  # seconds for one; it gives way to rounds
ASKED = 16
"""Chunks that a member asks for after a round, on average: in larger rounds it checks now and then only."""
MOST = 64
"""Members of a round that is checked: as many chunks are in memory at once."""


# What is let in -------------------------------------------------------------------------------------------------------
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
            return Admitted(None, is_taken=False)
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
        chunk, digest = header.chunk, digest_of(data)
        try:
            squares = self._inspect(chunk, data)
            if header.absent and not exchange.may_lack(header.absent):
                raise BadBlocksError("nobody is left in it")
            if not exchange.is_vouched_for(chunk, digest, header.absent, header.origin):
                raise BadBlocksError("its reducer has not signed it")
            if exchange.is_too_long(header.origin.reducer if header.origin else sender, squares):
                raise BadBlocksError("what its reducer gives is longer than what it can be made of")
        except BadBlocksError as error:
            return Admitted(BadBlocks(round_name, sender, chunk, str(error)), is_taken=False)
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


# What is averaged -----------------------------------------------------------------------------------------------------
Average: TypeAlias = Callable[[Reduction], Awaitable[Blocks]]
"""`Workload.reduce`."""


async def average_chunk(
    average: Average, buffers: PayloadBuffers, me: str, reduce: ReduceChunk
) -> ReducedArrived | BadBlocks | None:
    """Average the blocks of a chunk, and store the result. Return what to tell the protocol; None: the round is over.

    Blocks may pass every check at the door and still have no average: BadBlocks names the member that sent them.
    Raises: BadBlocksError or DilocoPeerError when they are this peer's own.
    """
    round_name, chunk = reduce.round_name, reduce.chunk
    if not buffers.round(round_name):
        return None
    contributions = buffers.contributions(round_name, chunk, me, reduce.weights)
    room = buffers.room(len(contributions[0][0]))
    try:
        averaged = await average(_reduction(reduce, contributions, buffers, room))
    except (BadBlocksError, DilocoPeerError) as error:
        first_block = buffers.chunking.blocks(chunk)[0]
        spoiler, _ = reduce.members[await _find_spoiler(average, contributions, first_block, buffers.fragment)]
        if spoiler == me:
            raise
        return BadBlocks(round_name, spoiler, chunk, str(error))
    if not buffers.round(round_name):
        return None
    digest = buffers.store(round_name, chunk, averaged)
    buffers.give_back([room, *(blocks for blocks, _ in contributions)])
    return ReducedArrived(round_name, me, chunk, reduce.absent, digest)


def _reduction(
    reduce: ReduceChunk, contributions: Sequence[tuple[Blocks, float]], buffers: PayloadBuffers, room: bytearray
) -> Reduction:
    """Return what there is to average of a chunk, given the members' blocks and room for the average."""
    first_block, place = buffers.chunking.blocks(reduce.chunk)[0], reduce.round_name.position
    tokens = sum(weight for _, weight in reduce.members)
    return Reduction(contributions, first_block, memoryview(room), tokens, place.fragment, place.index)


async def _find_spoiler(
    average: Average, contributions: Sequence[tuple[Blocks, float]], first_block: int, fragment: int = 0
) -> int:
    """Return the place of the contribution with which averaging begins to fail, given that it fails for all of them.

    Sums only grow from honest contributions by what rounding ignores beside one that makes them overflow.
    """
    good, bad = 0, len(contributions)  # so many can be averaged, so many can't
    while bad - good > 1:
        middle = (good + bad) // 2
        tried = contributions[:middle]
        try:
            if any(weight for _, weight in tried):  # there is no average of nothing
                await average(Reduction(tried, first_block, fragment=fragment))
            good = middle
        except (BadBlocksError, DilocoPeerError):
            bad = middle
    return good


# What others have averaged --------------------------------------------------------------------------------------------
class ContributionRequest(Value):
    """One chunk of what the peer contributed last to a fragment."""

    run: RunId
    fragment: Count
    chunk: Count


async def serve_contributions(
    transport: PullTransport, run: str, buffers: Sequence[PayloadBuffers], is_member: Callable[[int, str], bool]
) -> None:
    """Show what this peer contributes to whoever `is_member` of the fragment's round that it is in, from now on."""
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


Ask: TypeAlias = Callable[[str, int, int, int], Awaitable[tuple[ChunkProof, Blocks]]]
"""Returns what a peer shows of its contribution to a fragment, given the chunk and how long that is. Raises:
PeerUnreachableError, RemoteProtocolError."""


def asking(transport: PullTransport, run: str) -> Ask:
    """Return what asks the peers of a run."""

    async def ask(peer: str, fragment: int, chunk: int, length: int) -> tuple[ChunkProof, Blocks]:
        request = pack(ContributionRequest(run=run, fragment=fragment, chunk=chunk))
        packed, blocks = await transport.pull(peer, CONTRIBUTION, request, length, TIMEOUT)
        return unpack_from(peer, ChunkProof, packed), blocks

    return ask


class SpotCheck:
    """Makes averages again at one peer."""

    def __init__(
        self, ask: Ask, average: Average, buffers: Sequence[PayloadBuffers], me: str, chance: random.Random = CHANCE
    ) -> None:
        """`buffers` are of each fragment; `chance` decides which averages are made."""
        self._ask = ask
        self._average = average
        self._buffers = buffers
        self._me = me
        self._chance = chance

    async def check(self, exchange: Exchange) -> AverageRefuted | None:
        """Make one of the averages again that others have made in this round, all of which are here.

        Returns what it shows; None: nothing, since it is right, or somebody has not shown its blocks, or it is not the
        turn of this round.
        """
        signed, members = exchange.averages.of_others, len(exchange.contributions.commitments)
        if not signed or not 0 < members <= MOST or self._chance.random() * members >= ASKED:
            return None
        theirs, buffers = self._chance.choice(signed), self._buffers[exchange.name.position.fragment]
        reduce = exchange.reduction_of(theirs.chunk, theirs.absent)
        asked = [self._contribution(exchange, peer, theirs.chunk, buffers) for peer, _ in reduce.members]
        shown = await self._all(asked)
        contributions = [(blocks, weight) for blocks, (_, weight) in zip(shown, reduce.weights, strict=True) if blocks]
        if len(contributions) < len(reduce.members):
            return None
        room = bytearray(len(contributions[0][0]))
        try:
            again = await self._average(_reduction(reduce, contributions, buffers, room))
        except (BadBlocksError, DilocoPeerError):
            return None  # of which the reducer is to speak
        if digest_of(again) == theirs.digest:
            return None
        return AverageRefuted(exchange.name, theirs.origin.reducer, theirs.chunk)

    async def _all(self, asked: Sequence[Coroutine[None, None, Blocks | None]]) -> Sequence[Blocks | None]:
        """Wait for all at once."""
        return await asyncio.gather(*asked)

    async def _contribution(self, exchange: Exchange, peer: str, chunk: int, buffers: PayloadBuffers) -> Blocks | None:
        """Return a member's blocks as it has committed to them; None: they are not to be had (any more)."""
        start, stop = buffers.chunk_bytes(chunk)
        blocks: Blocks
        try:
            if peer == self._me:
                proof, blocks = buffers.proof(chunk), bytes(buffers.own_chunk(chunk))
            else:
                proof, blocks = await self._ask(peer, buffers.fragment, chunk, stop - start)
        except (KeyError, PeerUnreachableError, RemoteProtocolError):
            return None
        return blocks if exchange.contributions.has(peer, chunk, digest_of(blocks), proof) else None
