"""The lies that a real process tells in test_liars: those of simulated liars, and those that need real bytes."""

from __future__ import annotations

import asyncio
import secrets
import struct
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from peers.protocol.averages import NO_TERMS, Averages
from tests.simulator.leading_lies import HandsOnItsOwn, RefusesAll

from peers.network.channel import PeerUnreachableError, Serve
from peers.network.dht_storage import heartbeats_key
from peers.presence.calls import BEAT, HEARTBEAT, Beat, tag_of
from peers.presence.heartbeat import Heartbeat
from peers.protocol.effects import SendChunk
from peers.transfer.lineage_fetch import BYTES_LIMIT, HEADERS, HeadersRequest
from peers.transfer.payloads import PAYLOAD, PayloadRequest
from peers.transfer.snapshots import SNAPSHOT, SnapshotOffer, SnapshotRequest
from peers.values.chunks import chunk_digests, digest_of_chunks
from peers.values.identity import Identity
from peers.values.wire import Buffer, digest_of, pack, unpack
from tests.simulator.liars import Lie
from tests.simulator.lies import Accuser, AllAbsent, FalseRate, FalseState, InventedHeld, InventedLog
from tests.simulator.mixtures import UnaskedCommits

if TYPE_CHECKING:
    from tests.swarm.liar_peer import LyingDriver

AT_ONCE = 4  # requests of a flood to each victim
INVENTED = 40  # peers
LIMIT = 1 << 20  # bytes that an answer to a flood may have
TIMEOUT = 10.0  # seconds that a flood waits for one
HUGE = struct.pack("<f", 2.0**57)


