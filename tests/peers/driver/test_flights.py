"""Chunks that hang on one stream go out on another one."""

from __future__ import annotations

from peers.driver.outgoing import _Flights
from peers.protocol.effects import SendChunk
from tests.peers.fakes import Clock
from tests.peers.rounds import AT


def send(chunk: int, reduced: bool = False) -> SendChunk:
    return SendChunk(AT, "b", chunk, reduced)


def test_what_hangs_is_for_another_stream_the_oldest_first() -> None:
    clock = Clock()
    flights = _Flights(clock)
    for chunk in (1, 2):
        flights.begin(send(chunk), "first")
        clock.now += 1.0
    assert flights.late("second", patience=2.5) is None
    clock.now += 1.0
    assert flights.late("first", patience=2.5) is None, "it would hang there, too"
    assert flights.late("second", patience=2.5) == send(1)
    assert flights.late("third", patience=2.5) is None, "the second is about to send it"


def test_what_is_sent_once_more_has_twice_the_time() -> None:
    """Regression: where a link was slower than it had been, every stream sent the same chunks again each second."""
    clock = Clock()
    flights = _Flights(clock)
    flights.begin(send(1), "first")
    clock.now += 3.0
    flights.begin(send(1), "second")
    clock.now += 3.0
    assert flights.late("third", patience=2.5) is None
    clock.now += 3.0
    assert flights.late("third", patience=2.5) == send(1)


def test_where_all_chunks_take_long_none_hangs() -> None:
    """Regression: to a member with a slow link all was sent twice, since ours is fast."""
    clock = Clock()
    flights = _Flights(clock)
    for chunk in (1, 2):
        flights.begin(send(chunk), "first")
        clock.now += 6.0
        flights.end(send(chunk))
    for each in (flights, _Flights(clock, flights.usual)):
        each.begin(send(3), "first")
        clock.now += 11.0
        assert each.late("second", patience=1.0) is None
        clock.now += 2.0
        assert each.late("second", patience=1.0) == send(3)


def test_a_chunk_is_answered_once() -> None:
    flights = _Flights(Clock())
    flights.begin(send(1), "first")
    flights.begin(send(1), "second")
    flights.begin(send(1, reduced=True), "first")
    assert flights.end(send(1))
    assert not flights.end(send(1))
    assert flights.end(send(1, reduced=True))
