"""What a peer has contributed, and its place among the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendiloco.view import chronicle as chronicle_module
from opendiloco.view.chronicle import Chronicle, PeerTotals, Standing
from tests.peers.log.test_log_of_cycles import HEADERS, LOGS, fill, opened


@pytest.fixture
def chronicle() -> Chronicle:
    chronicle = Chronicle()
    chronicle.contributions = {"a": PeerTotals(70, 3), "b": PeerTotals(30, 1), "c": PeerTotals(0, 1)}
    chronicle.tokens = 100
    return chronicle


@pytest.mark.parametrize(
    ("peer", "standing"),
    [
        ("a", Standing(tokens=70, rounds=3, share=0.7, rank=1, peers=3)),
        ("b", Standing(tokens=30, rounds=1, share=0.3, rank=2, peers=3)),
        ("c", Standing(tokens=0, rounds=1, share=0.0, rank=3, peers=3)),
        ("new", Standing(tokens=0, rounds=0, share=0.0, rank=3, peers=4)),
    ],
)
def test_contributions_are_ranked(chronicle: Chronicle, peer: str, standing: Standing) -> None:
    assert chronicle.standing(peer) == standing


def test_where_there_is_no_entry_nobody_has_contributed() -> None:
    assert Chronicle().standing("a") is None


def test_an_archived_streaming_run_counts_each_cycle_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is read in slices."""
    monkeypatch.setattr(chronicle_module, "SLICE_SECONDS", 0.0)
    fill(opened(tmp_path))
    log, found = opened(tmp_path), Chronicle()
    for _ in LOGS:
        found.read(log)
    closing = [header for header in HEADERS if header.leases]
    assert [record.digest for record in found.records] == [header.digest for header in closing]
    assert found.tokens == found.records[-1].lineage_tokens == LOGS[-1].lineage_tokens
    assert found.contributions == {name: PeerTotals(400, entries=4, last=3) for name in "abc"}
