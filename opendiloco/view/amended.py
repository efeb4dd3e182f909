"""The organiser's amendments of a run as text and as JSON values: the amendment in force, the proposed one, and the
values that they change.

An amendment that this version does not understand is marked as such. `Overrides.of` keeps this version from training,
following or checking entries under it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opendiloco.config.overrides import NO_OVERRIDES, Overrides, bare_in_words, value_in_words
from opendiloco.config.run_config import RunConfig
from opendiloco.errors import AmendmentError
from opendiloco.run import Run
from opendiloco.view.chronicle import Chronicle
from peers.presence.heartbeat import Heartbeat
from peers.values.manifest import Amendment, newest

NOT_UNDERSTOOD = "this version does not understand it: upgrade diloco-peer"


@dataclass(frozen=True)
class Amended:
    """The amendments of a run: the one `in_force` at the peer whose log counts the most tokens, and a newer one that is
    `proposed`, which no entry of that log contains yet."""

    in_force: Amendment | None
    proposed: Amendment | None

    @classmethod
    def seen_in(cls, run: Run, heartbeats: Iterable[Heartbeat], chronicle: Chronicle | None = None) -> Amended:
        """Return the organiser's signed amendments that heartbeats name. With a `chronicle`, the amendment in force is
        that of its log, otherwise that of the peer whose log counts the most tokens."""
        beats = sorted(heartbeats, key=lambda beat: (beat.lineage_tokens, beat.sequence), reverse=True)
        organiser = run.manifest.organiser
        known = {
            one: None
            for beat in beats
            for one in (beat.amendment, beat.proposed)
            if one is not None and one.is_signed(run.run_id, organiser)
        }
        claimed = beats[0].amendment if beats else None
        in_force = chronicle.amendment if chronicle is not None else claimed if claimed in known else None
        latest = newest(in_force, *known)
        return cls(in_force, latest if latest is not in_force else None)

    @property
    def latest(self) -> Amendment | None:
        return self.proposed or self.in_force

    def lines(self) -> list[str]:
        """Return a line of text for the amendment in force and one for the proposed amendment, if there are any."""
        lines = [f"in force: {amendment_in_words(self.in_force)}"] if self.in_force else []
        return [*lines, f"waits for an entry: {amendment_in_words(self.proposed)}"] if self.proposed else lines

    def plain(self, config: RunConfig) -> dict[str, Any]:
        """Return all present values that amendments can change, the amendment in force, and the proposed amendment, as
        JSON values."""
        return values_in_force(config, self.in_force) | {
            "amendment": plain_amendment(self.in_force),
            "proposed": plain_amendment(self.proposed),
        }


def plain_amendment(amendment: Amendment | None) -> dict[str, Any] | None:
    """Return an amendment's number and the values that it sets, as JSON values."""
    if amendment is None:
        return None
    overrides = _overrides(amendment)
    values = {"problem": NOT_UNDERSTOOD} if overrides is None else overrides.model_dump(mode="json", exclude_none=True)
    return {"number": amendment.number} | values


def amendment_in_words(amendment: Amendment) -> str:
    """Return an amendment's number and the values that it sets, in words."""
    overrides = _overrides(amendment)
    return f"amendment {amendment.number} ({NOT_UNDERSTOOD if overrides is None else overrides})"


def values_in_force(config: RunConfig, amendment: Amendment | None) -> dict[str, Any]:
    """Return all values that amendments can change, as JSON values, as they are with this amendment in force."""
    return (_overrides(amendment) or NO_OVERRIDES).values(config)


def changed_values(config: RunConfig, old: Amendment | None, new: Amendment | None) -> dict[str, list[Any]]:
    """Return the values that differ between two amendments in force, by name, each as [old, new]. An amendment that is
    None stands for the manifest's values."""
    before, after = values_in_force(config, old), values_in_force(config, new)
    return {name: [before[name], value] for name, value in after.items() if value != before[name]}


def changes_in_words(changed: Mapping[str, Sequence[Any]]) -> str:
    """Return, in words, the differences that `changed_values` has found."""
    words = (
        f"{value_in_words(name, new)} instead of {bare_in_words(name, old)}" for name, (old, new) in changed.items()
    )
    return ", ".join(words) or "nothing changes"


def outer_steps_in_force(config: RunConfig, amendment: Amendment | None) -> int:
    """Return the run's number of outer steps with this amendment in force. An amendment that this version cannot read
    changes nothing."""
    return (_overrides(amendment) or NO_OVERRIDES).total_outer_steps(config)


def _overrides(amendment: Amendment | None) -> Overrides | None:
    """Return the values that an amendment sets, empty ones without an amendment, or None if this version of diloco-peer
    cannot read the amendment."""
    try:
        return Overrides.read(amendment)
    except AmendmentError:
        return None
