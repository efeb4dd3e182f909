"""The organiser's newest amendment that one peer knows, until the log has it (R18).

Heartbeats pass it on, and the leader takes it into the next closing entry. A leader that leaves it out delays it until
another one leads.
"""

from __future__ import annotations

from peers.log.state import LogState
from peers.values.manifest import Amendment, newest


class Amending:
    """The newest amendment that this peer has heard of."""

    def __init__(self, run: str, organiser: str) -> None:
        self._run = run
        self._organiser = organiser
        self._newest: Amendment | None = None

    def hear(self, amendment: Amendment | None) -> bool:
        """Take in an amendment. Return whether it is newer than ours and the organiser's."""
        if amendment is None or newest(self._newest, amendment) is self._newest:
            return False
        if not amendment.is_signed(self._run, self._organiser):
            return False
        self._newest = amendment
        return True

    def proposed(self, log: LogState) -> Amendment | None:
        """Return the amendment that the log does not have yet; None: it has the newest one that we know."""
        return self._newest if newest(log.amendment, self._newest) is not log.amendment else None
