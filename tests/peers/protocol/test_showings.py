"""A proof is shown once to each, and again only where there is reason to."""

from __future__ import annotations

from peers.protocol.showings import Showings


def test_each_is_shown_once_to_each() -> None:
    showings = Showings(1.0)
    for now in (0.0, 100.0):
        due = [showings.is_due(peer, proof, now, is_lacking=False) for peer in "ab" for proof in (b"one", b"two")]
        assert due == [now == 0.0] * 4


def test_what_lacks_is_shown_again_after_ever_longer_pauses() -> None:
    showings = Showings(1.0)
    shown = [now for now in range(100) if showings.is_due("a", b"one", float(now), is_lacking=True)]
    assert shown == [0, 1, 3, 7, 15, 31, 63]
