"""One TLS connection with a peer, which proves who it is. One of the two ends opens conversations on it.

A peer id contains the peer's Ed25519 public key. A peer's certificate is that key, signed by itself, so the peer id
alone decides whether a certificate is the right one: there is no authority, and nothing to exchange beforehand.

Bytes are decrypted straight into the memory that they are for: asyncio's StreamReader copies every byte three times,
which takes twice the processor's time. Only what comes while nobody waits, a few KiB, is put aside. The rest stays with
TLS and the kernel, which slows the sender down.
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

CONTEXTS = 1024  # kept, one per peer
NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "diloco-peer")])
EVER = (datetime(2000, 1, 1), datetime(9999, 1, 1))  # clocks of peers are never compared

HANDSHAKE_TIMEOUT = 10.0  # seconds

READ_AHEAD = 4096  # bytes; most headers fit in
LOW_WATER = 1 << 17
"""Bytes that must have come before we are woken, in the midst of something long: a long link gives them in thousands of
small pieces, and to be woken for each would cost more than to decrypt them."""
RECORD = 17 << 10  # bytes that TLS may have taken in, and not given to us yet: one record, with what it adds


class Credentials:
    """One peer's certificate, and what it takes to prove that it is ours. No two are alike: see `Link.add`."""

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
        """Context of the end that dials. The other end is checked by `_handshake` before anything is sent."""
        self.accepting = lru_cache(CONTEXTS)(self._accepting)
        """Return a context that accepts only who shows, and has the key of, this certificate (DER)."""

    def _accepting(self, certificate: bytes) -> ssl.SSLContext:
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=certificate)
        context.num_tickets = 0  # sessions are not resumed: each connection proves who it is
        return context

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        # The ssl module reads keys from files only. This one is in memory, and gone at once.
        with closing(os.fdopen(os.memfd_create("credentials"), "wb")) as file:
            file.write(self._pem)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return context


class Connection:
    """A connection with a peer. `is_ours`: we open conversations on it. `reach` says which way its bytes take.

    `certificate` (DER) is the other end's, which has another one after each start, and in each network.
    """

    def __init__(self, peer: str, stream: Stream, is_ours: bool, reach: Reach) -> None:
        self.peer = peer
        self.stream = stream
        self.is_ours = is_ours
        self.reach = reach
        self.certificate = _certificate(stream)

    @property
    def host(self) -> str:
        return parse_endpoint(endpoint_of_peer(self.stream.transport.get_extra_info("socket")))[0]

    @property
    def is_open(self) -> bool:
        return not (self.stream.has_ended or self.stream.transport.is_closing())

    def close(self) -> None:
        """End it at once: what was not sent yet is of no use to anybody."""
        self.stream.transport.abort()


async def greet(sock: socket.socket, credentials: Credentials, peer: str, is_ours: bool, reach: Reach) -> Connection:
    """Begin a connection as the end that speaks first. Takes the socket over.

    Raises: OSError; RemoteProtocolError when somebody else answers.
    """
    hello = Hello(to=peer, certificate=credentials.certificate, is_yours=not is_ours)
    with closed_on_failure(sock):
        await asyncio.get_running_loop().sock_sendall(sock, pack_opening(hello))
    stream = await _handshake(sock, peer, credentials.dialling, is_dialled=True)
    return Connection(peer, stream, is_ours, reach)


async def welcome(sock: socket.socket, credentials: Credentials, hello: Hello, reach: Reach) -> Connection:
    """Begin a connection as the end that is spoken to. Takes the socket over. Raises: OSError, RemoteProtocolError."""
    with closed_on_failure(sock):
        if hello.to != credentials.peer_id:
            raise RemoteProtocolError("unknown", f"it wants to talk to {hello.to}, not to us")
        peer = _peer_of(hello.certificate)
        context = credentials.accepting(hello.certificate)
    try:
        stream = await _handshake(sock, peer, context, is_dialled=False)
    except ssl.SSLError as error:
        raise _unproven(error) from error
    return Connection(peer, stream, hello.is_yours, reach)


