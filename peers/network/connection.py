"""One TLS connection with a peer. One of the two ends opens conversations on it, one after another."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from peers.errors import RemoteProtocolError
from peers.network.channel import Channel
from peers.network.credentials import Credentials, NotItsCertificateError, check, peer_id_of_certificate
from peers.network.direct_reads import DirectReads
from peers.network.opening import Hello, pack_opening, send
from peers.network.sockets import closed_on_failure, host_of_peer
from peers.network.throttle import UNLIMITED, Throttle
from peers.network.tls import TlsTransport, start_tls
from peers.values.wire import Reach

HANDSHAKE_TIMEOUT = 10.0  # seconds
WRITE_BUFFER = 1 << 19  # bytes that wait for the kernel at most


class Connection:
    """`is_ours`: it is we who open conversations on it. `reach` says which way its bytes take.

    `certificate` (DER) is the other end's, which has another one after each start, and in each network.
    """

    def __init__(self, peer: str, transport: TlsTransport, is_ours: bool, reach: Reach) -> None:
        self.peer = peer
        self.is_ours = is_ours
        self.reach = reach
        self.certificate = transport.tls.getpeercert(binary_form=True)
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport.set_protocol(protocol)
        transport.set_write_buffer_limits(high=WRITE_BUFFER)
        protocol.connection_made(transport)
        self.writer = asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())
        self.reads = DirectReads(reader, self.writer)

    @property
    def host(self) -> str:
        """The address of the other end."""
        return host_of_peer(self.writer.get_extra_info("socket"))

    @property
    def is_open(self) -> bool:
        return not (self.reads.has_ended or self.writer.is_closing())

    def on_lost(self, callback: Callable[[], None]) -> None:
        self.reads.on_lost = callback

    def channel(self, upload: Throttle = UNLIMITED, download: Throttle = UNLIMITED, opening: bytes = b"") -> Channel:
        """Return a channel for the next conversation."""
        return Channel(self.peer, self.reads, self.writer, upload, download, stays_open=True, opening=opening)

    def close(self) -> None:
        """End it at once: what was not sent yet is of no use to anybody."""
        self.writer.transport.abort()


async def greet(sock: socket.socket, credentials: Credentials, peer: str, is_ours: bool, reach: Reach) -> Connection:
    """Begin a connection as the end that speaks first. Takes the socket over.

    Raises: OSError; RemoteProtocolError when somebody else answers.
    """
    hello = Hello(to=peer, certificate=credentials.certificate, is_yours=not is_ours)
    with closed_on_failure(sock):
        async with _in_time():
            await send(sock, pack_opening(hello))
            transport = await start_tls(sock, credentials.dialling, server_side=False)
    try:
        check(transport.tls, peer)
    except NotItsCertificateError as error:
        transport.abort()
        raise RemoteProtocolError(peer, str(error)) from error
    return Connection(peer, transport, is_ours, reach)


async def welcome(sock: socket.socket, credentials: Credentials, hello: Hello, reach: Reach) -> Connection:
    """Begin a connection as the end that is spoken to. Takes the socket over. Raises: OSError, RemoteProtocolError."""
    with closed_on_failure(sock):
        if hello.to != credentials.peer_id:
            raise RemoteProtocolError("unknown", f"it wants to talk to {hello.to}, not to us")
        try:
            peer = peer_id_of_certificate(hello.certificate)
            async with _in_time():
                transport = await start_tls(sock, credentials.accepting(hello.certificate), server_side=True)
        except (NotItsCertificateError, ssl.SSLError) as error:
            raise RemoteProtocolError("unknown", f"it does not prove who it is: {error}") from error
    try:
        check(transport.tls, peer)
    except NotItsCertificateError as error:
        transport.abort()
        raise RemoteProtocolError("unknown", f"it does not prove who it is: {error}") from error
    return Connection(peer, transport, hello.is_yours, reach)


@asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    """Raises: OSError when the handshake takes too long."""
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            yield
    except TimeoutError as error:
        raise OSError("no TLS handshake in time") from error
