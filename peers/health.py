"""Whether this process does what it is there for. Its parts say so; /healthz and a metric tell others.

A part either gives signs of life, each of which says when the next one is due, or says what it fails at. What nobody
has spoken of is well: a process that still starts is not ill.
"""

from __future__ import annotations

from collections.abc import Callable

from peers.values.system import now


class Health:
    """What the parts of a process say of themselves. May be read in another thread than that of the parts."""

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self._clock = clock
        self._due: dict[str, tuple[float, float, str]] = {}  # when it was seen last, when it is due, what lacks then
        self._failures: dict[str, str] = {}

    def expect(self, part: str, within: float, lacking: str) -> None:
        """Note a sign of life. Unless another one comes `within` so many seconds, the process is ill for what is
        `lacking`: "no heartbeat was published"."""
        seen = self._clock()
        self._due[part] = seen, seen + within, lacking

    def failing(self, part: str, reason: str) -> None:
        """Note that a part fails, until it is `well` or `over`."""
        self._failures[part] = reason

    def well(self, part: str) -> None:
        """Note that a part does not fail any more."""
        self._failures.pop(part, None)

    def over(self, part: str) -> None:
        """Note that nothing is expected of a part any more."""
        self._due.pop(part, None)
        self._failures.pop(part, None)

    @property
    def reasons(self) -> list[str]:
        """Return why the process is ill; nothing: it is healthy."""
        time = self._clock()
        late = [
            f"{lacking} for {time - seen:.0f} seconds" for seen, due, lacking in list(self._due.values()) if time > due
        ]
        return [*self._failures.copy().values(), *late]


HEALTH = Health()
"""This process's."""