async def _handshake(sock: socket.socket, peer: str, context: ssl.SSLContext, is_dialled: bool) -> Stream:
    """Have the handshake with this peer, and no other. Takes the socket over.

    Raises: OSError, also when it takes too long; RemoteProtocolError.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            if is_dialled:
                _, stream = await loop.create_connection(Stream, sock=sock, ssl=context, server_hostname="")
            else:
                _, stream = await loop.connect_accepted_socket(Stream, sock, ssl=context)
    except BaseException as error:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # asyncio, which has it now, closes it when it sees that
        if isinstance(error, TimeoutError):
            raise OSError("no TLS handshake in time") from error
        raise
    certificate = _certificate(stream)
    if certificate is None or _peer_of(certificate) != peer:
        stream.transport.abort()
        raise RemoteProtocolError(peer, f"the other end is not peer {peer}")
    return stream


def _certificate(stream: Stream) -> bytes | None:
    """Return the certificate (DER) that the other end has shown."""
    tls: ssl.SSLObject = stream.transport.get_extra_info("ssl_object")
    return tls.getpeercert(binary_form=True)


def _peer_of(certificate: bytes) -> str:
    """Return the id of the peer that a certificate (DER) is of. Raises: RemoteProtocolError."""
    if len(certificate) > CERTIFICATE_BYTES:
        raise _unproven(f"a certificate of {len(certificate)} bytes exceeds {CERTIFICATE_BYTES}")
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except Exception as error:  # the parser of a stranger's bytes raises many kinds
        raise _unproven(f"not a certificate: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise _unproven("its certificate is not of an Ed25519 key")
    return peer_id_of_bytes(key.public_bytes_raw())


def _unproven(reason: object) -> RemoteProtocolError:
    return RemoteProtocolError("unknown", f"it does not prove who it is: {reason}")


class Stream(asyncio.BufferedProtocol):
    """The bytes of one connection, both ways. One read at a time.

    Reads raise asyncio.IncompleteReadError when the stream ends before, TimeoutError when no byte comes for `patience`
    seconds (in the midst of something long, twice as many), and OSError when the connection breaks.
    """

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._ahead = memoryview(bytearray(READ_AHEAD))
        self._ahead_count = 0
        self._memory = memoryview(b"")  # what is being filled
        self._count = 0
        self.on_lost: Callable[[], None] = lambda: None
        self._ready: asyncio.Future[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._last_at = 0.0  # when a byte came, or the read began
        self._error: Exception | None = None
        self.has_ended = False
        self._low_water = 1
        self._has_room = asyncio.Event()  # to be written to
        self._has_room.set()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes. What is written to a connection that is gone is lost, and `drain` raises."""
        if not self.transport.is_closing():
            self.transport.write(data)

    async def drain(self) -> None:
        """Wait until the connection takes more. Raises: OSError."""
        await self._has_room.wait()
        if self.transport.is_closing():
            raise self._error if isinstance(self._error, OSError) else ConnectionResetError("the connection is closed")

    @property
    def has_unread(self) -> bool:
        """Whether something came that nobody has read."""
        return self._ahead_count > 0

    async def read(self, count: int, patience: float | None) -> bytes:
        data = bytearray(count)
        await self.fill(memoryview(data), patience)
        return bytes(data)

    async def fill(self, memory: memoryview, patience: float | None) -> None:
        """Fill memory of single bytes."""
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
        """Be woken when so much has come as certainly comes, or for every byte."""
        self._wake_after(max(1, min(LOW_WATER, len(self._memory) - self._count - RECORD)))

    def _wake_after(self, wanted: int) -> None:
        if wanted != self._low_water:
            self._low_water = wanted
            with suppress(OSError):
                sock = self.transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def _take(self, count: int) -> bytes:
        """From what was put aside."""
        taken = bytes(self._ahead[:count])
        self._ahead_count -= count
        self._ahead[: self._ahead_count] = bytes(self._ahead[count : count + self._ahead_count])
        if self._ahead_count < len(self._ahead):
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()
        return taken

    # Waiting --------------------------------------------------------------------------------------------------
    async def _wait(self, patience: float | None) -> None:
        if self.has_ended:
            raise self._error or self._incomplete()
        loop = asyncio.get_running_loop()
        self._ready, self._last_at = loop.create_future(), loop.time()
        if patience is not None:
            self._watch = loop.call_later(patience, self._be_patient, patience)
        try:
            await self._ready
        finally:
            self._ready = None
            if self._watch is not None:
                self._watch.cancel()
                self._watch = None

    def _be_patient(self, patience: float) -> None:
        loop = asyncio.get_running_loop()
        if (silent := loop.time() - self._last_at) >= patience and self._low_water > 1:
            self._wake_after(1)  # bytes may have come, but too few to wake us: the next one will
            self._last_at, silent = loop.time(), 0.0
        if silent < patience:
            self._watch = loop.call_later(patience - silent, self._be_patient, patience)
        else:
            self._end(TimeoutError(f"no byte came for {patience:g} s"))

    def _end(self, error: Exception | None = None) -> None:
        """Of the read that waits, if one does."""
        if self._ready is None or self._ready.done():
            return
        if error is None:
            self._ready.set_result(None)
        else:
            self._ready.set_exception(error)

    def _incomplete(self) -> asyncio.IncompleteReadError:
        return asyncio.IncompleteReadError(bytes(self._memory[: self._count]), len(self._memory))

    # What the transport calls ---------------------------------------------------------------------------------
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
                self.transport.pause_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def eof_received(self) -> None:
        """End the connection: TLS has no half-closed ones."""
        self.has_ended = True
        self._end(self._incomplete())

    def connection_lost(self, error: Exception | None) -> None:
        self.has_ended, self._error = True, error
        self._end(error or self._incomplete())
        self._has_room.set()
        self.on_lost()

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()
