"""One TLS connection with a peer. One of the two ends opens conversations on it, one after another."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from peers.direct_reads import DirectReads
from peers.errors import RemoteProtocolError
from peers.links.credentials import Credentials, NotItsCertificateError, check, peer_id_of_certificate
from peers.links.opening import Hello, pack_opening, send
from peers.links.sockets import host_of_peer
from peers.links.tls import start_tls
from peers.reach import Reach
from peers.streams import Channel
from peers.throttle import UNLIMITED, Throttle

HANDSHAKE_TIMEOUT = 10.0  # seconds
WRITE_BUFFER = 1 << 19  # bytes that wait for the kernel at most


class Connection:
    """`is_ours`: it is we who open conversations on it. `reach` says which way its bytes take.

    `certificate` (DER) is the other end's, which has another one after each start, and in each network.
    """

    def __init__(
        self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_ours: bool, reach: Reach
    ) -> None:
        self.peer = peer
        self.is_ours = is_ours
        self.reach = reach
        self.reads = DirectReads(reader, writer)
        self.writer = writer
        self.certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.transport.set_write_buffer_limits(high=WRITE_BUFFER)

    @property
    def host(self) -> str:
        """The address of the other end."""
        return host_of_peer(self.writer.get_extra_info("socket"))

    @property
    def is_open(self) -> bool:
        return not (self.reads.has_ended or self.writer.is_closing())

    def on_lost(self, callback: Callable[[], None]) -> None:
        self.reads.on_lost = callback

    def channel(self, upload: Throttle = UNLIMITED, download: Throttle = UNLIMITED) -> Channel:
        """Return a channel for the next conversation."""
        return Channel(self.peer, self.reads, self.writer, upload, download, stays_open=True)

    def close(self) -> None:
        """End it at once: what was not sent yet is of no use to anybody."""
        self.writer.transport.abort()


async def greet(sock: socket.socket, credentials: Credentials, peer: str, is_ours: bool, reach: Reach) -> Connection:
    """Begin a connection as the end that speaks first. Takes the socket over.

    Raises: OSError; RemoteProtocolError when somebody else answers.
    """
    hello = Hello(to=peer, certificate=credentials.certificate, is_yours=not is_ours)
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            await send(sock, pack_opening(hello))
            reader, writer = await _start_tls(sock, credentials.dialling, server_side=False)
    except TimeoutError as error:
        sock.close()
        raise OSError("no TLS handshake in time") from error
    except BaseException:
        sock.close()
        raise
    try:
        check(writer.get_extra_info("ssl_object"), peer)
    except NotItsCertificateError as error:
        writer.transport.abort()
        raise RemoteProtocolError(peer, str(error)) from error
    return Connection(peer, reader, writer, is_ours, reach)


async def welcome(sock: socket.socket, credentials: Credentials, hello: Hello, reach: Reach) -> Connection:
    """Begin a connection as the end that is spoken to. Takes the socket over. Raises: OSError, RemoteProtocolError."""
    try:
        if hello.to != credentials.peer_id:
            raise RemoteProtocolError("unknown", f"it wants to talk to {hello.to}, not to us")
        peer = peer_id_of_certificate(hello.certificate)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            reader, writer = await _start_tls(sock, credentials.accepting(hello.certificate), server_side=True)
        try:
            check(writer.get_extra_info("ssl_object"), peer)
        except NotItsCertificateError:
            writer.transport.abort()
            raise
    except (NotItsCertificateError, ssl.SSLError) as error:
        sock.close()
        raise RemoteProtocolError("unknown", f"it does not prove who it is: {error}") from error
    except TimeoutError as error:
        sock.close()
        raise OSError("no TLS handshake in time") from error
    except BaseException:
        sock.close()
        raise
    return Connection(peer, reader, writer, hello.is_yours, reach)


async def _start_tls(
    sock: socket.socket, context: ssl.SSLContext, server_side: bool
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    transport = await start_tls(sock, context, server_side)
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    return reader, asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())
