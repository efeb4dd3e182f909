"""Terms of leaders, for stories about who leads."""

from __future__ import annotations

from peers.log import state as electorate


def let_none_end() -> None:
    """In this process the first member of the roster leads for longer than any story lasts."""
    electorate.TERM = 1 << 40
