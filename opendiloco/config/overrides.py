"""The values that the organiser's amendments set in place of the manifest's.

Peers carry an amendment's content as signed bytes (`peers.values.manifest.Amendment`). Here it gets its meaning: a
canonical JSON object whose keys are those of `Overrides`. An amendment that is not understood is an error wherever the
run is trained, followed or checked, so that no two versions make different states of one log.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError

from opendiloco.config.data import SOURCE_LIMIT, DataSection, MixturePhase, Weight, shares_of
from opendiloco.config.optimizers import OuterLearningRate, OuterMomentum
from opendiloco.config.run_config import RUN_TOKENS, RunConfig
from opendiloco.config.section import Positive, Section, describe_validation_error
from opendiloco.errors import AmendmentError
from peers.values.manifest import AMENDMENT_LIMIT, Amendment, LoggedAmendment


class Decay(Section):
    """A decay of the inner learning rate, in place of the schedule's own: it begins after so many outer steps of the
    run and takes `outer_steps` of them. Shape and end are the schedule's."""

    after: Annotated[int, Field(ge=0, le=1_000_000)]
    outer_steps: Positive

    @property
    def end(self) -> int:
        """Return the outer steps of the run after which it is over."""
        return self.after + self.outer_steps

    def fraction(self, inner_steps: int, done: int) -> float:
        """Return the share of it that is over after `done` inner steps of the run, of so many in an outer step."""
        return min(1.0, max(0.0, (done - self.after * inner_steps) / (self.outer_steps * inner_steps)))


class Overrides(Section):
    """Values in place of the manifest's; None: the manifest's value is in force."""

    outer_learning_rate: OuterLearningRate | None = None
    outer_momentum: OuterMomentum | None = None
    inner_learning_rate_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    """Multiplies what optimizer and schedule make of the inner learning rate."""
    decay: Decay | None = None
    outer_steps: Positive | None = None
    """Length of the run."""
    weights: Annotated[tuple[Weight, ...], Field(strict=False, min_length=1, max_length=SOURCE_LIMIT)] | None = None
    """Of the data's sources, in their order, for the samples that are in no lease yet."""

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
        if self.decay is not None and config.schedule.kind == "cosine":
            return 'decay: a schedule of kind "cosine" decays from its warmup on, and no decay can begin. Leave it out.'
        if self.weights is not None and (wrong := _wrong_weights(self.weights, config.data)):
            return f"weights: {wrong}."
        steps, tokens = self.total_outer_steps(config), config.training.round_tokens
        if self.outer_steps is not None and steps * tokens > RUN_TOKENS:
            most = RUN_TOKENS // tokens
            return f"outer_steps = {steps}: a run has at most {RUN_TOKENS} tokens of each peer. Use {most} or less."
        if len(self.content) > AMENDMENT_LIMIT:
            return (
                f"it has {len(self.content)} bytes, {AMENDMENT_LIMIT} are allowed. Use shorter numbers, such as whole "
                "weights below 100."
            )
        return ""

    def total_outer_steps(self, config: RunConfig) -> int:
        """Return the length of the run."""
        return config.total_outer_steps if self.outer_steps is None else self.outer_steps

    def values(self, config: RunConfig) -> dict[str, Any]:
        """Return all values in force that amendments can change, as JSON can say them."""
        outer = config.outer_optimizer
        return {
            "outer_learning_rate": _first(self.outer_learning_rate, outer.learning_rate),
            "outer_momentum": _first(self.outer_momentum, outer.momentum),
            "inner_learning_rate_factor": _first(self.inner_learning_rate_factor, 1.0),
            "decay": None if self.decay is None else self.decay.model_dump(mode="json"),
            "outer_steps": self.total_outer_steps(config),
            "weights": list(_first(self.weights, config.data.weights)),
        }


def why_not_followed(amendment: Amendment, config: RunConfig) -> str:
    """Return why this version cannot follow an amendment of a run, and the remedy; empty: it can."""
    try:
        Overrides.of(amendment, config)
    except AmendmentError as error:
        return str(error)
    return ""


NO_OVERRIDES = Overrides()
"""The manifest's values are in force."""


def mixture_phases(amendments: Sequence[LoggedAmendment], config: RunConfig) -> tuple[MixturePhase, ...]:
    """Return by which mixtures the samples of a run are dealt after the manifest's, where the log has taken in these
    amendments: each holds from the first sample on that was in no lease yet. Raises: AmendmentError."""
    phases = [MixturePhase(0, config.data.shares)]
    for logged in amendments:
        weights = Overrides.of(logged.amendment, config).weights
        shares = config.data.shares if weights is None else shares_of(weights)
        if phases[-1].first == logged.cursor > 0:  # no sample was dealt since
            phases.pop()
        if shares != phases[-1].shares:
            phases.append(MixturePhase(logged.cursor, shares))
    return tuple(phases[1:])


def _wrong_weights(weights: Sequence[float], data: DataSection) -> str:
    """Return why a run's sources cannot have these weights; empty: they can."""
    if len(weights) != len(data.all_sources):
        return f"{len(weights)} are given, and the run has {len(data.all_sources)} sources. Give one for each"
    try:
        shares_of(weights)
    except ValueError as error:
        return str(error)
    return ""


def value_in_words(name: str, value: Any) -> str:
    """Return a value that an amendment can set, as `Overrides.values` has it, for people."""
    return f"{name.replace('_', ' ')} {bare_in_words(name, value)}"


def bare_in_words(name: str, value: Any) -> str:
    """Return the same without its name."""
    if name == "decay":
        return "the schedule's" if value is None else f"of {value['outer_steps']} outer steps after {value['after']}"
    if name == "weights":
        return ":".join(f"{weight:g}" for weight in value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value


def _unreadable(amendment: Amendment, reason: str) -> AmendmentError:
    return AmendmentError(
        f"amendment {amendment.number} of the run's organiser cannot be followed here: {reason}",
        "Upgrade diloco-peer to the version that the organiser uses: `diloco-peer --version` says which this is.",
    )
