"""One TLS connection with a peer, which proves who it is. One of the two ends opens conversations on it.

A peer id contains the peer's Ed25519 public key. A peer's certificate is that key, signed by itself, so the peer id
alone decides whether a certificate is the right one: there is no authority, and nothing to exchange beforehand.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from contextlib import closing
from datetime import datetime
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from peers.errors import RemoteProtocolError
from peers.network.data_port import CERTIFICATE_BYTES, Hello, pack_opening
from peers.network.direct_io import DirectReads, TlsTransport, start_tls
from peers.network.sockets import closed_on_failure, endpoint_of_peer, parse_endpoint
from peers.values.identity import Identity, peer_id_of_key
from peers.values.wire import Reach

CONTEXTS = 1024  # kept, one per peer
NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "diloco-peer")])
EVER = (datetime(2000, 1, 1), datetime(9999, 1, 1))  # clocks of peers are never compared

HANDSHAKE_TIMEOUT = 10.0  # seconds


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
        """End it at once: what was not sent yet is of no use to anybody."""
        self.writer.transport.abort()


async def greet(sock: socket.socket, credentials: Credentials, peer: str, is_ours: bool, reach: Reach) -> Connection:
    """Begin a connection as the end that speaks first. Takes the socket over.

    Raises: OSError; RemoteProtocolError when somebody else answers.
    """
    hello = Hello(to=peer, certificate=credentials.certificate, is_yours=not is_ours)
    with closed_on_failure(sock):
        transport = await _handshake(sock, peer, credentials.dialling, pack_opening(hello))
    return Connection(peer, transport, is_ours, reach)


async def welcome(sock: socket.socket, credentials: Credentials, hello: Hello, reach: Reach) -> Connection:
    """Begin a connection as the end that is spoken to. Takes the socket over. Raises: OSError, RemoteProtocolError."""
    with closed_on_failure(sock):
        if hello.to != credentials.peer_id:
            raise RemoteProtocolError("unknown", f"it wants to talk to {hello.to}, not to us")
        peer = _peer_of(hello.certificate)
        try:
            transport = await _handshake(sock, peer, credentials.accepting(hello.certificate))
        except ssl.SSLError as error:
            raise _unproven(error) from error
    return Connection(peer, transport, hello.is_yours, reach)


async def _handshake(sock: socket.socket, peer: str, context: ssl.SSLContext, opening: bytes = b"") -> TlsTransport:
    """Have the handshake with this peer, and no other, after an opening if we dial.

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
    """Return the id of the peer that a certificate (DER) is of. Raises: RemoteProtocolError."""
    if len(certificate) > CERTIFICATE_BYTES:
        raise _unproven(f"a certificate of {len(certificate)} bytes exceeds {CERTIFICATE_BYTES}")
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except Exception as error:  # the parser of a stranger's bytes raises many kinds
        raise _unproven(f"not a certificate: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise _unproven("its certificate is not of an Ed25519 key")
    return peer_id_of_key(key)


def _unproven(reason: object) -> RemoteProtocolError:
    return RemoteProtocolError("unknown", f"it does not prove who it is: {reason}")
