"""Changes of a run that goes on, as its organiser signs them: numbered, bounded, and for one run."""

from __future__ import annotations

import pytest

from peers.values.identity import Identity
from peers.values.manifest import AMENDMENT_LIMIT, AMENDMENTS_LIMIT, Amendment, newest
from peers.values.wire import WireError, pack, unpack

ORGANISER, STRANGER = Identity.of_seed(bytes(32)), Identity.of_seed(bytes(31) + b"1")
RUN = "tiny"


def amendment(number: int = 1, content: bytes = b"{}") -> Amendment:
    return Amendment.sign(RUN, number, content, ORGANISER)


def test_the_organiser_alone_amends_a_run_and_for_each_run_anew() -> None:
    signed = amendment()
    assert signed.is_signed(RUN, ORGANISER.peer_id)
    assert not signed.is_signed(RUN, STRANGER.peer_id)
    assert not signed.is_signed("another", ORGANISER.peer_id)
    assert not signed.is_signed(RUN, "")


@pytest.mark.parametrize("change", [{"number": 2}, {"content": b"{} "}, {"content": b""}])
def test_every_value_is_signed(change: dict[str, object]) -> None:
    assert not amendment().model_copy(update=change).is_signed(RUN, ORGANISER.peer_id)


def test_it_crosses_the_network_in_few_bytes() -> None:
    """Heartbeats have two."""
    for content in (b"{}", bytes(AMENDMENT_LIMIT)):
        packed = pack(amendment(64, content))
        assert unpack(Amendment, packed) == amendment(64, content)
        assert len(packed) < len(content) + 80


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("number", 0),
        ("number", True),
        ("number", AMENDMENTS_LIMIT + 1),
        ("content", "{}"),
        ("content", bytes(AMENDMENT_LIMIT + 1)),
        ("signature", b""),
    ],
)
def test_what_is_out_of_bounds_is_no_amendment(field: str, value: object) -> None:
    with pytest.raises(WireError, match=field):
        unpack(Amendment, pack(amendment().model_copy(update={field: value})))


def test_content_that_is_too_long_is_not_signed() -> None:
    with pytest.raises(ValueError, match="content"):
        amendment(content=bytes(AMENDMENT_LIMIT + 1))


def test_content_is_named_without_what_could_rewrite_a_terminal() -> None:
    assert str(amendment(3, b'{"a":1}')) == 'amendment 3 {"a":1}'
    assert "\x1b" not in str(amendment(3, b"\x1b[1m\xff"))


def test_the_newest_has_the_highest_number_and_of_two_the_first() -> None:
    one, other, second = amendment(1, b"one"), amendment(1, b"other"), amendment(2)
    assert newest() is newest(None) is None
    assert newest(None, one, second, other) is second
    assert newest(one, other) is one
    assert newest(other, one) is other
