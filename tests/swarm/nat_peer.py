"""A peer without a model on a machine behind a router: `python -m tests.swarm.nat_peer`, see test_nat.

Every entry that it applies is a line, see `benchmarks.processes`, with how it reaches the others and how many chunks
it has averaged so far. Without a contact it is a bootstrap node.
"""

from __future__ import annotations

import asyncio
import logging
import sys

import click

from benchmarks.processes import say
from peers.driver.driver import Driver
from peers.log.header import Header
from peers.log.settings import RunSettings, Timing
from peers.network.links import LinkSettings
from peers.network.transport import HivemindTransport
from peers.protocol.events import Event, ReducedArrived
from peers.values.identity import Identity
from peers.values.wire import digest_of
from tests.swarm.vector_workload import UnhurriedWorkload, whole_members

RELAYED_MEGABITS = 800.0  # a second
VALUES = 32 * 1024  # in 32 chunks
TIMING = Timing(
    heartbeat=0.5, heartbeat_expiry=6.0, grace=6.0, round_timeout=20.0, partition_grace=60.0, resend=0.25, leave=5.0
)


class TellingDriver(Driver):
    """Says what it has applied, and counts what it has averaged."""

    def __init__(
        self, identity: Identity, transport: HivemindTransport, settings: RunSettings, workload: UnhurriedWorkload
    ) -> None:
        super().__init__(identity, transport, workload, settings, workload.state.digest(), on_entry=self._tell)
        self._reaching = transport.links.reach
        self._averaged = 0

    def handle(self, event: Event) -> None:
        match event:
            case ReducedArrived(_, sender) if sender == self.peer.me:
                self._averaged += 1
        super().handle(event)

    def _tell(self, header: Header, state_digest: bytes) -> None:
        reach = {peer: str(way) for peer, way in self._reaching().items()}
        fields = {"state": state_digest.hex(), "reach": reach, "averaged": self._averaged}
        say("applied", index=header.index, head=header.digest.hex(), members=whole_members(header), **fields)


async def run_volunteer(contact: tuple[str, ...], listen: tuple[str, ...], peers: int, pause: float) -> None:
    identity = Identity.generate()
    settings = RunSettings("nat", digest_of(b"manifest"), 4, 8, 8, minimum_peers=peers, timing=TIMING)
    transport = await HivemindTransport.create(identity, contact, listen)
    try:
        say("listening", peer=identity.peer_id)
        driver = TellingDriver(identity, transport, settings, UnhurriedWorkload(VALUES, pause))
        told = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        told.add_done_callback(lambda _: driver.leave())
        await driver.run()
    finally:
        await transport.close()


async def run_node(listen: tuple[str, ...], data_port: int) -> None:
    links = LinkSettings(data_port, RELAYED_MEGABITS)
    transport = await HivemindTransport.create(Identity.generate(), (), listen, public=True, links=links)
    try:
        say("listening", peer=transport.peer_id, addresses=transport.addresses)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await transport.close()


@click.command(help=__doc__)
@click.option("--listen", multiple=True, required=True)
@click.option("--contact", multiple=True, help="Address of a bootstrap node.")
@click.option("--data-port", type=int, default=0)
@click.option("--peers", type=int, default=1, help="As many train together, or nobody does.")
@click.option("--pause", type=float, default=0.2, help="Seconds that training takes.")
def main(listen: tuple[str, ...], contact: tuple[str, ...], data_port: int, peers: int, pause: float) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    asyncio.run(run_volunteer(contact, listen, peers, pause) if contact else run_node(listen, data_port))


if __name__ == "__main__":
    main()
