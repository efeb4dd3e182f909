"""A run on a terminal, from heartbeats alone: one table row for each peer, and how peers reach each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opendiloco.config.run_config import RunConfig
from opendiloco.evaluation_turns import bits_per_byte
from opendiloco.view.run_view import RunView, reachability, shown_state
from peers.presence.heartbeat import NAMED_PEERS, Heartbeat, PeerState
from peers.values.signed_heads import SignedHeads

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("peer", "state", "inner step", "tokens/s", "loss", "outer step", "log digest", "reach")
HEADINGS = ("peer", "state", "inner", "tokens/s", "loss", "outer", "digest", "reach")
"""The same in the table, which has to fit 80 columns."""
NUMBERS = frozenset(HEADINGS[2:6])
STYLES = {
    PeerState.TRAINING: "green",
    PeerState.READY: "cyan",
    PeerState.AVERAGING: "magenta",
    PeerState.LEAVING: "red",
}
LARGEST_EXPONENT = 100.0  # others may claim any loss


@dataclass(frozen=True)
class Row:
    """What the table says of one peer; `cells` may be fewer than the columns."""

    name: str
    cells: tuple[str, ...]
    style: str = "dim"


def short_name(peer: str) -> str:
    """The end of a peer id; its beginning is the same for all."""
    return f"…{peer[-8:]}"


def row_of(beat: Heartbeat, config: RunConfig, name: str | None = None) -> Row:
    """A peer's row from its heartbeat."""
    cells = (
        shown_state(beat, config),
        f"{beat.inner_step}/{config.training.inner_steps}",
        f"{beat.tokens_per_second:,.0f}",
        "-" if beat.loss is None else f"{beat.loss:.3f}",
        f"{beat.index}/{config.total_outer_steps}",
        beat.head.hex()[:8],
        reachability(beat),
    )
    return Row(name or short_name(beat.peer), cells, STYLES.get(beat.state, "dim"))


def peers_table(rows: Iterable[Row], title: str | None = None) -> Table:
    from rich.table import Table  # a bootstrap node has no terminal to draw on, and does without

    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in NUMBERS else "left", no_wrap=True)
    for row in rows:
        table.add_row(row.name, *row.cells, style=row.style)
    return table


def held_out_lines(view: RunView, bytes_per_token: float | None = None) -> list[str]:
    """Return how good theta is, as the peers last found; nothing while none of them has looked.

    In bits per byte, too, if it is known how much text a token stands for.
    """
    if not view.held_out:
        return []
    found = view.held_out[-1]
    perplexity = math.exp(min(found.loss, LARGEST_EXPONENT))
    said = f"perplexity {perplexity:,.1f}"
    if bytes_per_token is not None:
        said += f", {bits_per_byte(found.loss, bytes_per_token):.3f} bits per byte"
    return [f"held-out loss {found.loss:.3f} ({said}) after outer step {found.index}"]


def plain_line(row: Row) -> str:
    """The same as one line for a log."""
    said = ", ".join(f"{column} {cell}" for column, cell in zip(COLUMNS[1:], row.cells, strict=False))
    return f"{row.name}: {said}"


def reach_lines(heartbeats: Iterable[Heartbeat]) -> list[str]:
    """Return a line for each peer that reaches others only through relays, or not at all, or whose work is in vain."""
    lines = []
    for beat in heartbeats:
        said = [f"relayed to {_count(beat.relayed)}"] if beat.relayed else []
        said += [f"cannot reach {_count(beat.unreached)} ({', '.join(beat.unreached)})"] if beat.unreached else []
        said += [beat.trouble] if beat.trouble else []
        if said:
            lines.append(f"…{beat.peer[-8:]}: {'; '.join(said)}")
    return lines


def _count(tails: Sequence[str]) -> str:
    """A heartbeat names only so many."""
    return f"{len(tails)}{' or more' if len(tails) == NAMED_PEERS else ''}"


def signed_lines(signed: SignedHeads) -> list[str]:
    """Return a line about the newest signed head, if there is one."""
    newest = signed.newest
    return [] if newest is None else [f"archives have signed outer step {newest.index} ({newest.head.hex()[:8]})"]


def plain_signed(signed: SignedHeads) -> dict[str, object] | None:
    """Return the newest signed head as JSON can say it."""
    newest = signed.newest
    return None if newest is None else {"outer_step": newest.index, "log_digest": newest.head.hex()}
