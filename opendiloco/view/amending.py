"""The organiser's amendments of a run's outer optimizer, as whoever looks at its peers sees them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peers.values.amendments import Amendment, newest

if TYPE_CHECKING:
    from opendiloco.run import Run
    from peers.presence.heartbeat import Heartbeat


@dataclass(frozen=True)
class Amended:
    """The amendment that is `in_force` at the peer that has trained most, and a newer one that is `proposed`: peers
    know it, and no entry of that log has it yet."""

    in_force: Amendment | None
    proposed: Amendment | None

    @classmethod
    def seen_in(cls, run: Run, heartbeats: Iterable[Heartbeat]) -> Amended:
        """Read heartbeats. What the run's organiser has not signed is passed over."""
        beats = sorted(heartbeats, key=lambda beat: (beat.lineage_tokens, beat.sequence), reverse=True)
        organiser = run.manifest.organiser
        known = {
            one: None
            for beat in beats
            for one in (beat.amendment, beat.proposed)
            if one is not None and one.is_signed(run.run_id, organiser)
        }
        said = beats[0].amendment if beats else None
        return cls._beside(said if said in known else None, *known)

    def as_logged(self, in_force: Amendment | None) -> Amended:
        """Return the same by a log, at whose end this amendment is in force: what peers say of that does not count."""
        return self._beside(in_force, self.in_force, self.proposed)

    @classmethod
    def _beside(cls, in_force: Amendment | None, *known: Amendment | None) -> Amended:
        """Proposed is the newest that is known, if it is newer than what is in force."""
        latest = newest(in_force, *known)
        return cls(in_force, latest if latest is not in_force else None)

    @property
    def newest(self) -> Amendment | None:
        """Return the amendment that the next one comes after."""
        return self.proposed or self.in_force

    def values(self, run: Run) -> tuple[float, float]:
        """Return the outer learning rate (its schedule's peak) and momentum that are in force."""
        source = self.in_force or run.config.outer_optimizer
        return source.learning_rate, source.momentum

    def lines(self) -> list[str]:
        """Return what is to be told to people: nothing, where the manifest's values are in force."""
        lines = [f"in force: {self.in_force}"] if self.in_force else []
        return [*lines, f"waits for an entry: {self.proposed}"] if self.proposed else lines

    def plain(self, run: Run) -> dict[str, object]:
        """Return the same as JSON can say it."""
        learning_rate, momentum = self.values(run)
        return {
            "learning_rate": learning_rate,
            "momentum": momentum,
            "amendment": plain_amendment(self.in_force),
            "proposed": plain_amendment(self.proposed),
        }


def plain_amendment(amendment: Amendment | None) -> dict[str, object] | None:
    """An amendment as JSON can say it."""
    if amendment is None:
        return None
    return {
        "number": amendment.number,
        "learning_rate": amendment.learning_rate,
        "momentum": amendment.momentum,
    }
