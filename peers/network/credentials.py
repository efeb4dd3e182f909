"""Who is at the other end: certificates made of identity keys, and TLS contexts that accept exactly one of them.

A peer id contains the peer's Ed25519 public key. A peer's certificate is that key, signed by itself, so the peer id
alone decides whether a certificate is the right one: there is no authority, and nothing to exchange beforehand.
"""

from __future__ import annotations

import os
import ssl
from contextlib import closing
from datetime import datetime
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from peers.values.identity import Identity, peer_id_of_key

CERTIFICATE_BYTES = 1024  # at most; ours have about 200
CONTEXTS = 1024  # kept, one per peer
NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "diloco-peer")])
EVER = (datetime(2000, 1, 1), datetime(9999, 1, 1))  # clocks of peers are never compared


class NotItsCertificateError(Exception):
    """A certificate that is not the one of the peer that it should be of."""


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
        """Context of the end that dials. Who answers is checked by `check` before anything is sent."""
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


def check(connection: ssl.SSLObject, peer_id: str) -> None:
    """Raises: NotItsCertificateError unless it is this peer that the other end of a connection has proven to be."""
    try:
        certificate = connection.getpeercert(binary_form=True)
    except ValueError as error:
        raise NotItsCertificateError("the connection ended before anybody had proven anything") from error
    if certificate is None or peer_id_of_certificate(certificate) != peer_id:
        raise NotItsCertificateError(f"whoever answers is not peer {peer_id}")


def peer_id_of_certificate(certificate: bytes) -> str:
    """Return the peer id that a certificate (DER) is of. Raises: NotItsCertificateError."""
    if len(certificate) > CERTIFICATE_BYTES:
        raise NotItsCertificateError(f"a certificate of {len(certificate)} bytes exceeds {CERTIFICATE_BYTES}")
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except Exception as error:  # the parser of a stranger's bytes raises many kinds
        raise NotItsCertificateError(f"not a certificate: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise NotItsCertificateError("its certificate is not of an Ed25519 key")
    return peer_id_of_key(key)
