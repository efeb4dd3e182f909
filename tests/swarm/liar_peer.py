"""A peer that lies, or an honest one: `python -m tests.swarm.liar_peer`, see test_liars.

Both run the real driver over hivemind. The honest one says of every entry that it applies what the entry is made of.
What the liar says goes through its lies, as that of a simulated liar does: the line "lie NAME" on its standard input
has it tell those of that name in `LIES`, which it confirms once it has told one; the line "honest" ends that.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import random
import sys
from collections.abc import Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import click

from benchmarks.processes import read_lines, say
from peers.driver.driver import Driver
from peers.log.header import Header
from peers.log.settings import RunSettings, Timing
from peers.messages.messages import Message
from peers.network.channel import Serve
from peers.network.throttle import Caps
from peers.network.transport import HivemindTransport
from peers.presence.heartbeat import Heartbeat
from peers.protocol.effects import Effect, ReduceChunk, Send, SendChunk
from peers.protocol.events import Event, Received, Tick
from peers.values.identity import Identity
from peers.values.manifest import Amendment
from peers.values.wire import Buffer, digest_of
from peers.values.workload import Blocks, Reduction
from tests.simulator.liars import LiarsPacker, Lie
from tests.swarm import terms
from tests.swarm.fault_peer import said_of
from tests.swarm.real_lies import LIES, RealLie
from tests.swarm.vector_workload import UnhurriedWorkload

VALUES = 16 * 1024  # in 4 chunks of 4 blocks
LINK = Caps(1e6, 1e6)
"""Bytes a second: so little that all links measure the same on a busy machine, too, and all are dealt some reducing."""
TIMING = Timing(
    heartbeat=0.5, heartbeat_expiry=3.0, grace=2.0, round_timeout=4.0, partition_grace=30.0, resend=0.2, leave=5.0
)
PEERS = 4
EXCLUSION = 4
"""Entries after which a liar may lie again: one swarm lives through all lies."""
SETTINGS = RunSettings(
    "liars", digest_of(b"manifest"), 4, 8, 8, minimum_peers=PEERS, timing=TIMING, snapshot_every=2, exclusion=EXCLUSION
)


class HonestWorkload(UnhurriedWorkload):
    """Remembers the payload that it applied last."""

    def __init__(self, seconds: float) -> None:
        super().__init__(VALUES, seconds)
        self.payload = b""

    async def apply(
        self,
        payload: Blocks,
        index: int,
        fragment: int = 0,
        keeps_work: bool = False,
        counts: bool = True,
        *,
        amendment: Amendment | None = None,
    ) -> None:
        await super().apply(payload, index, fragment, keeps_work, counts, amendment=amendment)
        self.payload = bytes(payload)

    def tell(self, header: Header, state_digest: bytes) -> None:
        """Say of an entry who counts in it, what was averaged, and the state that it leads to."""
        members = [member.peer for member in header.roster if member.tokens]
        said = {**said_of(header, state_digest), "payload": base64.b64encode(self.payload).decode()}
        say("applied", index=header.index, **said, members=members)


class LyingWorkload(HonestWorkload):
    """What it trains and averages goes through the lies."""

    lies: tuple[Lie, ...] = ()

    async def contribution(self, fragment: int = 0, format: int = 0) -> bytes:
        payload = await super().contribution(fragment, format)
        for lie in self.lies:
            if isinstance(lie, RealLie):
                payload = lie.contributes(payload)
        return payload

    async def reduce(self, reduction: Reduction) -> Blocks:
        blocks = await super().reduce(reduction)
        for lie in self.lies:
            blocks = lie.averages(blocks)
        return blocks


class LyingTransport(HivemindTransport):
    """What it gives to others goes through the lies."""

    lies: tuple[Lie, ...] = ()

    async def on_pull(self, name: str, serve: Serve, gives_way: bool = False) -> None:
        def lied(sender: str, packed: bytes) -> AbstractAsyncContextManager[tuple[bytes, Buffer]]:
            said = serve
            for lie in self.lies:
                if isinstance(lie, RealLie):
                    said = partial(lie.serves, name, said)
            return said(sender, packed)

        await super().on_pull(name, lied, gives_way)


class LyingDriver(Driver):
    """A peer between whose protocol and the network its lies stand."""

    def __init__(self, identity: Identity, transport: LyingTransport, workload: LyingWorkload) -> None:
        super().__init__(identity, transport, workload, SETTINGS, workload.state.digest(), on_entry=workload.tell)
        self.keys = identity
        self.transport, self.workload = transport, workload
        self.lies: tuple[Lie, ...] = ()
        self._has_lied = False
        self._given: dict[SendChunk, bytes] = {}
        self._messenger._packer = LiarsPacker(self.peer)
        self._carry_out, self._effects.carry_out = self._effects.carry_out, self.carry_out  # type: ignore[method-assign]
        self._honest_beat, self._pulse.heartbeat = self._pulse.heartbeat, self._beat  # type: ignore[method-assign]
        [outgoing] = self.rounds.traffic._outgoing
        self._honest_data, outgoing._data = outgoing._data, self._data  # type: ignore[method-assign]

    # As it is told --------------------------------------------------------------------------------------------
    async def listen(self) -> None:
        """Obey the lines on standard input, and leave when it ends."""
        lines: asyncio.Queue[str] = asyncio.Queue()
        reading = asyncio.create_task(read_lines(lines, self.leave))
        while not reading.done() or not lines.empty():
            line = asyncio.create_task(lines.get())
            await asyncio.wait([line, reading], return_when=asyncio.FIRST_COMPLETED)
            if not line.done():
                line.cancel()
                continue
            verb, _, name = line.result().partition(" ")
            self._begin(LIES[name] if verb == "lie" else ())
            if verb == "honest":
                say("honest")

    def _begin(self, kinds: Iterable[type[Lie]]) -> None:
        for lie in self.lies:
            if isinstance(lie, RealLie):
                lie.end()
        self._has_lied = False
        self.lies = self.workload.lies = self.transport.lies = tuple(map(self._made, kinds))
        for lie in self.lies:
            if isinstance(lie, RealLie):
                lie.begin()

    def _made(self, kind: type[Lie]) -> Lie:
        draw = random.Random(7)
        return kind(self, draw) if issubclass(kind, RealLie) else kind(self.peer, self.keys, draw)

    def told(self) -> None:
        """One of the lies was told."""
        if not self._has_lied:
            self._has_lied = True
            say("lied", index=self.peer.log.position.index)

    # Between the protocol and the network ---------------------------------------------------------------------
    def handle(self, event: Event) -> None:
        happened = event
        for lie in self.lies:
            event = lie.notices(event)
        if event is not happened:
            self.told()
        super().handle(event)
        for lie in self.lies:
            if isinstance(event, Received) and event.sender != self.peer.me:
                self._add(lie.hears(event.sender, event.message))
            elif isinstance(event, Tick):
                self._add(lie.volunteers())

    def _add(self, said: Iterable[tuple[str, Message]]) -> None:
        for one in said:
            self.told()
            self._say(*one)

    def _say(self, to: str, message: Message) -> None:
        if to != self.peer.me:
            self._carry_out(Send(to, message))

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(to, message):
                said = [(to, message)]
                for lie in self.lies:
                    said = [lied for one in said for lied in lie.says(*one)]
                if said != [(to, message)]:
                    self.told()
                for one in said:
                    self._carry_out(Send(*one))
            case SendChunk() if self.lies:
                self._give(effect)
            case ReduceChunk():
                reduce = effect
                for lie in self.lies:
                    reduce = lie.reduces(reduce)
                if reduce != effect:
                    self.told()
                self._carry_out(reduce)
            case _:
                self._carry_out(effect)

    def _give(self, send: SendChunk) -> None:
        try:
            honest = send, bytes(self._honest_data(send))
        except KeyError:
            return  # the round is over
        given: tuple[SendChunk, bytes] | None = honest
        for lie in self.lies:
            given = given and lie.gives(*given)
        if given != honest:
            self.told()
        if given:
            self._given[given[0]] = given[1]
            self._carry_out(given[0])

    def _data(self, send: SendChunk) -> memoryview:
        given = self._given.pop(send, None)
        return self._honest_data(send) if given is None else memoryview(given)

    def _beat(self) -> Heartbeat:
        honest = beat = self._honest_beat()
        for lie in self.lies:
            beat = lie.beats("", beat)
        if beat != honest:
            self.told()
        return beat


async def run_honest(identity: Identity, listen: str, contact: str, seconds: float) -> None:
    transport = await HivemindTransport.create(identity, [contact], [listen], local=True)
    workload = HonestWorkload(seconds)
    driver = Driver(identity, transport, workload, SETTINGS, workload.state.digest(), on_entry=workload.tell)
    await run(driver, workload, transport, read_lines(asyncio.Queue(), driver.leave))


async def run_liar(identity: Identity, listen: str, contact: str, seconds: float) -> None:
    transport = await LyingTransport.create(identity, [contact], [listen], local=True)
    workload = LyingWorkload(seconds)
    driver = LyingDriver(identity, transport, workload)
    await run(driver, workload, transport, driver.listen())


async def run(
    driver: Driver, workload: HonestWorkload, transport: HivemindTransport, listen: Coroutine[None, None, None]
) -> None:
    transport.cap(LINK)
    try:
        say("listening", peer=driver.peer.me, address=transport.addresses[0])
        listening = asyncio.create_task(listen)
        await driver.run()
        await listening
    finally:
        await transport.close()


@click.command(help=__doc__)
@click.option("--identity", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Kept here.")
@click.option("--listen", required=True)
@click.option("--contact", required=True, help="Address of the bootstrap node.")
@click.option("--training", type=float, required=True, help="Seconds that a training takes.")
@click.option("--honest", is_flag=True, help="It never lies.")
def main(identity: Path, listen: str, contact: str, training: float, honest: bool) -> None:
    terms.let_none_end()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    key = Identity.load_or_create(identity)
    asyncio.run((run_honest if honest else run_liar)(key, listen, contact, training))


if __name__ == "__main__":
    main()