class RealLie(Lie):
    """One way to depart from the protocol that concerns bytes, or what a process does with its time."""

    @property
    def driver(self) -> LyingDriver:
        return cast("LyingDriver", self.liar)

    def begin(self) -> None:
        """It is to be told from now on."""

    def end(self) -> None:
        """It is to be told no more."""

    def contributes(self, payload: bytes) -> bytes:
        """Return what is taken for the pseudo-gradient."""
        return payload

    def averages(self, blocks: bytes) -> bytes:
        """Return what is taken for the average of a chunk."""
        return blocks

    @asynccontextmanager
    async def serves(self, name: str, serve: Serve, sender: str, packed: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
        """Give an answer to a pull of this name, in place of the one that `serve` gives."""
        async with serve(sender, packed) as answer:
            yield answer


# Bytes ---------------------------------------------------------------------------------------------------------
class FalseSnapshot(RealLie):
    """It offers a state of its own making to those who join."""

    @asynccontextmanager
    async def serves(self, name: str, serve: Serve, sender: str, packed: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
        async with serve(sender, packed) as (answer, data):
            if name != SNAPSHOT:
                yield answer, data
                return
            self.driver.told()
            yield self._false(answer, data) if answer else (answer, bytes(len(data)))

    def _false(self, answer: bytes, data: Buffer) -> tuple[bytes, Buffer]:
        offer = unpack(SnapshotOffer, answer)
        digests = chunk_digests([bytes(offer.bytes)])
        return pack(offer.model_copy(update={"state_digest": digest_of_chunks(digests)})), b"".join(digests)


class HugeBlock(RealLie):
    """One block of its contribution, honestly committed to, is larger than all others by many orders of magnitude."""

    def contributes(self, payload: bytes) -> bytes:
        self.driver.told()
        return HUGE + payload[len(HUGE) :]


class TwoAverages(RealLie):
    """It gives each member another average, and signs each."""

    def gives(self, send: SendChunk, data: bytes) -> tuple[SendChunk, bytes]:
        if not send.reduced:
            return send, data
        exchange = self.liar.peer.exchange
        starts = {member.peer: member.incarnation for member in exchange.round.roster} if exchange else {}
        (scale,) = struct.unpack_from("<f", data)
        differing = struct.pack("<f", scale * (2.0 + self.liar.others.index(send.to))) + data[4:]
        terms = exchange.round.terms if exchange else NO_TERMS
        mine = Averages(self.liar.name, send.round_name, self.liar.keys, starts, terms)
        mine.sign(send.chunk, digest_of(differing), send.absent)
        return replace(send, origin=mine.origin(send.chunk)), differing


class WrongAverages(RealLie):
    """It gives all the same averages, which are as long as the right ones, and are not those."""

    def averages(self, blocks: bytes) -> bytes:
        self.driver.told()
        return blocks[: len(HUGE)] + blocks[: len(HUGE) - 1 : -1]


class FlippedBit(RealLie):
    """No lie at all: one bit of its state is wrong, and it goes on as if nothing were."""

    def begin(self) -> None:
        theta = self.driver.workload.state.theta
        theta[0] = -theta[0]
        self.driver.told()


# Floods --------------------------------------------------------------------------------------------------------
class Flood(RealLie):
    """It asks all others for something, again and again, several times at once."""

    _tasks: tuple[asyncio.Task[None], ...] = ()

    def begin(self) -> None:
        self._tasks = tuple(self.driver.start(self._drown(one)) for one in self.liar.others for _ in range(AT_ONCE))

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _drown(self, victim: str) -> None:
        while True:
            with suppress(PeerUnreachableError):
                await self.ask(victim)
            self.driver.told()
            await asyncio.sleep(0)

    def ask(self, victim: str) -> Coroutine[None, None, object]:
        """Ask once. Raises: PeerUnreachableError."""
        name, request = self.request()
        return self.driver.transport.pull(victim, name, request, BYTES_LIMIT, TIMEOUT)

    def request(self) -> tuple[str, bytes]:
        """Return what is pulled."""
        raise NotImplementedError

    @property
    def run(self) -> str:
        return self.liar.log.run


class HeaderFlood(Flood):
    def request(self) -> tuple[str, bytes]:
        return HEADERS, pack(HeadersRequest(run=self.run, first=0, last=2**61, is_whole=True))


class PayloadFlood(Flood):
    """It asks for payloads that were made, and for such as were not."""

    def request(self) -> tuple[str, bytes]:
        last = self.liar.log.last
        digest = last.payload if last is not None and self.draw.random() < 0.5 else secrets.token_bytes(32)
        return PAYLOAD, pack(
            PayloadRequest(run=self.run, fragment=0, payload=digest, first=0, last=self.draw.choice((0, 1, 2**61)))
        )


class SnapshotFlood(Flood):
    """It asks for ever newer snapshots, and for chunks of the newest."""

    def request(self) -> tuple[str, bytes]:
        position = self.liar.log.position
        head = self.draw.choice((None, position.head, secrets.token_bytes(32)))
        least = self.draw.choice((0, position.index, position.index + 1))
        return SNAPSHOT, pack(SnapshotRequest(run=self.run, head=head, least=least, first=0, last=1))


class RecordFlood(Flood):
    """It makes up peers that are hard at work, stores their heartbeats in the DHT, and sends them and their beats."""

    def begin(self) -> None:
        self._invented = [Identity.generate() for _ in range(INVENTED)]
        super().begin()

    async def ask(self, victim: str) -> object:
        transport, who = self.driver.transport, self.draw.choice(self._invented)
        beat = self._beat(who.peer_id)
        signed, key = beat.sign(who), heartbeats_key(self.run)
        chance = self.draw.random()
        if chance < 0.5:
            return await transport.dht._node.store(key, signed, beat.expires, subkey=beat.peer)
        if chance < 0.75:
            return await transport.call(victim, HEARTBEAT, tag_of(self.run) + signed, TIMEOUT)
        return await transport.call(victim, BEAT, pack(Beat.of(beat)), TIMEOUT)

    def _beat(self, name: str) -> Heartbeat:
        invented = {"peer": name, "sequence": time.time_ns() // 1_000_000, "addresses": ()}
        return self.driver.heartbeat().model_copy(update=invented)


LIES: Mapping[str, tuple[type[Lie], ...]] = {
    "a corrupt leader": (FalseState, RefusesAll),
    "a leader that hands on its own": (HandsOnItsOwn,),
    "a flipped bit": (FlippedBit,),
    "a false snapshot": (FalseSnapshot,),
    "unsolicited commits": (UnaskedCommits,),
    "a heavy lineage": (InventedLog,),
    "an invented rate": (FalseRate,),
    "a flood of header pulls": (HeaderFlood,),
    "a flood of payload pulls": (PayloadFlood,),
    "a flood of snapshot requests": (SnapshotFlood,),
    "a flood of heartbeat records": (RecordFlood,),
    "one huge block": (HugeBlock,),
    "an empty accusation": (Accuser,),
    "all are absent": (AllAbsent,),
    "two averages": (TwoAverages,),
    "an invented entry that it holds": (InventedHeld,),
    "wrong averages": (WrongAverages,),
}
"""What a line on its standard input has a liar do."""
