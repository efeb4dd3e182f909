"""What teams have contributed: their peers together, as these say themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from opendiloco.view.chronicle import Contribution
from peers.presence.heartbeat import Heartbeat


@dataclass
class TeamContribution:
    """Of all peers that say that they are in one team, or said so last."""

    tokens: int = 0
    peers: int = 0


class Teams:
    """Which team each peer names. Of those that have contributed it is known also when they are gone."""

    def __init__(self) -> None:
        self._teams: dict[str, str] = {}

    def observe(self, heartbeats: Iterable[Heartbeat], contributors: Collection[str]) -> None:
        said = {beat.peer: beat.team for beat in heartbeats}
        kept = {peer: team for peer, team in self._teams.items() if peer in contributors}
        self._teams = {peer: team for peer, team in (kept | said).items() if team}

    def of(self, peer: str) -> str:
        """Return a peer's team; empty: none."""
        return self._teams.get(peer, "")

    def board(self, contributions: Mapping[str, Contribution]) -> dict[str, TeamContribution]:
        """Return each team's contribution, the largest first."""
        found: dict[str, TeamContribution] = {}
        for peer, team in self._teams.items():
            if peer in contributions:
                of_team = found.setdefault(team, TeamContribution())
                of_team.tokens += contributions[peer].tokens
                of_team.peers += 1
        return dict(sorted(found.items(), key=lambda one: (-one[1].tokens, one[0])))
