"""Identities: key files, peer ids, signatures."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import base58
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st

from peers.errors import LocalNetworkError
from peers.values.identity import Identity, is_peer_id, verify


def test_saved_identity_is_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "peer.pem"
    identity = Identity.generate()
    identity.save(path)
    assert Identity.load(path).peer_id == identity.peer_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["peer.pem"]


def test_load_or_create_keeps_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "peer.pem"
    assert Identity.load_or_create(path).peer_id == Identity.load_or_create(path).peer_id


def test_saving_never_replaces_a_key(tmp_path: Path) -> None:
    path = tmp_path / "peer.pem"
    path.write_text("precious")
    with pytest.raises(FileExistsError):
        Identity.generate().save(path)
    assert path.read_text() == "precious"
    assert os.listdir(tmp_path) == ["peer.pem"]


@pytest.mark.parametrize(
    ("number", "remedy", "code"),
    [
        (errno.ENOSPC, "Free some space there", 6),
        (errno.EDQUOT, "Free some space", 6),
        (errno.EROFS, "a directory that you may", 2),
    ],
)
def test_a_key_that_cannot_be_saved_has_the_remedy_of_its_cause(
    number: int, remedy: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: on a full disk, a directory was asked for in which one may write, and the exit code was 2."""

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(LocalNetworkError, match=remedy) as refused:
        Identity.load_or_create(tmp_path / "peer.pem")
    assert refused.value.exit_code == code
    assert os.listdir(tmp_path) == []


def test_missing_directory_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "peer.pem"
    with pytest.raises(LocalNetworkError, match=r"missing/peer\.pem"):
        Identity.load_or_create(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalNetworkError, match="No such file"):
        Identity.load(tmp_path / "peer.pem")


def test_other_files_are_not_identities(tmp_path: Path) -> None:
    other_curve = ec.generate_private_key(ec.SECP256R1())
    pkcs8 = PrivateFormat.PKCS8
    contents = [
        b"",
        b"garbage",
        other_curve.private_bytes(Encoding.PEM, pkcs8, NoEncryption()),
        other_curve.private_bytes(Encoding.PEM, pkcs8, BestAvailableEncryption(b"secret")),
    ]
    for content in contents:
        path = tmp_path / "other.pem"
        path.write_bytes(content)
        with pytest.raises(LocalNetworkError, match="not an identity file") as caught:
            Identity.load(path)
        assert caught.value.exit_code == 2


def test_peer_id_has_the_form_of_libp2p() -> None:
    identity = Identity.generate()
    assert identity.peer_id.startswith("12D3KooW")
    raw = base58.b58decode(identity.peer_id)
    assert raw[:6] == bytes((0, 36, 8, 1, 18, 32))
    private = identity.libp2p_private_key()
    assert private[:4] == bytes((8, 1, 18, 64))
    assert len(private) == 4 + 64
    assert private[-32:] == raw[-32:]


def test_signature_holds_for_its_signer_and_bytes_only() -> None:
    alice, bob = Identity.generate(), Identity.generate()
    signature = alice.sign(b"data")
    assert len(signature) == 64
    assert verify(alice.peer_id, b"data", signature)
    assert not verify(alice.peer_id, b"Data", signature)
    assert not verify(bob.peer_id, b"data", signature)
    assert not verify(alice.peer_id, b"data", signature[:-1])


def test_only_one_spelling_of_a_peer_id_counts() -> None:
    peer_id = Identity.generate().peer_id
    assert is_peer_id(peer_id)
    for spelling in (f" {peer_id}", f"{peer_id}\n", f"1{peer_id}", peer_id[:-1], "", "é", "1" * 100):
        assert not is_peer_id(spelling)


@given(st.text(max_size=80), st.binary(max_size=80), st.binary(max_size=80))
def test_verify_takes_anything(peer_id: str, data: bytes, signature: bytes) -> None:
    assert not verify(peer_id, data, signature)


def test_a_name_that_no_file_can_have_is_a_clear_error(tmp_path: Path) -> None:
    """Regression: this was taken for a bug of ours."""
    with pytest.raises(LocalNetworkError, match="File name too long"):
        Identity.load_or_create(tmp_path / ("x" * 300))
