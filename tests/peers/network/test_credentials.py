"""Only the peer whose id is wanted is let in, at either end."""

from __future__ import annotations

import asyncio
from datetime import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from peers.errors import RemoteProtocolError
from peers.network import connection
from peers.network.connection import Credentials, TlsTransport, _peer_of, greet, start_tls, welcome
from peers.network.data_port import CERTIFICATE_BYTES, Hello, read_opening
from peers.values.identity import Identity
from peers.values.wire import Reach
from tests.peers.network.pairs import connected, credentials_of, open_files, socket_pair
from tests.peers.network.test_throttle import simulate

ME, OTHER, IMPOSTOR = (credentials_of(name) for name in ("me", "other", "impostor"))


def certificate_of(key: object, signed_by: object, digest: SHA256 | None = None) -> bytes:
    builder = x509.CertificateBuilder().subject_name(connection.NAME).issuer_name(connection.NAME).serial_number(1)
    builder = builder.not_valid_before(datetime(2000, 1, 1)).not_valid_after(datetime(9999, 1, 1))
    made = builder.public_key(key.public_key()).sign(signed_by, digest)  # type: ignore[attr-defined,arg-type]
    return made.public_bytes(Encoding.DER)


async def outcome_of_hello(hello: Hello, dialler: Credentials) -> object:
    """What becomes of somebody who says so and has the key of `dialler`."""
    near, far = socket_pair()
    dialling = asyncio.create_task(start_tls(near, dialler.dialling, server_side=False))
    results: list[object] = [*await asyncio.gather(welcome(far, ME, hello, Reach.OPEN), return_exceptions=True)]
    dialled = (await asyncio.gather(dialling, return_exceptions=True))[0]
    if isinstance(dialled, TlsTransport):
        dialled.abort()
    near.close()
    return results[0]


def test_the_right_peer_is_known_by_its_id() -> None:
    async def scenario() -> None:
        ours, theirs = await connected(ME, OTHER)
        assert (ours.peer, theirs.peer) == (OTHER.peer_id, ME.peer_id)
        ours.close()
        theirs.close()

    simulate(scenario())


def test_whoever_answers_in_a_peers_place_is_found_out() -> None:
    async def scenario() -> None:
        near, far = socket_pair()

        async def answer() -> None:
            hello = await read_opening(far, "me")
            assert isinstance(hello, Hello)
            (await start_tls(far, IMPOSTOR.accepting(hello.certificate), server_side=True)).abort()

        outcome, _ = await asyncio.gather(
            greet(near, ME, OTHER.peer_id, True, Reach.OPEN), answer(), return_exceptions=True
        )
        assert isinstance(outcome, RemoteProtocolError)
        assert f"is not peer {OTHER.peer_id}" in str(outcome)
        assert near.fileno() == -1

    simulate(scenario())


@pytest.mark.parametrize("claim", ["its certificate", "a certificate of its key, signed by another"])
def test_whoever_claims_to_be_another_peer_is_not_let_in(claim: str) -> None:
    async def scenario() -> None:
        other, impostor = Identity.generate(), Identity.generate()
        certificate = Credentials(other).certificate
        if claim != "its certificate":
            certificate = certificate_of(other.private_key, impostor.private_key)
            assert _peer_of(certificate) == other.peer_id
        hello = Hello(to=ME.peer_id, certificate=certificate, is_yours=False)
        outcome = await outcome_of_hello(hello, Credentials(impostor))
        assert isinstance(outcome, RemoteProtocolError)
        assert "does not prove its peer id" in str(outcome)

    simulate(scenario())


def test_two_certificates_are_none() -> None:
    """OpenSSL would trust both of them."""
    with pytest.raises(RemoteProtocolError):
        _peer_of(OTHER.certificate + IMPOSTOR.certificate)


def test_whoever_wants_to_talk_to_somebody_else_is_sent_away() -> None:
    async def scenario() -> None:
        hello = Hello(to=OTHER.peer_id, certificate=IMPOSTOR.certificate, is_yours=False)
        outcome = await outcome_of_hello(hello, IMPOSTOR)
        assert isinstance(outcome, RemoteProtocolError)
        assert "not to this peer" in str(outcome)

    simulate(scenario())


def test_a_certificate_is_of_an_ed25519_key_and_small() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(RemoteProtocolError, match="Ed25519"):
        _peer_of(certificate_of(key, key, SHA256()))
    with pytest.raises(RemoteProtocolError, match="exceeds"):
        _peer_of(bytes(CERTIFICATE_BYTES + 1))
    key_of_peer = Ed25519PrivateKey.generate()
    assert _peer_of(certificate_of(key_of_peer, key_of_peer)) == Identity(key_of_peer).peer_id


@given(st.binary(max_size=300))
def test_garbage_is_no_certificate(garbage: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        _peer_of(garbage)


@given(st.integers(0, len(OTHER.certificate) - 1), st.integers(1, 255))
def test_a_changed_certificate_is_another_peers_or_none(place: int, change: int) -> None:
    """It is let in only if whoever shows it has the key in it: a changed one is of no use to anybody."""
    changed = bytearray(OTHER.certificate)
    changed[place] ^= change
    try:
        _peer_of(bytes(changed))
        OTHER.accepting(bytes(changed))
    except (RemoteProtocolError, OSError):
        pass


def test_nothing_of_the_key_is_left_open() -> None:
    before = open_files()
    one = Credentials(Identity.generate())
    assert one.accepting(OTHER.certificate) is one.accepting(OTHER.certificate)
    assert open_files() == before
