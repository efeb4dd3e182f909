"""Heartbeats: what is signed is what is read, and nothing else is."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from peers.errors import RemoteProtocolError
from peers.presence.heartbeat import (
    NAMED_PEERS,
    SIGNING_CONTEXT,
    SIZE_LIMIT,
    TAIL,
    Heartbeat,
    HeldOutLoss,
    PeerState,
    SignedHeartbeat,
)
from peers.values.identity import SIGNATURE_BYTES, Identity
from peers.values.manifest import AMENDMENT_LIMIT, AMENDMENTS_LIMIT, Amendment
from peers.values.tickets import SHOWN_BYTES
from peers.values.wire import PROTOCOL_VERSION, check_nickname, decode, pack

IDENTITY = Identity.generate()
RUN = "tiny-" + "a" * 32


def heartbeat(**changes: Any) -> Heartbeat:
    fields: dict[str, Any] = {
        "run": RUN,
        "peer": IDENTITY.peer_id,
        "incarnation": 5,
        "sequence": 1_700_000_000_000,
        "state": PeerState.TRAINING,
        "index": 3,
        "head": bytes(32),
        "state_digest": bytes(range(32)),
        "lineage_tokens": 4096,
        "inner_step": 7,
        "tokens_per_second": 5000.0,
        "speed": 5000.0,
        "loss": 2.5,
        "addresses": (f"/ip4/127.0.0.1/tcp/4001/p2p/{IDENTITY.peer_id}",),
        "roster_size": 3,
    }
    return Heartbeat(**(fields | changes))


def test_signed_heartbeat_is_read_back() -> None:
    for state in PeerState:
        original = heartbeat(state=state)
        assert Heartbeat.verify(original.sign(IDENTITY), RUN) == original


def test_lifetime_is_part_of_what_is_signed() -> None:
    assert heartbeat(lifetime=5.0).expires == 1_700_000_005.0


def test_largest_heartbeat_fits() -> None:
    most = 2**62 - 1
    counts: dict[str, Any] = dict.fromkeys(("sequence", "index", "lineage_tokens", "inner_step", "roster_size"), most)
    held_out = HeldOutLoss(index=most, loss=1e300)
    addresses = ("/" + "x" * 199,) * 8
    amendment = Amendment(number=AMENDMENTS_LIMIT, content=bytes(AMENDMENT_LIMIT), signature=bytes(SIGNATURE_BYTES))
    counts |= {"amendment": amendment, "proposed": amendment}
    counts |= {
        "relays": addresses[:3],
        "relayed": ("x" * TAIL,) * NAMED_PEERS,
        "unreached": ("y" * TAIL,) * NAMED_PEERS,
    }
    counts |= {"trouble": "t" * 250, "ticket": bytes(SHOWN_BYTES), "endpoints": ("[2001:db8::5]:31338",) * 8}
    largest = heartbeat(run="r" * 128, addresses=addresses, team="t" * 32, name="n" * 32, held_out=held_out, **counts)
    signed = largest.sign(IDENTITY)
    assert len(signed) <= SIZE_LIMIT
    assert Heartbeat.verify(signed) == largest


@pytest.mark.parametrize("name", ["x" * 33, " a", "a ", "a\nb", "ä", "a\x1b[1m"])
def test_a_teams_name_is_short_and_plain(name: str) -> None:
    with pytest.raises(ValueError, match="team"):
        heartbeat(team=name)
    with pytest.raises(ValueError, match="name"):
        heartbeat(name=name)
    with pytest.raises(ValueError, match="not a valid name of a team"):
        check_nickname(name)


def test_only_the_peer_itself_signs() -> None:
    with pytest.raises(ValueError, match="cannot sign"):
        heartbeat().sign(Identity.generate())


def test_another_run_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="not other") as caught:
        Heartbeat.verify(heartbeat().sign(IDENTITY), "other")
    assert caught.value.peer == IDENTITY.peer_id


def test_forged_heartbeat_is_refused() -> None:
    payload = pack(heartbeat())
    forger = Identity.generate()
    for signature in (forger.sign(SIGNING_CONTEXT + payload), IDENTITY.sign(payload)):
        forged = pack(SignedHeartbeat(payload=payload, signature=signature))
        with pytest.raises(RemoteProtocolError, match="signature"):
            Heartbeat.verify(forged, RUN)


def test_other_protocol_version_is_named() -> None:
    payload = pack(heartbeat(version=PROTOCOL_VERSION + 1))
    signed = pack(SignedHeartbeat(payload=payload, signature=IDENTITY.sign(SIGNING_CONTEXT + payload)))
    named = f"protocol version is {PROTOCOL_VERSION + 1}, ours is {PROTOCOL_VERSION}"
    with pytest.raises(RemoteProtocolError, match=named):
        Heartbeat.verify(signed, RUN)


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": math.nan},
        {"loss": math.inf},
        {"tokens_per_second": -1.0},
        {"speed": -1.0},
        {"head": bytes(31)},
        {"index": -1},
        {"index": 1.0},
        {"sequence": 2**62},
        {"state": "sleeping"},
        {"addresses": ("no slash",)},
        {"addresses": ("/x",) * 9},
        {"lifetime": 1e9},
        {"unknown": 1},
    ],
    ids=str,
)
def test_bad_fields_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        heartbeat(**wrong)


@given(st.binary(max_size=3000))
def test_arbitrary_bytes_never_crash(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Heartbeat.verify(data, RUN)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=16) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=30,
)


@given(PLAIN, st.integers(0, len(Heartbeat.model_fields) - 1))
def test_wrongly_typed_fields_never_crash(value: object, position: int) -> None:
    plain = decode(pack(heartbeat()))
    assert isinstance(plain, list)
    plain[position] = value
    payload = msgpack.packb(plain)
    signed = msgpack.packb([payload, IDENTITY.sign(SIGNING_CONTEXT + payload)])
    with suppress(RemoteProtocolError):  # a value of the right type is fine
        Heartbeat.verify(signed, RUN)


@given(st.integers(0, len(heartbeat().sign(IDENTITY)) - 1), st.integers(1, 255))
def test_every_flipped_byte_is_noticed(position: int, mask: int) -> None:
    signed = bytearray(heartbeat().sign(IDENTITY))
    signed[position] ^= mask
    with pytest.raises(RemoteProtocolError):
        Heartbeat.verify(bytes(signed), RUN)
