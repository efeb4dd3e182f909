"""With whom a peer gossips."""

from __future__ import annotations

from peers.presence.partners import CALLER_TERM, CALLERS, PARTNERS, PAUSES_LIMIT, TERM, Partners

OTHERS = [f"peer{number}" for number in range(40)]


def known_since(peer: str) -> float:
    return float(peer.removeprefix("peer"))


def partners() -> Partners:
    return Partners(b"seed", known_since)


def test_one_is_replaced_in_each_term() -> None:
    ours, before = partners(), set[str]()
    for term in range(5):
        ours.choose(OTHERS, lambda peer: False, (TERM + 1.0) * term)
        assert len(ours.chosen) == PARTNERS
        assert len(before & set(ours.chosen)) in ((0,) if not term else (PARTNERS - 1, PARTNERS))
        before = set(ours.chosen)


def test_those_that_are_slow_have_stand_ins() -> None:
    ours = partners()
    ours.choose(OTHERS, lambda peer: False, 0.0)
    slow = set(ours.chosen)
    for second in range(5):
        ours.choose(OTHERS, lambda peer: peer in slow, float(second))
        assert len(ours.chosen) == 2 * PARTNERS
    ours.choose(OTHERS, lambda peer: True, 6.0)
    assert len(ours.chosen) == 2 * PARTNERS, "and no more than that"


def test_who_is_gone_or_paused_is_no_partner() -> None:
    ours = partners()
    ours.choose(OTHERS[:4], lambda peer: False, 0.0)
    ours.pause(ours.chosen[0], 0.0)
    gone = ours.chosen[1]
    left = [peer for peer in OTHERS[:4] if peer != gone]
    ours.choose(left, lambda peer: False, 0.5)
    assert len(ours.chosen) == 2
    assert gone not in ours.chosen


def test_callers_that_are_known_for_longer_come_first() -> None:
    """Made-up peers are new, and can't have the places of those that were there before."""
    ours = partners()
    assert all(ours.has_place_for(peer, 0.0) for peer in OTHERS[20 : 20 + CALLERS])
    assert not ours.has_place_for("peer30", 0.0)
    assert ours.has_place_for("peer3", 0.0)
    assert not ours.has_place_for(OTHERS[19 + CALLERS], 0.0), "the newest has lost its place"
    assert ours.has_place_for("peer20", CALLER_TERM / 2)
    assert ours.has_place_for("peer30", CALLER_TERM), "those that called no more have left theirs"


def test_pauses_that_are_over_are_forgotten() -> None:
    ours = partners()
    for number in range(PAUSES_LIMIT + 10):
        ours.pause(f"other{number}", float(number))
    assert len(ours._pauses) <= 10
    ours.end_pause(f"other{PAUSES_LIMIT + 9}")
    assert not ours.is_paused(f"other{PAUSES_LIMIT + 9}", PAUSES_LIMIT + 9.0)
