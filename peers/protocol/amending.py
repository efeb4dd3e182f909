"""A store for the organiser's newest amendment, until an entry of the log contains it (R18).

Heartbeats pass it on, and the leader puts it into the next closing entry. A leader that leaves it out only delays it
until another one leads.
"""

from __future__ import annotations

from peers.log.settings import RunSettings
from peers.log.state import LogState
from peers.values.manifest import Amendment, newest


class Amending:
    """The organiser's newest amendment that this version of the program can follow. `refused` is the newest amendment
    that it cannot follow."""

    def __init__(self, settings: RunSettings) -> None:
        self.refused: Amendment | None = None
        self._settings = settings
        self._newest: Amendment | None = None

    def hear(self, amendment: Amendment | None) -> bool:
        """Store an amendment, and return True, if the organiser has signed it and it is newer than the stored one.
        Otherwise return False."""
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
        """Return this peer's newest amendment if it is newer than the log's; otherwise None."""
        return self._newest if newest(log.amendment, self._newest) is not log.amendment else None
