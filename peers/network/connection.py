"""One TLS connection between two peers, which proves each peer's id. Only one of the two ends opens streams on it.

A peer id contains the peer's Ed25519 public key, and a peer's certificate is that key, signed by itself. So the peer id
alone decides whether a certificate is valid: there is no authority, and nothing to exchange beforehand.

Bytes are decrypted straight into their final memory. asyncio's own TLS costs bulk data a third more processor time: it
copies incoming bytes once more, calls back for each record of 16 KiB, and moves all unsent bytes whenever some of them
are sent; its StreamReader copies every byte three times. Here only a few KiB that come while no read waits are stored.
The rest stays with the kernel, which slows the sender down.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import datetime
from functools import lru_cache
from typing import cast

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from peers.errors import RemoteProtocolError
from peers.network.data_port import CERTIFICATE_BYTES, Hello, pack_opening
from peers.network.sockets import closed_on_failure, endpoint_of_peer, parse_endpoint
from peers.values.identity import Identity, peer_id_of_bytes
from peers.values.wire import Reach

CONTEXTS = 1024  # TLS contexts kept for accepting connections, at most; there is one for each certificate of a peer
NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "diloco-peer")])
EVER = (datetime(2000, 1, 1), datetime(9999, 1, 1))  # certificates never expire, since peers' clocks may differ

HANDSHAKE_TIMEOUT = 10.0  # seconds for one TLS handshake, at most
CIPHERTEXT = 1 << 18  # encrypted bytes read from the kernel at once, at most
HANDSHAKE_BYTES = 1 << 14  # bytes read from the kernel at once during the TLS handshake, at most
TO_SEND = 1 << 16  # bytes encrypted and sent at once, few enough to stay in the processor's cache
HIGH_WATER = 1 << 19  # encrypted bytes waiting to be sent, above which writers are paused
_ciphertext = memoryview(bytearray(CIPHERTEXT))  # a read buffer, which all connections use in turn

READ_AHEAD = 4096  # bytes that are received before a caller asks for them, at most; enough for most headers
LOW_WATER = 1 << 17
"""Bytes that must have arrived before the kernel wakes us within a long read. On a link with a long delay they arrive
in thousands of small pieces, and waking for each would cost more than decrypting them."""
RECORD = 17 << 10  # bytes that TLS may hold back: one incomplete record, with its overhead


class Credentials:
    """One peer's TLS certificate and private key. Each instance makes a new certificate, so that other peers notice
    when this peer has started again, or is in another network (`Link.add`)."""

    def __init__(self, identity: Identity) -> None:
        key = identity.private_key
        builder = x509.CertificateBuilder().subject_name(NAME).issuer_name(NAME).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(EVER[0]).not_valid_after(EVER[1])
        certificate = builder.sign(key, None)
        self.peer_id = identity.peer_id
        self.certificate = certificate.public_bytes(Encoding.DER)
        self._pem = certificate.public_bytes(Encoding.PEM) + key.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        )
        self.dialling = self._context(ssl.PROTOCOL_TLS_CLIENT)
        """The context of the end that dials. `_handshake` checks the other end before anything else is sent."""
        self.accepting = lru_cache(CONTEXTS)(self._accepting)
        """Returns a context that accepts only an end with this certificate (DER) and its key."""

    def _accepting(self, certificate: bytes) -> ssl.SSLContext:
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=certificate)
        context.num_tickets = 0  # no session resumption, so that each connection proves the peer's id
        return context

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        # The ssl module loads keys only from files, so the key is written to a file in memory, which is closed at once.
        with closing(os.fdopen(os.memfd_create("credentials"), "wb")) as file:
            file.write(self._pem)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return context


class Connection:
    """A TLS connection with a peer. With `is_ours`, this end opens the streams on it. `reach` is how the bytes travel:
    directly, through NATs, or by a relay.

    `certificate` (DER) is the other end's, which changes at each start and in each network.
    """

    def __init__(self, peer: str, transport: TlsTransport, is_ours: bool, reach: Reach) -> None:
        self.peer = peer
        self.is_ours = is_ours
        self.reach = reach
        self.certificate = transport.tls.getpeercert(binary_form=True)
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        self.writer = asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())
        self.reads = DirectReads(reader, self.writer)

    @property
    def host(self) -> str:
        return parse_endpoint(endpoint_of_peer(self.writer.get_extra_info("socket")))[0]

    @property
    def is_open(self) -> bool:
        return not (self.reads.has_ended or self.writer.is_closing())

    def close(self) -> None:
        """Close the connection at once, and drop unsent bytes, since no stream needs them any more."""
        self.writer.transport.abort()


async def greet(sock: socket.socket, credentials: Credentials, peer: str, is_ours: bool, reach: Reach) -> Connection:
    """Send a Hello to `peer`, make a TLS handshake with our `credentials`, and return the connection. It owns `sock`.
    With `is_ours`, only this end opens conversations on it; otherwise only the peer does.

    Raises: OSError; RemoteProtocolError when another peer answers.
    """
    hello = Hello(to=peer, certificate=credentials.certificate, is_yours=not is_ours)
    with closed_on_failure(sock):
        transport = await _handshake(sock, peer, credentials.dialling, pack_opening(hello))
    return Connection(peer, transport, is_ours, reach)


async def welcome(sock: socket.socket, credentials: Credentials, hello: Hello, reach: Reach) -> Connection:
    """Make the TLS handshake after a Hello, and return the connection. Raises: OSError, RemoteProtocolError."""
    with closed_on_failure(sock):
        if hello.to != credentials.peer_id:
            raise RemoteProtocolError("unknown", f"it wants to connect to {hello.to}, not to this peer")
        peer = _peer_of(hello.certificate)
        try:
            transport = await _handshake(sock, peer, credentials.accepting(hello.certificate))
        except ssl.SSLError as error:
            raise _unproven(error) from error
    return Connection(peer, transport, hello.is_yours, reach)


async def _handshake(sock: socket.socket, peer: str, context: ssl.SSLContext, opening: bytes = b"") -> TlsTransport:
    """Make a TLS handshake with exactly `peer`, and return the transport. The dialling end first sends `opening`.

    Raises: OSError, also when it takes too long; RemoteProtocolError.
    """
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            await asyncio.get_running_loop().sock_sendall(sock, opening)
            transport = await start_tls(sock, context, server_side=not opening)
    except TimeoutError as error:
        raise OSError("no TLS handshake in time") from error
    certificate = transport.tls.getpeercert(binary_form=True)
    if certificate is None or _peer_of(certificate) != peer:
        raise RemoteProtocolError(peer, f"the other end is not peer {peer}")
    return transport


def _peer_of(certificate: bytes) -> str:
    """Return the id of the peer that owns a certificate's (DER) public key. Raises: RemoteProtocolError."""
    if len(certificate) > CERTIFICATE_BYTES:
        raise _unproven(f"a certificate of {len(certificate)} bytes exceeds {CERTIFICATE_BYTES}")
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except Exception as error:  # the parser raises many kinds of errors for malformed bytes
        raise _unproven(f"not a certificate: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise _unproven("its certificate is not of an Ed25519 key")
    return peer_id_of_bytes(key.public_bytes_raw())


def _unproven(reason: object) -> RemoteProtocolError:
    return RemoteProtocolError("unknown", f"it does not prove its peer id: {reason}")


# TLS over a socket ---------------------------------------------------------------------------------------------------
async def start_tls(sock: socket.socket, context: ssl.SSLContext, server_side: bool) -> TlsTransport:
    """Make a TLS handshake on a socket, and return the transport. Raises: OSError, which includes ssl.SSLError."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_side=server_side)
    loop = asyncio.get_running_loop()
    while True:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            await loop.sock_sendall(sock, outgoing.read())
            if not (data := await loop.sock_recv(sock, HANDSHAKE_BYTES)):
                raise ConnectionResetError("the other side has ended the TLS handshake") from None
            incoming.write(data)
        except ssl.SSLError:
            with suppress(OSError):
                sock.send(outgoing.read())  # the TLS alert that names the error, if any
            raise
        else:
            await loop.sock_sendall(sock, outgoing.read())
            return TlsTransport(sock, tls, incoming, outgoing)


class TlsTransport(asyncio.Transport):
    """A TLS connection as a transport for asyncio's streams and protocols. It closes without TLS's closing alert, since
    frames mark the end of the data themselves.

    It has no protocol at first, and reads nothing until `resume_reading`.
    """

    def __init__(
        self, sock: socket.socket, tls: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO
    ) -> None:
        super().__init__({"socket": sock, "ssl_object": tls, "sslcontext": tls.context})
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self.tls = tls
        self._incoming, self._outgoing = incoming, outgoing
        self._protocol = asyncio.BufferedProtocol()
        self._unsent = memoryview(b"")  # encrypted bytes that the kernel has not accepted yet
        self._is_reading = self._is_watched = False
        self._is_to_send = self._is_waiting_to_send = self._has_paused_writer = False
        self._is_closed = False

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Set the protocol that gets received data. It must be a BufferedProtocol before reading is resumed."""
        self._protocol = cast(asyncio.BufferedProtocol, protocol)

    # Receiving ------------------------------------------------------------------------------------------------
    def pause_reading(self) -> None:
        """Stop reading. The event loop still watches the socket until bytes arrive, because most pauses end before, and
        each change of the watched sockets costs a system call."""
        self._is_reading = False

    def resume_reading(self) -> None:
        if self._is_reading or self._is_closed:
            return
        self._is_reading = True
        if not self._is_watched:
            self._is_watched = True
            self._loop.add_reader(self._socket, self._take_in)
        if self._incoming.pending or self.tls.pending():  # bytes read from the socket before the pause
            self._loop.call_soon(self._decrypt)

    def _take_in(self) -> None:
        if not self._is_reading:
            self._is_watched = False
            self._loop.remove_reader(self._socket)
            return
        try:
            count = self._socket.recv_into(_ciphertext)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(error)
            return
        if count:
            self._incoming.write(_ciphertext[:count])
        else:
            self._incoming.write_eof()
        self._decrypt()
        self._send_now()  # sends TLS's own reply to what was received, if any

    def _decrypt(self) -> None:
        """Decrypt the complete TLS records received so far, and pass the data on until the protocol pauses reading."""
        while self._is_reading:
            memory = memoryview(self._protocol.get_buffer(-1))
            count, end = 0, None
            try:
                while count < len(memory):
                    if not (record := cast(int, self.tls.read(len(memory) - count, memory[count:]))):
                        raise ssl.SSLEOFError
                    count += record
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                end = error
            if count:
                self._protocol.buffer_updated(count)
            if isinstance(end, ssl.SSLEOFError):
                self._protocol.eof_received()
                self._end(None)
            elif end is not None:
                self._end(end)
            if count < len(memory):
                return

    # Sending --------------------------------------------------------------------------------------------------
    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closed:
            return  # as in asyncio, StreamWriter.drain() raises the error, not write()
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), TO_SEND):
                self.tls.write(view[start : start + TO_SEND])
                if self._outgoing.pending >= TO_SEND:
                    self._send_now()
        except ssl.SSLError as error:
            self._end(error)
        if self._outgoing.pending and not (self._is_to_send or self._is_waiting_to_send):
            self._is_to_send = True  # sent later, together with other writes of this turn of the event loop
            self._loop.call_soon(self._send_now)
        if not self._has_paused_writer and self.get_write_buffer_size() > HIGH_WATER:
            self._has_paused_writer = True
            self._protocol.pause_writing()

    def _send_now(self) -> None:
        self._is_to_send = False
        if self._outgoing.pending and not self._is_waiting_to_send and not self._is_closed:
            self._send()

    def _send(self) -> None:
        """Send the encrypted bytes. If the kernel accepts no more, send the rest when the socket is writable again."""
        try:
            while self._unsent or self._outgoing.pending:
                self._unsent = self._unsent or memoryview(self._outgoing.read())
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            if not self._is_waiting_to_send:
                self._is_waiting_to_send = True
                self._loop.add_writer(self._socket, self._send)
        except OSError as error:
            self._end(error)
        else:
            if self._is_waiting_to_send:
                self._is_waiting_to_send = False
                self._loop.remove_writer(self._socket)
        if self._has_paused_writer and self.get_write_buffer_size() <= HIGH_WATER // 4:
            self._has_paused_writer = False
            self._protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        return len(self._unsent) + self._outgoing.pending

    # Closing --------------------------------------------------------------------------------------------------
    def is_closing(self) -> bool:
        return self._is_closed

    def abort(self) -> None:
        """Close the connection at once; bytes that the kernel does not accept now are lost."""
        self._send_now()
        self._end(None)

    close = abort

    def _end(self, error: OSError | None) -> None:
        if self._is_closed:
            return
        self._is_reading = False
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._is_closed = True
        self._unsent = memoryview(b"")
        self._loop.call_soon(self._report_end, error)

    def _report_end(self, error: OSError | None) -> None:
        try:
            self._protocol.connection_lost(error)
        finally:
            self._socket.close()


