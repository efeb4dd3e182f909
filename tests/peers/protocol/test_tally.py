"""What the members of an attempt say has come of it, counted."""

from __future__ import annotations

from math import inf

from peers.protocol.messages import Complete, Prepared, Told
from peers.protocol.tally import Tally
from tests.peers.builders import LOG, attempt

AT = attempt(LOG)


def told(kind: type[Told], payload: str) -> Told:
    digest = payload.encode().ljust(32)
    signature = {"signature": bytes(64)} if kind is Complete else {}
    return kind(attempt=AT, payload=digest, missed=(), entry=digest, **signature)


def tally_of(**said: str) -> Tally:
    tally = Tally()
    for now, (peer, payload) in enumerate(said.items()):
        tally.hear(peer, told(Prepared, payload), now)
    return tally


def test_those_differ_who_do_not_say_what_most_do() -> None:
    tally = tally_of(a="x", b="y", c="y", d="z")
    assert sorted(tally.differing) == ["a", "d"]
    assert sorted(tally.unlike("a")) == ["b", "c", "d"]
    assert tally.unlike("e") == []
    assert tally.are_unlike("a", "b")
    assert not tally.are_unlike("b", "c")
    assert not tally.are_unlike("a", "e")
    assert tally.differing_since == 1.0


def test_whoever_says_something_else_takes_back_what_it_has_said_until_it_has_signed() -> None:
    tally = tally_of(a="x", b="y")
    assert not tally.hear("b", told(Prepared, "x"), 5.0)
    assert (tally.differing, tally.differing_since, tally.pair(0)) == ([], inf, None)
    tally.hear("b", told(Complete, "y"), 6.0)
    tally.hear("b", told(Prepared, "x"), 7.0)
    assert tally.are_unlike("a", "b")
    assert tally.differing_since == 6.0


def test_in_the_end_each_is_compared_with_each_that_differs() -> None:
    tally = tally_of(a="x", b="x", c="x", d="x", e="y", f="z")
    pairs = {tally.pair(turn) for turn in range(8)}
    assert pairs == {(one, other) for one in "abcd" for other in "ef"}
