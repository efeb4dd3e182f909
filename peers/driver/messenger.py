"""The protocol's messages, to and from the network."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Protocol

from peers.driver.host import Host
from peers.errors import LocalProtocolError, RemoteProtocolError
from peers.log.state import LogError
from peers.network.channel import PeerRefusedError, PeerUnreachableError
from peers.protocol.effects import Send
from peers.protocol.events import Received, Undelivered
from peers.protocol.messages import Message
from peers.protocol.packing import Packer
from peers.values.wire import WireError

logger = logging.getLogger(__name__)

CALL = "message"
CALL_TIMEOUT = 10.0  # seconds


class MessageTransport(Protocol):
    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes: ...
    async def on_call(self, name: str, handler: Callable[[str, bytes], Coroutine[None, None, bytes]]) -> None: ...
    def check_admitted(self, run_id: str, peer_id: str) -> None: ...


class Messenger:
    """Sends one peer's messages, and takes in those of others."""

    def __init__(self, transport: MessageTransport, host: Host) -> None:
        self._transport = transport
        self._host = host
        self._packer = Packer(host.peer)

    async def serve(self) -> None:
        await self._transport.on_call(CALL, self._receive)

    def send(self, send: Send) -> None:
        """Begin to send a message. One about a lineage that we have left meanwhile is of no use to anybody."""
        with suppress(LogError):
            self._host.start(self._send(send.to, self._packer.pack(send.message)))

    def last_words(self, message: Message, to: Iterable[str], timeout: float) -> list[Awaitable[object]]:
        """Return what tells this to each of these peers. Failures are of no consequence."""
        packed = self._packer.pack(message)
        return [self._transport.call(peer, CALL, packed, timeout) for peer in to]

    async def _send(self, to: str, packed: bytes) -> None:
        try:
            await self._transport.call(to, CALL, packed, CALL_TIMEOUT)
        except PeerRefusedError as error:
            logger.warning("%s", error)
        except PeerUnreachableError as error:
            logger.debug("%s", error)
            self._host.handle(Undelivered(to))
        except LocalProtocolError as error:  # too large: what others sent us may have made it so
            logger.error("cannot tell %s: %s", to, error)

    async def _receive(self, sender: str, data: bytes) -> bytes:
        """Take in a message. The transport drops and counts what is none: not of this run or this version, of no known
        kind, or with a field out of bounds.

        Raises: RemoteProtocolError; RefusalError for a peer that is not admitted to the run.
        """
        self._transport.check_admitted(self._host.peer.settings.run, sender)
        try:
            message = self._packer.unpack(data)
        except WireError as error:
            raise RemoteProtocolError(sender, str(error)) from error
        if message is not None:
            self._host.handle(Received(sender, message))
        return b""