class DirectReads(asyncio.BufferedProtocol):
    """The reader of a connection, in place of its StreamReader; the StreamWriter stays in use. Only one read may wait
    at a time.

    Reads raise asyncio.IncompleteReadError when the stream ends before, TimeoutError when no byte comes for `patience`
    seconds (within a long read, twice as many), and OSError when the connection breaks.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        early = bytes(reader._buffer)  # type: ignore[attr-defined]  # read() would wait if there is nothing
        reader._buffer.clear()  # type: ignore[attr-defined]
        self._ahead = memoryview(bytearray(max(READ_AHEAD, len(early))))
        self._ahead[: len(early)] = early
        self._ahead_count = len(early)
        self._memory = memoryview(b"")  # the buffer that the current read fills
        self._count = 0
        self.on_lost: Callable[[], None] = lambda: None
        self._ready: asyncio.Future[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._last_at = 0.0  # time in seconds of the last received byte, or of the current read's start
        self._error = reader.exception()
        self.has_ended = reader.at_eof() or self._error is not None
        self._transport: asyncio.Transport = writer.transport  # type: ignore[assignment]  # it reads, too
        self._writing = self._transport.get_protocol()
        self._transport.set_protocol(self)
        self._is_tls = self._transport.get_extra_info("sslcontext") is not None
        self._low_water = 1
        self._take(0)

    @property
    def has_unread(self) -> bool:
        """True if bytes have arrived that no caller has read yet."""
        return self._ahead_count > 0

    async def read(self, count: int, patience: float | None) -> bytes:
        data = bytearray(count)
        await self.fill(memoryview(data), patience)
        return bytes(data)

    async def fill(self, memory: memoryview, patience: float | None) -> None:
        """Fill `memory` (one-byte items) with the next received bytes; `patience` is in seconds, None for no limit."""
        early = self._take(min(self._ahead_count, len(memory)))
        memory[: len(early)] = early
        if len(early) < len(memory):
            self._memory, self._count = memory, len(early)
            self._choose_low_water()
            try:
                await self._wait(patience)
            finally:
                self._memory, self._count = memoryview(b""), 0
                self._choose_low_water()

    def _choose_low_water(self) -> None:
        """Set how many bytes must arrive before the kernel wakes the read: the missing bytes, minus one TLS record,
        which may have arrived in part. The result is at least 1 and at most LOW_WATER."""
        self._wake_after(max(1, min(LOW_WATER, len(self._memory) - self._count - RECORD)))

    def _wake_after(self, wanted: int) -> None:
        if wanted != self._low_water and self._is_tls:
            self._low_water = wanted
            with suppress(OSError):
                sock = self._transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def _take(self, count: int) -> bytes:
        taken = bytes(self._ahead[:count])
        self._ahead_count -= count
        self._ahead[: self._ahead_count] = bytes(self._ahead[count : count + self._ahead_count])
        if self._ahead_count < len(self._ahead):
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
        return taken

    # Waiting for bytes ----------------------------------------------------------------------------------------
    async def _wait(self, patience: float | None) -> None:
        if self.has_ended:
            raise self._error or self._incomplete()
        loop = asyncio.get_running_loop()
        self._ready, self._last_at = loop.create_future(), loop.time()
        if patience is not None:
            self._watch = loop.call_later(patience, self._check_patience, patience)
        try:
            await self._ready
        finally:
            self._ready = None
            if self._watch is not None:
                self._watch.cancel()
                self._watch = None

    def _check_patience(self, patience: float) -> None:
        loop = asyncio.get_running_loop()
        if (silent := loop.time() - self._last_at) >= patience and self._low_water > 1:
            self._wake_after(1)  # some bytes may have arrived, but too few to wake the read: now one suffices
            self._last_at, silent = loop.time(), 0.0
        if silent < patience:
            self._watch = loop.call_later(patience - silent, self._check_patience, patience)
        else:
            self._end(TimeoutError(f"no byte came for {patience:g} s"))

    def _end(self, error: Exception | None = None) -> None:
        if self._ready is None or self._ready.done():
            return
        if error is None:
            self._ready.set_result(None)
        else:
            self._ready.set_exception(error)

    def _incomplete(self) -> asyncio.IncompleteReadError:
        return asyncio.IncompleteReadError(bytes(self._memory[: self._count]), len(self._memory))

    # Callbacks of the transport -------------------------------------------------------------------------------
    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory[self._count :] or self._ahead[self._ahead_count :]

    def buffer_updated(self, nbytes: int) -> None:
        self._last_at = asyncio.get_running_loop().time()
        if self._count < len(self._memory):
            self._count += nbytes
            self._choose_low_water()
            if self._count == len(self._memory):
                self._end()
        else:
            self._ahead_count += nbytes
            if self._ahead_count == len(self._ahead):
                self._transport.pause_reading()

    def eof_received(self) -> bool:
        """End the waiting read, as the peer sends no more. Return True to keep the connection open for writing: always,
        except over TLS."""
        self.has_ended = True
        self._end(self._incomplete())
        return not self._is_tls

    def connection_lost(self, error: Exception | None) -> None:
        self.has_ended, self._error = True, error
        self._end(error or self._incomplete())
        self._writing.connection_lost(error)
        self.on_lost()

    def pause_writing(self) -> None:
        self._writing.pause_writing()

    def resume_writing(self) -> None:
        self._writing.resume_writing()
