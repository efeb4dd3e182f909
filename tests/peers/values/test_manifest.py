"""Manifests certify themselves; invites say what is wrong with them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.errors import ManifestError
from peers.values.identity import Identity
from peers.values.manifest import SIZE_LIMIT, Invite, SignedManifest
from peers.values.wire import PROTOCOL_VERSION, pack

IDENTITY = Identity.generate()
CONTENT: dict[str, Any] = {"name": "tiny", "outer": {"momentum": 0.9, "learning_rate": 0.7}, "text": "é"}
ADDRESS = f"/ip4/203.0.113.5/tcp/31337/p2p/{IDENTITY.peer_id}"


def manifest() -> SignedManifest:
    return SignedManifest.create(IDENTITY, "tiny", CONTENT)


def altered(**changes: Any) -> bytes:
    """A manifest with fields replaced after it was signed."""
    return pack(manifest().model_copy(update=changes))


def test_manifest_survives_the_network() -> None:
    original = manifest()
    received = SignedManifest.unpack(original.pack(), original.run_id)
    assert received.pack() == original.pack()
    assert received.run_id == original.run_id
    assert received.values == CONTENT
    assert received.organiser == IDENTITY.peer_id
    assert received.digest == original.digest
    assert len(received.digest) == 32


def test_run_id_names_run_and_digest() -> None:
    run_id = manifest().run_id
    name, _, digest = run_id.rpartition("-")
    assert name == "tiny"
    assert len(digest) * 5 >= 128
    assert run_id == run_id.lower()


def test_run_id_depends_on_everything() -> None:
    others = [
        SignedManifest.create(Identity.generate(), "tiny", CONTENT),
        SignedManifest.create(IDENTITY, "tiny2", CONTENT),
        SignedManifest.create(IDENTITY, "tiny", CONTENT | {"more": 1}),
    ]
    assert len({manifest().run_id, *(other.run_id for other in others)}) == 4


def test_equal_content_gives_equal_bytes() -> None:
    reordered = dict(reversed(CONTENT.items()))
    assert SignedManifest.create(IDENTITY, "tiny", reordered).pack() == manifest().pack()


def test_digest_must_match_the_run_id() -> None:
    expected = manifest().run_id
    other = SignedManifest.create(IDENTITY, "tiny", CONTENT | {"seed": 1})
    with pytest.raises(ManifestError, match=f"does not match the run id {expected}"):
        SignedManifest.unpack(other.pack(), expected)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"content": b'{"name":"evil"}'}, "signature"),
        ({"organiser": Identity.generate().peer_id}, "signature"),
        ({"name": "other"}, "signature"),
        ({"signature": bytes(64)}, "signature"),
        ({"name": "No Good"}, "name"),
        (
            {"version": PROTOCOL_VERSION + 1},
            f"version {PROTOCOL_VERSION + 1}; this diloco-peer speaks version {PROTOCOL_VERSION}",
        ),
    ],
    ids=["content", "organiser", "name", "signature", "bad name", "version"],
)
def test_tampering_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ManifestError, match=reason) as caught:
        SignedManifest.unpack(altered(**changes))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("name", ["", "Upper", "under_score", "x" * 41, "näme", "\ud800"])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(ManifestError, match="name"):
        SignedManifest.create(IDENTITY, name, CONTENT)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1}])
def test_content_must_be_json(value: object) -> None:
    with pytest.raises(ManifestError, match="JSON"):
        SignedManifest.create(IDENTITY, "tiny", {"value": value})


def test_oversized_manifest_is_refused() -> None:
    with pytest.raises(ManifestError, match="are allowed"):
        SignedManifest.create(IDENTITY, "tiny", {"text": "x" * SIZE_LIMIT})
    with pytest.raises(ManifestError, match="exceed the limit"):
        SignedManifest.unpack(bytes(SIZE_LIMIT + 1))


@given(st.binary(max_size=500))
def test_arbitrary_bytes_never_crash(data: bytes) -> None:
    with pytest.raises(ManifestError):
        SignedManifest.unpack(data)


@given(st.integers(0, len(manifest().pack()) - 1), st.integers(1, 255))
def test_every_flipped_byte_is_noticed(position: int, mask: int) -> None:
    original = manifest()
    data = bytearray(original.pack())
    data[position] ^= mask
    with pytest.raises(ManifestError):
        SignedManifest.unpack(bytes(data), original.run_id)


def test_invite_round_trip() -> None:
    invite = Invite(manifest().run_id, (ADDRESS, ADDRESS.replace("ip4/203.0.113.5", "dns4/boot.example.org")))
    assert Invite.parse(str(invite)) == invite
    for copied in (f"  {invite}\n", f"<{invite}>", f"'{invite}'", f"“{invite}”.", f"`{invite}`."):
        assert Invite.parse(copied) == invite


def test_run_id_alone_is_an_invite() -> None:
    run_id = manifest().run_id
    assert Invite.parse(run_id) == Invite(run_id)
    assert Invite.parse(f"diloco:{run_id}") == Invite(run_id)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a run id"),
        ("tiny", "not a run id"),
        ("diloco:", "not a run id"),
        ("tiny-" + "a" * 31, "not a run id"),
        ("Tiny-" + "a" * 32, "not a run id"),
        ("/ip4/203.0.113.5/tcp/31337/p2p/12D3KooW", "is the address of a node, not a run"),
        ("tiny-" + "a" * 32 + "@", "address ''"),
        ("tiny-" + "a" * 32 + "@203.0.113.5:31337", "address '203.0.113.5:31337'"),
        ("tiny-" + "a" * 32 + "@/ip4/203.0.113.5/tcp/31337", "/p2p/"),
        ("tiny-" + "a" * 32 + "@" + ADDRESS + ",", "address ''"),
    ],
)
def test_wrong_invites_say_why(text: str, reason: str) -> None:
    with pytest.raises(ManifestError, match=reason) as caught:
        Invite.parse(text)
    assert caught.value.remedy


@given(st.text(max_size=100))
def test_any_text_is_an_invite_or_an_error(text: str) -> None:
    with suppress(ManifestError):
        Invite.parse(text)
