"""How one peer reaches another: the kinds, from best to worst."""

from __future__ import annotations

from enum import StrEnum


class Reach(StrEnum):
    """The way that bulk data takes between two peers; the same in both directions."""

    OPEN = "open"
    """One of the two can dial the other."""
    PUNCHED = "punched"
    """Both dialled at once, through their NATs."""
    RELAYED = "relayed"
    """A node that both can dial passes the bytes on, and can't read them."""
    NONE = "none"
    """Every way was tried, and failed."""

    @property
    def is_direct(self) -> bool:
        return self in (Reach.OPEN, Reach.PUNCHED)
