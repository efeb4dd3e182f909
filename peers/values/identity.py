"""A peer's Ed25519 identity: its key file, its libp2p peer id, and signing and checking signatures.

The peer id is libp2p's: base58 of the identity multihash of the protobuf-encoded public key ("12D3KooW…"). It contains
the whole key, so the signer's id is enough to check a signature, and libp2p's handshake proves the same id.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Protocol, TypeAlias

import base58
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from pydantic import Field

from peers.errors import FullDiskError, IdentityFileError, is_full, quoted, remedy_for

SIGNATURE_BYTES = 64  # bytes of an Ed25519 signature
KEY_BYTES = 32  # bytes of an Ed25519 public key
PEER_ID_MAX_LENGTH = 64  # maximum characters of a text that is decoded as a peer id; the ids of Ed25519 keys have 52
# Multihash "identity" of 36 bytes: a protobuf with field 1 (key type) = 1 (Ed25519), field 2 = 32 bytes of key.
PEER_ID_PREFIX = bytes((0x00, 0x24, 0x08, 0x01, 0x12, KEY_BYTES))
# The beginning of a private key's protobuf: field 1 (key type) = 1 (Ed25519), field 2 = 64 bytes, seed and public key.
PRIVATE_KEY_PREFIX = bytes((0x08, 0x01, 0x12, 2 * KEY_BYTES))


class Identity:
    """A peer's Ed25519 key pair, whose public key is in the peer's id."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self.private_key = private_key
        self.public_bytes = private_key.public_key().public_bytes_raw()
        self.peer_id = peer_id_of_bytes(self.public_bytes)

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def of_seed(cls, seed: bytes) -> Identity:
        """Return the key pair that follows from 32 secret bytes, the seed."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @property
    def seed(self) -> bytes:
        """The private key's seed, 32 bytes."""
        return self.private_key.private_bytes_raw()

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Return the identity in a PEM file. Raises: IdentityFileError when the file cannot be read or has no
        unencrypted Ed25519 key."""
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
        except OSError as error:
            reason = error.strerror or str(error)
            raise IdentityFileError(
                f"cannot read the identity file {path}: {reason}.", "Check the path and its permissions."
            ) from error
        except (ValueError, TypeError, UnsupportedAlgorithm):  # a TypeError means that the key is encrypted
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise IdentityFileError(
                f"{path} is not an identity file: it holds no unencrypted Ed25519 private key in PEM form.",
                "Name another file, or one that does not exist yet to have a new identity made.",
            )
        return cls(key)

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Return the identity in the file `path`. If there is no such file, create an identity and save it there.
        Raises: IdentityFileError."""
        with suppress(OSError):  # another process created the file first, or its name is invalid, which load() reports
            if not path.exists():
                cls.generate().save(path)
        return cls.load(path)

    def save(self, path: Path) -> None:
        """Write the identity to a PEM file (PKCS8, mode 0600), whole or not at all, never over an existing file.

        Raises:
            FileExistsError: the file exists.
            IdentityFileError: the folder is missing or not writable.
            FullDiskError: the disk or a quota is full.
        """
        pem = self.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        try:
            # mkstemp gives mode 0600 from the start; a link, unlike a rename, refuses to replace a key.
            descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(pem)
                    file.flush()
                    os.fsync(file.fileno())
                os.link(temporary, path)
            finally:
                os.unlink(temporary)
        except FileExistsError:
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise (FullDiskError if is_full(error) else IdentityFileError)(
                f"cannot save the identity file {path}: {reason}.",
                remedy_for(error, "Name a file in a directory that you may write to."),
            ) from error

    def sign(self, data: bytes) -> bytes:
        """Return this identity's signature of these bytes, 64 bytes."""
        return self.private_key.sign(data)

    def verify(self, peer: str, data: bytes, signature: bytes) -> bool:
        """Return True if `signature` is the peer's signature of `data`; see the function `verify`."""
        return verify(peer, data, signature)

    def libp2p_private_key(self) -> bytes:
        """Return the private key in libp2p's protobuf encoding, for the key file of libp2p's daemon."""
        return PRIVATE_KEY_PREFIX + self.seed + self.public_bytes


@lru_cache(maxsize=4096)  # the same signatures are checked several times, at 0.1 ms each
def verify(peer_id: str, data: bytes, signature: bytes) -> bool:
    """Return True if `signature` is the peer's signature of `data`. Return False also for a malformed peer id."""
    key = _public_key(peer_id)
    if key is None or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


@lru_cache(maxsize=4096)
def peer_id_of_bytes(key: bytes) -> str:
    """Return the peer id that contains this public key, given as 32 bytes."""
    return base58.b58encode(PEER_ID_PREFIX + key).decode()


def key_of_peer(peer_id: str) -> bytes:
    """Return the public key in a peer id, 32 bytes. Raises: ValueError when `peer_id` is no peer id."""
    if not is_peer_id(peer_id):
        raise ValueError(f"{quoted(peer_id, 80)} is not the peer id of an Ed25519 key")
    return base58.b58decode(peer_id)[len(PEER_ID_PREFIX) :]


def is_peer_id(text: str) -> bool:
    """Return True if `text` is the peer id of an Ed25519 key."""
    return _public_key(text) is not None


@lru_cache(maxsize=4096)
def _public_key(peer_id: str) -> Ed25519PublicKey | None:
    if len(peer_id) > PEER_ID_MAX_LENGTH:
        return None
    try:
        raw = base58.b58decode(peer_id)
    except ValueError:
        return None
    # Re-encoding rejects other spellings of the same key (white space, leading "1"s).
    if not raw.startswith(PEER_ID_PREFIX) or base58.b58encode(raw).decode() != peer_id:
        return None
    try:
        return Ed25519PublicKey.from_public_bytes(raw[len(PEER_ID_PREFIX) :])
    except ValueError:  # the key's length is wrong
        return None


Signature = Annotated[bytes, Field(strict=True, min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
Verify: TypeAlias = Callable[[str, bytes, bytes], bool]
"""A function of a peer's id, bytes and a signature that returns whether the peer has signed these bytes."""


class Keys(Protocol):
    """The interface of a peer's key pair, which signs, and checks other peers' signatures by the keys in their ids."""

    def sign(self, data: bytes) -> bytes:
        """Return this peer's signature of these bytes, 64 bytes."""

    def verify(self, peer: str, data: bytes, signature: bytes) -> bool:
        """Return True if `signature` is the peer's signature of `data`."""
