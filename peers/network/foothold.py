"""Staying in the DHT: finding it again when it is lost, and serving it when others can dial us."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from peers.network.daemon import HIVEMIND, NETWORK_ERRORS, Daemon, peer_id_of, to_peer_id
from peers.network.first_contact import endpoint, which_answer
from peers.network.own_network import NetworkChange

if TYPE_CHECKING:
    from peers.network.node import HivemindNode

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 3.0  # seconds
GREETING_WAIT = 3.0  # seconds


class Foothold:
    """One node's place in the DHT. Unless it `may_serve`, it stays a client; a public node, or a local one, serves."""

    def __init__(
        self,
        owner: HivemindNode,
        daemon: Daemon,
        node: Any,
        initial_peers: Sequence[str],
        remembered: Callable[[], Sequence[str]],
        may_serve: bool,
    ) -> None:
        self._owner = owner
        self._daemon = daemon
        self._protocol = node.protocol
        self._initial_peers = initial_peers
        self._remembered = remembered
        self._may_serve = may_serve
        self._is_settled = not self._protocol.client_mode or not may_serve
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._keeping = asyncio.create_task(self._keep())

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    def network_changed(self, change: NetworkChange) -> None:
        """Begin anew: what was connected is not any more, and what is being waited for does not come."""
        if change.breaks_connections and self._keeping is not None:
            self._owner.on_move()
            self._keeping.cancel()
            self._keeping = asyncio.create_task(self._keep_anew(self._keeping))

    async def _keep_anew(self, before: asyncio.Task[None]) -> None:
        await asyncio.gather(before, return_exceptions=True)
        await self._begin_anew()
        await self._greet(self._initial_peers)
        await self._keep()

    async def _keep(self) -> None:
        """Greet initial peers that we have lost whenever they are back, and others when we are alone in the DHT.

        The DHT forgets a node at its first failure; a bootstrap node that restarts would stay alone with the newcomers
        that it welcomes.
        """
        table = self._protocol.routing_table
        while True:
            await asyncio.sleep(LOOK_INTERVAL)
            lost = {address for address in self._initial_peers if to_peer_id(peer_id_of(address)) not in table}
            others = set() if table.uid_to_peer_id else await which_answer(self._remembered())
            await self._greet(lost | others)
            if not self._is_settled:
                await self._settle()

    async def _begin_anew(self) -> None:
        """Forget what we knew of another network."""
        await asyncio.gather(*(self._owner.drop_connection(str(peer)) for peer in await self._connected()))
        if self._may_serve:
            self._is_settled = False
            await self._serve(False)

    async def _greet(self, addresses: Iterable[str]) -> None:
        by_peer: dict[Any, list[str]] = {}
        for address in addresses:
            by_peer.setdefault(to_peer_id(peer_id_of(address)), []).append(address)
        await asyncio.gather(*(self._greet_peer(peer_id, known) for peer_id, known in by_peer.items()))

    async def _greet_peer(self, peer_id: Any, addresses: Sequence[str]) -> None:
        """Ask for an answer over the connection that there is, else over a new one."""
        if peer_id in await self._connected():
            with suppress(TimeoutError):
                async with asyncio.timeout(GREETING_WAIT):
                    if await self._protocol.call_ping(peer_id) is not None:
                        return
            await self._owner.drop_connection(str(peer_id))
        # After each failure the daemon waits longer, minutes in the end: it dials once we know that somebody answers.
        silent = {address for address in addresses if endpoint(address)} - await which_answer(addresses)
        answering = [address for address in addresses if address not in silent]
        if answering and await self._owner.connect(str(peer_id), answering):
            await self._protocol.call_ping(peer_id)

    async def _connected(self) -> list[Any]:
        """Return the peers that the daemon has connections to, dead ones included."""
        try:
            return [info.peer_id for info in await self._daemon.list_peers()]
        except NETWORK_ERRORS as error:
            logger.debug("the daemon does not say whom it is connected to: %r", error)
            return []

    async def _settle(self) -> None:
        """Serve the DHT if others can dial us. A server that they can't would cost each of them seconds."""
        answer = await self._owner.can_be_dialled()
        if answer is not None:
            self._is_settled = True
            await self._serve(answer)

    async def _serve(self, serves: bool) -> None:
        """Become a server of the DHT, or a client, whom nobody asks for anything."""
        protocol = self._protocol
        if protocol.client_mode is not serves:
            return
        logger.info("others can%s dial this machine", "" if serves else "not")
        protocol.client_mode = not serves
        service = HIVEMIND.protocol.AuthRPCWrapper(protocol, HIVEMIND.protocol.AuthRole.SERVICER, protocol.authorizer)
        if serves:
            await protocol.add_p2p_handlers(self._daemon, service)
            protocol.node_info = HIVEMIND.protocol.dht_pb2.NodeInfo(node_id=protocol.node_id.to_bytes())
            await asyncio.gather(*map(protocol.call_ping, list(protocol.routing_table.peer_id_to_uid)))
        else:
            protocol.node_info = HIVEMIND.protocol.dht_pb2.NodeInfo()
            with suppress(*NETWORK_ERRORS):
                await protocol.remove_p2p_handlers(self._daemon)
