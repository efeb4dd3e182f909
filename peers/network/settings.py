"""What an operator chooses about links."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkSettings:
    """`port` is where bulk connections are accepted; 0: any free one.

    `relay_limit` is how many bytes a second this node passes on for others, in all; None: it relays for nobody.
    """

    port: int = 0
    relay_limit: float | None = None

    @classmethod
    def of_megabits(cls, port: int, relay_limit: float | None) -> LinkSettings:
        """Return what options say, whose limits are in megabits a second."""
        return cls(port, None if relay_limit is None else relay_limit * 1e6 / 8)
