"""A peer without a model that strikes itself at a named moment: `python -m tests.swarm.fault_peer`, see test_faults.

A line "MOMENT SIGNAL" on its standard input arms it: it sends itself the signal at that moment of the first round that
it has not begun yet. A line "never" disarms it, which it confirms, unless it has struck. Every entry that it applies is
a line, see `benchmarks.processes`. Without a contact it is a bootstrap node.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

import click

from benchmarks.processes import say
from peers.driver.driver import CALL, Driver
from peers.log.certificate import Phase
from peers.log.header import Header
from peers.log.settings import RunSettings, Timing
from peers.messages.messages import Propose, Vote
from peers.messages.packing import open_envelope, unpack_message
from peers.network import dht_node
from peers.network.transport import HivemindTransport
from peers.protocol.events import ChunkSent, Event, ReducedArrived
from peers.values.identity import Identity
from peers.values.wire import digest_of
from tests.swarm import terms
from tests.swarm.vector_workload import UnhurriedWorkload, VectorWorkload, whole_members

VALUES = 32 * 1024  # in 32 chunks
TIMING = Timing(
    heartbeat=0.5, heartbeat_expiry=3.0, grace=3.0, round_timeout=10.0, partition_grace=8.0, resend=0.2, leave=5.0
)
PEERS = 3
SETTINGS = RunSettings("faults", digest_of(b"manifest"), 4, 8, 8, minimum_peers=PEERS, timing=TIMING)


class Moment(StrEnum):
    SENDING = "sending"
    """Some chunks of its contribution are where they belong, the others are not."""
    REDUCING = "reducing"
    """It has averaged some chunks of its part, and has not told of the last one."""
    PROPOSING = "proposing"
    """The leader knows what the round came to, and has not proposed it yet."""
    COMMITTING = "committing"
    """It has given its vote 2 to one member, and to none of the others."""


TIMES = {Moment.SENDING: 4, Moment.REDUCING: 4}  # that it comes to this before it is the moment; else once


class Fault:
    """What strikes this process, once. Nothing does until it is armed."""

    def __init__(self) -> None:
        self._moment: Moment | None = None

    def arm(self, moment: Moment, number: signal.Signals, index: int) -> None:
        """For a round about entry `index` or a later one."""
        self._moment, self._signal, self._index = moment, number, index
        self._times = TIMES.get(moment, 1)

    def disarm(self) -> None:
        self._moment = None
        say("disarmed")

    def awaits(self, moment: Moment, index: int) -> bool:
        return moment is self._moment and index >= self._index

    def reached(self, moment: Moment, index: int) -> None:
        if not self.awaits(moment, index):
            return
        self._times -= 1
        if self._times == 0:
            self._moment = None
            say("struck", index=index)
            os.kill(os.getpid(), self._signal)


class FaultyTransport(HivemindTransport):
    """Sends votes 2 one after another while a fault between them is awaited."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.fault = Fault()
        self._votes = asyncio.Lock()

    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
        if name != CALL:
            return await super().call(peer_id, name, payload, timeout)
        kind, position, _ = open_envelope(SETTINGS.run, payload)
        if kind is Propose:
            self.fault.reached(Moment.PROPOSING, position.index)
        message = unpack_message(SETTINGS.run, payload, None) if kind is Vote else None
        is_commit = isinstance(message, Vote) and message.choice.phase is Phase.COMMIT
        if not is_commit or not self.fault.awaits(Moment.COMMITTING, position.index):
            return await super().call(peer_id, name, payload, timeout)
        async with self._votes:
            answer = await super().call(peer_id, name, payload, timeout)
            self.fault.reached(Moment.COMMITTING, position.index)
        return answer


class FaultyDriver(Driver):
    def __init__(self, identity: Identity, transport: FaultyTransport, workload: VectorWorkload) -> None:
        super().__init__(identity, transport, workload, SETTINGS, workload.state.digest(), on_entry=tell)
        self._fault = transport.fault

    def handle(self, event: Event) -> None:
        match event:
            case ChunkSent(round, reduced=False):
                self._fault.reached(Moment.SENDING, round.position.index)
            case ReducedArrived(round, sender) if sender == self.peer.me:
                self._fault.reached(Moment.REDUCING, round.position.index)
        super().handle(event)

    async def listen(self) -> None:
        """Obey the lines on standard input, and leave when it ends."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            match line.decode().split():
                case [moment, number]:
                    self._fault.arm(Moment(moment), signal.Signals[number], self.peer.log.position.index + 1)
                case ["never"]:
                    self._fault.disarm()
        self.leave()


def tell(header: Header, state_digest: bytes) -> None:
    say("applied", index=header.index, **said_of(header, state_digest), members=whole_members(header))


def said_of(header: Header, state_digest: bytes) -> dict[str, object]:
    """Return what a test hears of an entry, besides its members."""
    return {"head": header.digest.hex(), "state": state_digest.hex(), "leader": header.leader}


async def run_peer(identity: Identity, listen: str, contact: str | None) -> None:
    transport = await FaultyTransport.create(identity, [contact] if contact else [], [listen], local=True)
    try:
        say("listening", peer=identity.peer_id, address=transport.addresses[0])
        if contact is None:
            await asyncio.to_thread(sys.stdin.read)
            return
        driver = FaultyDriver(identity, transport, UnhurriedWorkload(VALUES))
        listening = asyncio.create_task(driver.listen())
        await driver.run()
        await listening
    finally:
        await transport.close()


@click.command(help=__doc__)
@click.option("--identity", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Kept here.")
@click.option("--listen", required=True)
@click.option("--contact", help="Address of the bootstrap node.")
def main(identity: Path, listen: str, contact: str | None) -> None:
    terms.let_none_end()
    dht_node.LOOK_INTERVAL = 1.0  # a network that is back is noticed sooner than any user needs
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    asyncio.run(run_peer(Identity.load_or_create(identity), listen, contact))


if __name__ == "__main__":
    main()
