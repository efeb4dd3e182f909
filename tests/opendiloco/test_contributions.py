"""What a peer has contributed, and its place among the others."""

from __future__ import annotations

import pytest

from opendiloco.view.chronicle import Chronicle
from opendiloco.view.chronicle import Contribution as Brought
from opendiloco.view.contributions import Contribution, contribution_of


@pytest.fixture
def chronicle() -> Chronicle:
    chronicle = Chronicle()
    chronicle.contributions = {"a": Brought(70, 3), "b": Brought(30, 1), "c": Brought(0, 1)}
    chronicle.tokens = 100
    return chronicle


@pytest.mark.parametrize(
    ("peer", "contribution"),
    [
        ("a", Contribution(tokens=70, rounds=3, share=0.7, rank=1, peers=3)),
        ("b", Contribution(tokens=30, rounds=1, share=0.3, rank=2, peers=3)),
        ("c", Contribution(tokens=0, rounds=1, share=0.0, rank=3, peers=3)),
        ("new", Contribution(tokens=0, rounds=0, share=0.0, rank=3, peers=4)),
    ],
)
def test_contributions_are_ranked(chronicle: Chronicle, peer: str, contribution: Contribution) -> None:
    assert contribution_of(peer, chronicle) == contribution


def test_where_there_is_no_entry_nobody_has_contributed() -> None:
    assert contribution_of("a", Chronicle()) is None
