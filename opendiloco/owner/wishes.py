"""What the owner wants of a volunteer now: to train, to pause and why, or to finish. Knows no clock of its own."""

from __future__ import annotations

from collections.abc import Mapping

CALM_SECONDS = 30.0
"""For how long a condition must not hold before training goes on: what comes and goes would stop it again and again."""
ASKED_REASON = "you asked for it"


class Wishes:
    """Takes in commands and conditions. `reasons` says why to pause, and is empty while the volunteer is to train."""

    def __init__(self) -> None:
        self.is_asked = False
        self.overruled = set[str]()
        """Names of conditions that do not count until they have ended."""
        self.is_finishing = False
        self._held = dict[str, tuple[str, float]]()  # reasons by name, and when each was last seen
        self._seen = set[str]()  # names of the conditions that held at the last look

    @property
    def reasons(self) -> tuple[str, ...]:
        asked = (ASKED_REASON,) if self.is_asked else ()
        return asked + tuple(reason for name, (reason, _) in self._held.items() if name not in self.overruled)

    @property
    def is_paused(self) -> bool:
        return bool(self.reasons)

    def observe(self, reasons: Mapping[str, str], now: float) -> None:
        """Take in which conditions hold at time `now`: each counts from the second look in a row on that sees it, since
        a program may be busy for a moment, and until it has been gone for a while."""
        for name, reason in reasons.items():
            if name in self._seen or name in self._held:
                self._held[name] = reason, now
        self._seen = set(reasons)
        for name, (_, seen) in tuple(self._held.items()):
            if now - seen >= CALM_SECONDS:
                del self._held[name]
        self.overruled &= set(self._held)

    def pause(self) -> str:
        self.is_asked = True
        return "pausing"

    def resume(self, anyway: bool = False) -> str:
        """Go on; with `anyway` also against conditions that hold now, until they have ended."""
        self.is_asked = False
        if anyway:
            self.overruled |= set(self._held)
        if self.is_paused:
            return f"still paused: {', '.join(self.reasons)}; `resume --anyway` overrules that"
        return "training goes on"

    def finish(self) -> str:
        self.is_finishing = True
        return "leaving after this outer step"
