"""The manifest of a run, signed by its organiser, and the amendments by which the organiser changes the run later.

The run id ends in the digest of the whole signed manifest, so a peer with the id can check every manifest that the
network returns. An invite is the run id with addresses of the swarm, in one string that needs no quoting in a shell:

    diloco:tiny-qz3h…4a@/ip4/203.0.113.5/tcp/31337/p2p/12D3KooW…,/ip4/…

A manifest never changes. An *amendment* is signed by the same key, and an entry of the log takes it in; it is in force
from the next outer step on. Amendments are numbered. An entry takes in only one with a higher number than all before
it, so nothing is replayed, and of two with one number the log has the first.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, Self

from pydantic import Field

from peers.errors import ManifestError, quoted
from peers.values.identity import SIGNATURE_BYTES, Identity, Signature, is_peer_id, verify
from peers.values.signed_heads import KEYS_LIMIT
from peers.values.wire import (
    PROTOCOL_VERSION,
    Count,
    PeerId,
    Value,
    WireError,
    digest_of,
    pack,
    pack_plain,
    printable,
    unpack,
)

SIZE_LIMIT = 64 * 1024  # maximum bytes of a packed manifest
# maximum bytes of a manifest's content; the rest of SIZE_LIMIT is for name, organiser and signature
CONTENT_LIMIT = SIZE_LIMIT - 1024
NAME = re.compile(r"[a-z0-9-]{1,40}")
DIGEST_CHARACTERS = 32  # number of lower-case base32 characters of the digest in a run id: 160 bits
RUN_ID = re.compile(rf"(?P<name>[a-z0-9-]{{1,40}})-[a-z2-7]{{{DIGEST_CHARACTERS}}}")
ADDRESS = re.compile(r"(/[A-Za-z0-9.:%_-]+)+/p2p/[A-Za-z0-9]+")
# prefix of signed bytes, so that no other signature is valid as a manifest's
SIGNING_CONTEXT = b"diloco-peer manifest\0"
AROUND = " \t\r\n<>()'\"`“”."
"""Characters that no invite begins or ends with, so that they are stripped."""
INVITE_PREFIX = "diloco:"
ASK_AGAIN = "Ask the organiser for the invite again."
# prefix of signed bytes, so that no other signature is valid as an amendment's
AMENDMENT_CONTEXT = b"diloco-peer amendment\0"
AMENDMENT_LIMIT = 512  # maximum bytes of an amendment's content, so that a heartbeat has room for two amendments
AMENDMENTS_LIMIT = 64  # maximum number of amendments of a run, since each header has all of them


class SignedManifest(Value):
    """The manifest of a run. `content` is the checked run.toml as canonical JSON; only the training side reads it."""

    version: Count
    name: Annotated[str, Field(strict=True)]
    organiser: PeerId
    content: Annotated[bytes, Field(strict=True, max_length=CONTENT_LIMIT)]
    signature: Signature

    @classmethod
    def create(cls, identity: Identity, name: str, content: Mapping[str, Any]) -> SignedManifest:
        """Return a manifest of the run `name`, with `content` (values that JSON can represent), signed by the
        organiser. Raises: ManifestError."""
        _check_name(name)
        try:
            canonical = _canonical(content)
        except (TypeError, ValueError, RecursionError) as error:
            message = f"the manifest cannot be written as JSON: {error}."
            raise ManifestError(message, "Use plain, finite values.") from error
        if len(canonical) > CONTENT_LIMIT:
            message = f"the manifest has {len(canonical)} bytes, {CONTENT_LIMIT} are allowed."
            raise ManifestError(message, "Leave out what peers can find elsewhere.")
        signed = _signed_bytes(name, identity.peer_id, canonical)
        return cls(
            version=PROTOCOL_VERSION,
            name=name,
            organiser=identity.peer_id,
            content=canonical,
            signature=identity.sign(signed),
        )

    @cached_property
    def digest(self) -> bytes:
        """The BLAKE3 digest of the packed manifest, 32 bytes."""
        return digest_of(self.pack())

    @cached_property
    def run_id(self) -> str:
        text = base64.b32encode(self.digest).decode().lower()
        return f"{self.name}-{text[:DIGEST_CHARACTERS]}"

    @property
    def values(self) -> dict[str, Any]:
        """The parsed content, as a new object at each access."""
        values: dict[str, Any] = json.loads(self.content)
        return values

    @cached_property
    def is_by_invitation(self) -> bool:
        """True if only peers with a ticket from the organiser may join the run."""
        admission = self.values.get("admission")
        return isinstance(admission, dict) and admission.get("mode") == "invite"

    @cached_property
    def archives(self) -> tuple[str, ...]:
        """The peer ids of the run's archives, whose signatures of the log's heads decide between branches; by default
        the organiser's."""
        named = self.values.get("archives")
        if named is None:
            return (self.organiser,)
        peers = named[:KEYS_LIMIT] if isinstance(named, list) else []
        return tuple(dict.fromkeys(peer for peer in peers if isinstance(peer, str) and is_peer_id(peer)))

    def pack(self) -> bytes:
        return pack(self)

    @classmethod
    def unpack(cls, data: bytes, expected_run_id: str | None = None) -> SignedManifest:
        """Return the manifest in untrusted bytes, after all checks. Raises: ManifestError naming the failed check."""
        try:
            manifest = unpack(cls, data, SIZE_LIMIT)
        except WireError as error:
            raise ManifestError(f"this is not a manifest: {error}.", ASK_AGAIN) from error
        manifest._check()
        if expected_run_id is not None and manifest.run_id != expected_run_id:
            raise ManifestError(
                f"the manifest does not match the run id {expected_run_id}: its digest makes it {manifest.run_id}.",
                "It was tampered with, or the run id has a typing mistake. " + ASK_AGAIN,
            )
        return manifest

    def _check(self) -> None:
        if self.version != PROTOCOL_VERSION:
            raise ManifestError(
                f"the run is of protocol version {self.version}; this diloco-peer speaks version {PROTOCOL_VERSION}.",
                "Install the version of the run's organiser; `diloco-peer --version` shows its protocol version.",
            )
        _check_name(self.name)
        if not verify(self.organiser, _signed_bytes(self.name, self.organiser, self.content), self.signature):
            raise ManifestError(f"the manifest's signature is not that of its organiser {self.organiser}.", ASK_AGAIN)
        try:
            values = json.loads(self.content)
            canonical = isinstance(values, dict) and _canonical(values) == self.content
        except (ValueError, RecursionError):
            canonical = False
        if not canonical:
            raise ManifestError("the manifest's content is not a canonical JSON object.", ASK_AGAIN)


