"""The values that the organiser's amendments set in place of the manifest's.

Peers carry an amendment's content as signed bytes (`peers.values.manifest.Amendment`). Here it gets its meaning: a
canonical JSON object whose keys are those of `Overrides`. An amendment that is not understood is an error wherever the
run is trained, followed or checked, so that no two versions make different states of one log.
"""

from __future__ import annotations

import json
from typing import Any, Self

from pydantic import ValidationError

from opendiloco.config.optimizers import OuterLearningRate, OuterMomentum
from opendiloco.config.run_config import RunConfig
from opendiloco.config.section import Section, describe_validation_error
from opendiloco.errors import AmendmentError
from peers.values.manifest import Amendment


class Overrides(Section):
    """Values in place of the manifest's; None: the manifest's value is in force."""

    outer_learning_rate: OuterLearningRate | None = None
    outer_momentum: OuterMomentum | None = None

    @classmethod
    def of(cls, amendment: Amendment | None, config: RunConfig) -> Self:
        """Return what an amendment sets in a run; None: nothing. Raises: AmendmentError."""
        overrides = cls.read(amendment)
        if amendment is not None and (problem := overrides.problem(config)):
            raise _unreadable(amendment, problem)
        return overrides

    @classmethod
    def read(cls, amendment: Amendment | None) -> Self:
        """Return what an amendment sets, whether or not a run can have it. Raises: AmendmentError."""
        if amendment is None:
            return cls()
        try:
            overrides = cls.model_validate_json(amendment.content)
        except ValidationError as error:
            raise _unreadable(amendment, describe_validation_error("its content", error, cls)) from None
        if overrides.content != amendment.content:
            raise _unreadable(amendment, "its content is no canonical JSON.")
        return overrides

    @property
    def content(self) -> bytes:
        """Return the content of an amendment that sets these values: canonical JSON without what is None."""
        values = self.model_dump(mode="json", exclude_none=True)
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()

    def __str__(self) -> str:
        """Return the values that are set, in words."""
        values = self.model_dump(mode="json", exclude_none=True)
        return ", ".join(value_in_words(name, value) for name, value in values.items()) or "the manifest's values"

    def problem(self, config: RunConfig) -> str:
        """Return why a run cannot have these values, and the remedy; empty: it can."""
        if self.outer_momentum is not None and config.outer_optimizer.momentum_every > 1:
            return (
                f"outer_momentum = {self.outer_momentum:g}: the momentum of {config.name} is delayed "
                "(outer_optimizer.momentum_every) and stays as it is. Leave it out."
            )
        return ""

    def values(self, config: RunConfig) -> dict[str, Any]:
        """Return all values in force that amendments can change, as JSON can say them."""
        outer = config.outer_optimizer
        return {
            "outer_learning_rate": _first(self.outer_learning_rate, outer.learning_rate),
            "outer_momentum": _first(self.outer_momentum, outer.momentum),
        }


NO_OVERRIDES = Overrides()
"""The manifest's values are in force."""


def value_in_words(name: str, value: Any) -> str:
    """Return a value that an amendment can set, as `Overrides.values` has it, for people."""
    return f"{name.replace('_', ' ')} {value:g}"


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value


def _unreadable(amendment: Amendment, reason: str) -> AmendmentError:
    return AmendmentError(
        f"amendment {amendment.number} of the run's organiser cannot be followed here: {reason}",
        "Upgrade diloco-peer to the version that the organiser uses: `diloco-peer --version` says which this is.",
    )
