"""A run on a terminal: one table row for each peer, from heartbeats alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.table import Table

from opendiloco.config import RunConfig
from peers.heartbeat import Heartbeat, PeerState

COLUMNS = ("peer", "state", "inner step", "tokens/s", "loss", "outer step", "log digest")
STYLES = {
    PeerState.TRAINING: "green",
    PeerState.READY: "cyan",
    PeerState.AVERAGING: "magenta",
    PeerState.LEAVING: "red",
}
FINISHED = "finished"


def short_name(peer: str) -> str:
    """The end of a peer id; its beginning is the same for all."""
    return f"…{peer[-8:]}"


def cells(beat: Heartbeat, config: RunConfig) -> tuple[str, ...]:
    """What the columns after the first say."""
    training = beat.state is PeerState.TRAINING
    finished = training and beat.index >= config.total_outer_steps
    return (
        FINISHED if finished else str(beat.state),
        f"{beat.inner_step}/{config.training.inner_steps}",
        f"{beat.tokens_per_second:,.0f}",
        "–" if beat.loss is None else f"{beat.loss:.3f}",
        f"{beat.index}/{config.total_outer_steps}",
        beat.head.hex()[:8],
    )


def peers_table(
    heartbeats: Iterable[Heartbeat], config: RunConfig, name: Callable[[str], str] = short_name, title: str = ""
) -> Table:
    """One row for each heartbeat."""
    table = Table(title=title or None, title_justify="left", title_style="bold", expand=False)
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if 2 <= number <= 5 else "left", no_wrap=True)
    for beat in heartbeats:
        table.add_row(name(beat.peer), *cells(beat, config), style=STYLES.get(beat.state, "dim"))
    return table


def plain_line(beat: Heartbeat, config: RunConfig) -> str:
    """The same as one line for a log."""
    state, inner, speed, loss, outer, digest = cells(beat, config)
    return f"{state}: inner step {inner}, outer step {outer}, loss {loss}, {speed} tokens/s, log digest {digest}"