@dataclass(frozen=True)
class Invite:
    """A run id, and the addresses of peers through which the run can be found."""

    run_id: str
    addresses: tuple[str, ...] = ()

    def __str__(self) -> str:
        addresses = "@" + ",".join(self.addresses) if self.addresses else ""
        return f"{INVITE_PREFIX}{self.run_id}{addresses}"

    @classmethod
    def parse(cls, text: str) -> Invite:
        """Return the invite in a text, which may be only a run id. Punctuation around the invite, as in an e-mail or a
        chat, is ignored. Raises: ManifestError naming the part that is wrong."""
        run_id, at, addresses = text.strip(AROUND).removeprefix(INVITE_PREFIX).partition("@")
        if run_id.startswith("/"):
            raise ManifestError(
                f"{quoted(run_id, 120)} is the address of a node, not a run.",
                "`diloco-peer runs --initial-peer ADDRESS` lists the runs that it knows.",
            )
        if RUN_ID.fullmatch(run_id) is None:
            raise ManifestError(
                f"{quoted(run_id, 120)} is not a run id: a name, a hyphen and {DIGEST_CHARACTERS} letters and digits.",
                "Copy the whole invite or run id that `diloco-peer run create` printed.",
            )
        parts = tuple(addresses.split(",")) if at else ()
        for address in parts:
            if ADDRESS.fullmatch(address) is None:
                raise ManifestError(
                    f"the invite's address {quoted(address, 120)} is not a multiaddress ending in /p2p/<peer id>.",
                    "Copy the whole invite; an address looks like /ip4/203.0.113.5/tcp/31337/p2p/12D3KooW….",
                )
        return cls(run_id, parts)


def _check_name(name: str) -> None:
    if NAME.fullmatch(name) is None:
        raise ManifestError(
            f"the run's name {quoted(name, 60)} is not allowed.", "Use 1 to 40 lower-case letters, digits and hyphens."
        )


def _canonical(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(dict(content), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def _signed_bytes(name: str, organiser: str, content: bytes) -> bytes:
    lengths = b"".join(len(part).to_bytes(4, "big") for part in (name.encode(), organiser.encode()))
    return SIGNING_CONTEXT + lengths + name.encode() + organiser.encode() + content


class Amendment(Value):
    """A signed change of the run's settings. Only the training side interprets its `content`, which replaces the
    content of all earlier amendments."""

    number: Annotated[int, Field(strict=True, ge=1, le=AMENDMENTS_LIMIT)]
    content: Annotated[bytes, Field(strict=True, max_length=AMENDMENT_LIMIT)]
    signature: Signature

    @classmethod
    def sign(cls, run: str, number: int, content: bytes, organiser: Identity) -> Self:
        """Return an amendment that the organiser signs. Raises: ValueError when the content is too long."""
        unsigned = cls(number=number, content=content, signature=bytes(SIGNATURE_BYTES))
        return unsigned.model_copy(update={"signature": organiser.sign(unsigned._text(run))})

    def __str__(self) -> str:
        return f"amendment {self.number} {printable(self.content.decode(errors='replace'))}"

    def is_signed(self, run: str, organiser: str) -> bool:
        """Return True if the organiser has signed this amendment for this run."""
        return _is_signed(self._text(run), self.signature, organiser)

    def _text(self, run: str) -> bytes:
        return AMENDMENT_CONTEXT + pack_plain([run, self.number, self.content])


class LoggedAmendment(Value):
    """An amendment that an entry has added to the log, and the `cursor` after that entry: the first sample number that
    was in no lease yet."""

    amendment: Amendment
    cursor: Count


# Cached, since heartbeats and headers repeat the same few amendments, and checking a signature takes 0.1 ms.
@lru_cache(maxsize=4096)
def _is_signed(text: bytes, signature: bytes, organiser: str) -> bool:
    return verify(organiser, text, signature)


def newest(*amendments: Amendment | None) -> Amendment | None:
    """Return the amendment with the highest number (the first one, if several have it); None if there are none."""
    return max(filter(None, amendments), key=lambda amendment: amendment.number, default=None)
