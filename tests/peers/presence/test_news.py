"""The bytes of an exchange: bounded and checked before anything is made of them."""

from __future__ import annotations

import zlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.errors import RemoteProtocolError
from peers.presence.life_signs import SIGN, LifeSign
from peers.presence.news import (
    HEARTBEATS_LIMIT,
    NEWS_BYTES,
    SIGNS_LIMIT,
    WHOLES_BYTES,
    WHOLES_LIMIT,
    News,
    Request,
    Whole,
    Wholes,
)
from peers.values.wire import MESSAGE_LIMIT, PROTOCOL_VERSION, pack

SIGN_OF_LIFE = LifeSign(b"12345678", 9, 1, b"x" * 12)
WHOLE = Whole(signed=b"signed", slots=3, link=b"x" * 12)


def test_news_is_read_back() -> None:
    for news in (News(5), News(7, True, (SIGN_OF_LIFE,) * 3, (b"abcdefgh",) * 2, (WHOLE,))):
        assert News.unpack("a", news.pack()) == news


def test_the_largest_fits_into_a_message() -> None:
    whole = Whole(signed=bytes(range(256)) * 16, slots=240, link=b"x" * 12)
    most = News(
        2**62 - 1, True, (SIGN_OF_LIFE,) * SIGNS_LIMIT, (b"abcdefgh",) * HEARTBEATS_LIMIT, (whole,) * WHOLES_LIMIT
    )
    request = pack(Request(run="r" * 128, after=2**62 - 1, news=most.packed))
    assert len(request) <= NEWS_BYTES + 256 < MESSAGE_LIMIT
    assert News.of("a", Request.unpack("a", request).news) == most


def packed(**changes: object) -> bytes:
    return pack(News(5).packed.model_copy(update=changes))


BAD = {
    "half a sign": packed(signs=bytes(SIGN.size + 1)),
    "half a tag": packed(asked=bytes(9)),
    "too many signs": packed(signs=bytes(SIGN.size * (SIGNS_LIMIT + 1))),
    "too many tags": packed(asked=bytes(8 * (HEARTBEATS_LIMIT + 1))),
    "no zlib": packed(wholes=b"garbage"),
    "cut off": packed(wholes=zlib.compress(bytes(1000))[:-2]),
    "more behind it": packed(wholes=zlib.compress(b"\x91\x90") + b"more"),
    "a bomb": packed(wholes=zlib.compress(bytes(WHOLES_BYTES + 1))),
    "no heartbeats": packed(wholes=zlib.compress(b"\x01")),
    "too many heartbeats": packed(
        wholes=zlib.compress(pack(Wholes.model_construct(wholes=(WHOLE,) * (WHOLES_LIMIT + 1))))
    ),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_what_is_malformed_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        News.unpack("a", data)


def test_another_version_is_named() -> None:
    request = Request(version=PROTOCOL_VERSION + 1, run="tiny", after=0, news=News(0).packed)
    with pytest.raises(RemoteProtocolError, match=f"is {PROTOCOL_VERSION + 1}, ours is {PROTOCOL_VERSION}"):
        Request.unpack("a", pack(request))


@given(st.binary(max_size=200))
def test_garbage_is_refused_in_words(data: bytes) -> None:
    with suppress(RemoteProtocolError):
        News.unpack("a", data)
    with suppress(RemoteProtocolError):
        Request.unpack("a", data)
