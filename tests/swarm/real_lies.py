"""The lies that a real process tells in test_liars: those of simulated liars, and those that need real bytes."""

from __future__ import annotations

import asyncio
import random
import secrets
import struct
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from peers.driver.driver import CALL
from peers.log.certificate import position_of
from peers.messages.messages import Inquire, LeaseRequest, Message
from peers.messages.packing import Packer
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
from peers.values.wire import Buffer, pack, unpack
from peers.values.workload import Blocks
from tests.simulator import claims, lies, mixtures
from tests.simulator.liars import Lie, signed_average

if TYPE_CHECKING:
    from tests.swarm.liar_peer import LyingDriver

AT_ONCE = 4  # requests of a flood to each victim
INVENTED = 40  # peers
TIMEOUT = 10.0  # seconds that a flood waits for one
HUGE = struct.pack("<f", 2.0**57)
BLOCK = 1024  # values, a byte each, behind the scale of a block


class RealLie(Lie):
    """One way to depart from the protocol that concerns bytes, or what a process does with its time."""

    def __init__(self, driver: LyingDriver, draw: random.Random) -> None:
        super().__init__(driver.peer, driver.keys, draw)
        self.driver = driver

    def begin(self) -> None:
        """It is to be told from now on."""

    def end(self) -> None:
        """It is to be told no more."""

    def contributes(self, payload: bytes) -> bytes:
        """Return what is taken for the pseudo-gradient."""
        return payload

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
    """It gives each member another average of what it averages, and signs each."""

    def gives(self, send: SendChunk, data: bytes) -> tuple[SendChunk, bytes]:
        exchange = self.exchange
        is_own = send.origin is not None and send.origin.reducer == self.me
        if exchange is None or exchange.name != send.round_name or not is_own:
            return send, data
        (scale,) = struct.unpack_from("<f", data)
        longer = 1.25 + 0.25 * self.others.index(send.to)  # not so long that it shows at once
        data = struct.pack("<f", scale * longer) + data[len(HUGE) :]
        return signed_average(exchange, self.keys, send, data), data


class WrongAverages(RealLie):
    """It gives all the same averages: those of other values, which an encoder could have made. In the first block, each
    value is at another place."""

    def averages(self, blocks: Blocks) -> Blocks:
        self.driver.told()
        data = bytes(blocks)
        first, end = len(HUGE), len(HUGE) + BLOCK
        return data[:first] + data[first:end][::-1] + data[end:]


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
        self._tasks = tuple(self.driver.start(self._drown(one)) for one in self.others for _ in range(AT_ONCE))

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
        return self.log.run


class MessageFlood(Flood):
    """It asks for samples, and for the last entry, as if it never got an answer."""

    def ask(self, victim: str) -> Coroutine[None, None, object]:
        log = self.log
        message: Message = LeaseRequest(position=log.position, state_digest=self.peer.state_digest)
        if log.last is not None and self.draw.random() < 0.5:
            message = Inquire(position=position_of(log.last))
        return self.driver.transport.call(victim, CALL, Packer(self.peer).pack(message), TIMEOUT)


class HeaderFlood(Flood):
    def request(self) -> tuple[str, bytes]:
        return HEADERS, pack(HeadersRequest(run=self.run, first=0, last=2**61, is_whole=True))


class PayloadFlood(Flood):
    """It asks for payloads that were made, and for such as were not."""

    def request(self) -> tuple[str, bytes]:
        last = self.log.last
        digest = last.payload if last is not None and self.draw.random() < 0.5 else secrets.token_bytes(32)
        return PAYLOAD, pack(
            PayloadRequest(run=self.run, fragment=0, payload=digest, first=0, last=self.draw.choice((0, 1, 2**61)))
        )


class SnapshotFlood(Flood):
    """It asks for ever newer snapshots, and for chunks of the newest."""

    def request(self) -> tuple[str, bytes]:
        position = self.log.position
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


LEADERS: Mapping[str, tuple[type[Lie], ...]] = {
    "a corrupt leader": (claims.FalseState, claims.RefusesAll),
    "a mute leader": (lies.MuteLeader,),
    "two proposals": (lies.TwoProposals,),
}
MEMBERS: Mapping[str, tuple[type[Lie], ...]] = {
    "a false state": (claims.FalseState,),
    "an invented log": (claims.InventedLog,),
    "an invented lock": (lies.InventedLock,),
    "unasked certificates": (lies.UnaskedCertificates,),
    "two votes": (lies.DoubleVoter,),
    "no block for one member": (lies.Starves,),
    "all are absent": (lies.MakesAbsent,),
    "two averages": (TwoAverages,),
    "wrong averages": (WrongAverages,),
    "one huge block": (HugeBlock,),
    "no link to anybody": (claims.ReachesNobody,),
    "a boasted rate": (claims.Trickles,),
    "forged proofs": (claims.ForgedProofs,),
    "replays": (mixtures.Replays,),
    "a flood of messages": (MessageFlood,),
    "a flood of header pulls": (HeaderFlood,),
    "a flood of payload pulls": (PayloadFlood,),
    "a flood of snapshot requests": (SnapshotFlood,),
    "a flood of heartbeat records": (RecordFlood,),
}
LIES: Mapping[str, tuple[type[Lie], ...]] = {
    **LEADERS,
    **MEMBERS,
    "a false snapshot": (FalseSnapshot,),
    "a flipped bit": (FlippedBit,),
}
"""What a line on its standard input has a liar do."""
CONVICTS: Mapping[str, str] = {"two votes": "votes", "two averages": "averages"}
"""Lies that convict the liar (R9), and the kind of their proof."""
