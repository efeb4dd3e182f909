"""What a leader asks of others: whether they have made its fragment's entry already.

Heartbeats do not tell, and nobody says so who has no business with us any more.
"""

from __future__ import annotations

from peers.log.state import LogState
from peers.presence.presence import Presence
from peers.protocol.desk import Desk
from peers.protocol.effects import Send
from peers.protocol.messages import Inquire


class Inquiries:
    """Of one slot."""

    def __init__(self, desk: Desk, presence: Presence, log: LogState) -> None:
        self.asked = ""
        """Who was asked last."""
        self._desk = desk
        self._presence = presence
        self._log = log

    def ask_another(self) -> None:
        """Ask the next one. Of one fragment heartbeats do tell."""
        others = sorted(peer for peer in self._presence.live() if peer in self._log.roster)
        if others and self._log.fragments > 1:
            self.asked = next((peer for peer in others if peer > self.asked), others[0])
            self._desk.emit(Send(self.asked, Inquire(position=self._log.position)))
