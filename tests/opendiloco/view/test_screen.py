"""The table of peers on a terminal of 80 columns."""

from __future__ import annotations

import pytest
from rich.console import Console

from opendiloco.config.run_config import RunConfig
from opendiloco.view.run_view import PeerRow, _shown_state, peers_table, plain_line, row_of
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.values.identity import Identity

PEER = Identity.generate().peer_id


def beat(state: PeerState, index: int) -> Heartbeat:
    return Heartbeat(
        run="small-abc",
        peer=PEER,
        incarnation=0,
        sequence=1,
        state=state,
        index=index,
        head=b"\xab" * 32,
        state_digest=bytes(32),
        lineage_tokens=0,
        inner_step=3,
        tokens_per_second=11795.4,
        speed=0.0,
        loss=2.34567,
        addresses=(),
        roster_size=2,
    )


def test_wide_rows_fit_80_columns() -> None:
    rows = [
        PeerRow("this machine", ("averaging", "1000/1000", "1,234,567", "11.234", "12345/12345", "abcdefab", "open")),
        PeerRow("volunteer 12", ("ended with -9",)),
    ]
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(peers_table(rows, "small-abc"))
    shown = capture.get()
    assert "…" not in shown
    for text in ("inner", "outer", "digest", "reach", *rows[0].cells, *rows[1].cells):
        assert text in shown


def test_a_nickname_stands_beside_the_end_of_the_peer_id_and_is_no_markup(small_config: RunConfig) -> None:
    row = row_of(beat(PeerState.TRAINING, 2).model_copy(update={"name": "[red]Anna of the hill"}), small_config)
    assert row.name == f"[red]An…{PEER[-4:]}"
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(peers_table([row]))
    assert row.name in capture.get()


@pytest.mark.parametrize(
    ("state", "index", "shown"),
    [(PeerState.TRAINING, 6, "training"), (PeerState.TRAINING, 7, "finished"), (PeerState.LEAVING, 7, "leaving")],
)
def test_a_peer_beyond_the_last_outer_step_has_finished(
    small_config: RunConfig, state: PeerState, index: int, shown: str
) -> None:
    assert _shown_state(beat(state, index), small_config) == shown


def test_a_log_line_names_everything_in_full(small_config: RunConfig) -> None:
    line = plain_line(row_of(beat(PeerState.TRAINING, 2), small_config, "this machine"))
    assert line == (
        "this machine: state training, inner step 3/4, tokens/s 11,795, loss 2.346, outer step 2/7, "
        "log digest abababab, reach -"
    )
