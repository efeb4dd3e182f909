"""Values as bytes: canonical, and only what was declared."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.log.header import Header, Member, Position
from peers.values.leases import SampleRange
from peers.values.wire import WireError, decode, digest_of, pack, unpack
from tests.peers.logs import first_log

MEMBER = Member(peer="a", tokens=5, samples=(SampleRange(1, 3), SampleRange(7, 9)))


def test_values_are_lists_in_field_order() -> None:
    assert msgpack.unpackb(pack(MEMBER)) == ["a", 5, [[1, 3], [7, 9]], 0, 0, 0]


def test_round_trip_gives_the_same_bytes() -> None:
    header = first_log().last
    assert header is not None
    assert unpack(Header, pack(header)) == header
    assert pack(unpack(Header, pack(header))) == pack(header)


def test_a_copy_with_other_fields_has_another_digest() -> None:
    """Regression: a copy kept the digest that was computed before, so it seemed to be the value that it was made of."""
    header = first_log().last
    assert header is not None
    before, copied = header.digest, header.model_copy(update={"payload": bytes(32)})
    assert copied.digest == unpack(Header, pack(copied)).digest != before


def test_digest_is_blake3() -> None:
    assert digest_of(b"").hex() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


@pytest.mark.parametrize(
    "plain",
    [
        ["a", True, [], 0, 0, 0],
        ["a", 5.0, [], 0, 0, 0],
        ["a", "5", [], 0, 0, 0],
        ["a", -1, [], 0, 0, 0],
        ["a", 2**62, [], 0, 0, 0],
        [b"a", 5, [], 0, 0, 0],
        ["", 5, [], 0, 0, 0],
        ["a b", 5, [], 0, 0, 0],
        ["a" * 129, 5, [], 0, 0, 0],
        ["a", 5, [[1, 1]], 0, 0, 0],
        ["a", 5, [[3, 1]], 0, 0, 0],
        ["a", 5, [[-1, 1]], 0, 0, 0],
        ["a", 5, [[0, 2**62]], 0, 0, 0],
        ["a", 5, [[0, True]], 0, 0, 0],
        ["a", 5, [[0.0, 1]], 0, 0, 0],
        ["a", 5, [["0", 1]], 0, 0, 0],
        ["a", 5, [[0, 1, 2]], 0, 0, 0],
        ["a", 5, [[0, 1]] * 1001, 0, 0],
        ["a", 5],
        ["a", 5, [], 0, 0, 0, 1],
        {"peer": "a", "tokens": 5},
        {"peer": "a", "tokens": 5, "samples": [], "more": 1},
        None,
        7,
        "member",
    ],
    ids=repr,
)
def test_wrong_values_are_refused(plain: Any) -> None:
    with pytest.raises(WireError, match="Member"):
        unpack(Member, msgpack.packb(plain))


def test_error_names_the_field() -> None:
    with pytest.raises(WireError, match=r"^Position\.head: .*32 bytes"):
        unpack(Position, msgpack.packb([1, b"short", 0]))


def test_too_many_bytes_are_not_looked_at() -> None:
    with pytest.raises(WireError, match="101 bytes exceed the limit of 100"):
        decode(bytes(101), 100)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xa3ab",
        b"\xa1\xff",
        b"\x91" * 100_000,
        b"\x81\x90\x01",
        b"\x81\x01\x01",
        b"\x01\x01",
        b"\xc7\x0c\xff" + b"\xff" * 12,
        b"\xd7\xff" + b"\xff" * 8,
        b"\xd4\xff\x00",
    ],
    ids=lambda data: data[:8].hex() or "nothing",
)
def test_malformed_msgpack_is_refused(data: bytes) -> None:
    with suppress(WireError):  # a timestamp is well-formed, and no field is one
        assert not isinstance(decode(data), list | dict | int | str | bytes)


@given(st.binary(max_size=400))
def test_arbitrary_bytes_never_crash(data: bytes) -> None:
    for kind in (Header, Member, Position):
        with pytest.raises(WireError):
            unpack(kind, data)


@given(st.data())
def test_damaged_values_never_crash(data: st.DataObject) -> None:
    header = first_log().last
    assert header is not None
    packed = bytearray(pack(header))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    with suppress(WireError):  # a flipped number is a number
        assert isinstance(decode(pack(unpack(Header, bytes(packed)))), list)
