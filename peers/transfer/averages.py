"""The averages of chunks: made in a round from what has arrived, and made again afterwards to check those of others.

Reducers sign what they give. Until it has trained again, each member shows what it contributed to all who were in the
round with it, a chunk at a time, with the way up to what it has committed to. A member that has a chunk of all of them
makes their average again, which comes out with the same bits, or is not what its reducer has signed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

from peers.errors import DilocoPeerError, RemoteProtocolError
from peers.network.channel import PeerUnreachableError, Places, RefusalError
from peers.protocol.commitment import ChunkProof
from peers.protocol.effects import ReduceChunk
from peers.protocol.events import AverageRefuted, BadBlocks, ReducedArrived
from peers.protocol.exchange import Exchange
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.download import CHANCE, PullTransport
from peers.values.wire import Buffer, Count, RunId, Value, digest_of, pack, unpack_from
from peers.values.workload import BadBlocksError, Blocks, Reduction

CONTRIBUTION = "contribution"
READERS = 4  # chunks that are given away at once
TIMEOUT = 60.0  # seconds for one; it gives way to rounds
ASKED = 16
"""Chunks that a member asks for after a round, on average: in larger rounds it checks now and then only."""
MOST = 64
"""Members of a round that is checked: as many chunks are in memory at once."""


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
