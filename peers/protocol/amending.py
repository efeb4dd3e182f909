"""The organiser's newest amendment that this peer knows, until the log has it (R18).

Heartbeats pass it on, and the leader puts it into the next closing entry. A leader that leaves it out only delays it
until another one leads.
"""

from __future__ import annotations

from peers.log.settings import RunSettings
from peers.log.state import LogState
from peers.values.manifest import Amendment, newest


class Amending:
    """The newest amendment that this peer knows and can follow. `refused` is the newest one that it cannot follow."""

    def __init__(self, settings: RunSettings) -> None:
        self.refused: Amendment | None = None
        self._settings = settings
        self._newest: Amendment | None = None

    def hear(self, amendment: Amendment | None) -> bool:
        """Take in an amendment. Return whether it is the organiser's, and newer than those that were known."""
        if amendment is None or newest(self._newest, amendment) is self._newest or amendment == self.refused:
            return False
        if not amendment.is_signed(self._settings.run, self._settings.organiser):
            return False
        if not self._settings.why_not_followed(amendment):
            self._newest = amendment
        elif newest(self.refused, amendment) is amendment:
            self.refused = amendment
        else:
            return False
        return True

    def proposed(self, log: LogState) -> Amendment | None:
        """Return the amendment that the log does not have yet; None if the log has the newest one that this peer
        knows."""
        return self._newest if newest(log.amendment, self._newest) is not log.amendment else None
