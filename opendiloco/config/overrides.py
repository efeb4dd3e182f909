"""The values that an organiser's amendment sets in place of the manifest's.

An amendment's content is signed bytes (`peers.values.manifest.Amendment`): a canonical JSON object with the keys of
`Overrides`. A version that does not understand an amendment stops with an error, because two versions must never
compute different states from one log.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError

from opendiloco.config.data import SOURCE_LIMIT, DataSection, MixturePhase, Weight, shares_of
from opendiloco.config.optimizers import OuterLearningRate, OuterMomentum
from opendiloco.config.run_config import RUN_TOKENS, RunConfig
from opendiloco.config.section import Positive, Section, describe_validation_error
from opendiloco.errors import AmendmentError
from peers.values.manifest import AMENDMENT_LIMIT, Amendment, LoggedAmendment


class Decay(Section):
    """An amendment's decay of the inner learning rate, with the shape and the final value of the run's schedule."""

    after: Annotated[int, Field(ge=0, le=1_000_000)]
    """Outer steps of the run before the decay begins."""
    outer_steps: Positive
    """Length of the decay."""

    @property
    def end(self) -> int:
        """The number of outer steps that the run has made when the decay ends."""
        return self.after + self.outer_steps

    def fraction(self, inner_steps: int, done: int) -> float:
        """Return the share (0 to 1) of the decay that is over when a peer has taken `done` inner steps of the run. An
        outer step has `inner_steps` inner steps."""
        return min(1.0, max(0.0, (done - self.after * inner_steps) / (self.outer_steps * inner_steps)))


class Overrides(Section):
    """Values that an amendment sets in place of the manifest's; None keeps the manifest's value. `outer_steps` is the
    length of the run, `decay` a decay of the inner learning rate, and `weights` those of the data sources."""

    outer_learning_rate: OuterLearningRate | None = None
    outer_momentum: OuterMomentum | None = None
    inner_learning_rate_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    """Factor of the scheduled inner learning rate."""
    decay: Decay | None = None
    outer_steps: Positive | None = None
    """Length of the run."""
    weights: Annotated[tuple[Weight, ...], Field(strict=False, min_length=1, max_length=SOURCE_LIMIT)] | None = None
    """Weights of the data sources, in their order, for samples that no lease has yet."""

    @classmethod
    def of(cls, amendment: Amendment | None, config: RunConfig) -> Self:
        """Return the overrides of `amendment`, checked against the run `config`. Raises: AmendmentError."""
        overrides = cls.read(amendment)
        if amendment is not None and (problem := overrides.problem(config)):
            raise _unreadable(amendment, problem)
        return overrides

    @classmethod
    def read(cls, amendment: Amendment | None) -> Self:
        """Return the overrides of `amendment`, not checked against a run. Raises: AmendmentError."""
        if amendment is None:
            return cls()
        try:
            overrides = cls.model_validate_json(amendment.content)
        except ValidationError as error:
            raise _unreadable(amendment, describe_validation_error("its content", error, cls)) from None
        if overrides.content != amendment.content:
            raise _unreadable(amendment, "its content is not canonical JSON.")
        return overrides

    @property
    def content(self) -> bytes:
        """The content of an amendment that sets these values: canonical JSON without the keys that are None."""
        values = self.model_dump(mode="json", exclude_none=True)
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()

    def __str__(self) -> str:
        values = self.model_dump(mode="json", exclude_none=True)
        return ", ".join(value_in_words(name, value) for name, value in values.items()) or "the manifest's values"

    def problem(self, config: RunConfig) -> str:
        """Return the reason why the run cannot use these overrides, with the remedy; empty if there is none."""
        if self.outer_momentum is not None and config.outer_optimizer.momentum_every > 1:
            return (
                f"outer_momentum = {self.outer_momentum:g}: the run {config.name} delays its momentum "
                "(outer_optimizer.momentum_every), and a delayed momentum cannot change. Leave it out."
            )
        if self.decay is not None and config.schedule.kind == "cosine":
            return (
                'decay: a schedule of kind "cosine" decays from its warmup on, so no new decay can begin. Leave it out.'
            )
        if self.weights is not None and (wrong := _wrong_weights(self.weights, config.data)):
            return f"weights: {wrong}."
        steps, tokens = self.total_outer_steps(config), config.training.round_tokens
        if self.outer_steps is not None and steps * tokens > RUN_TOKENS:
            most = RUN_TOKENS // tokens
            return f"outer_steps = {steps}: a run has at most {RUN_TOKENS} tokens for each peer. Use {most} or less."
        if len(self.content) > AMENDMENT_LIMIT:
            return (
                f"it has {len(self.content)} bytes, and at most {AMENDMENT_LIMIT} are allowed. Use shorter numbers, "
                "such as whole weights below 100."
            )
        return ""

    def total_outer_steps(self, config: RunConfig) -> int:
        """Return the run's length in outer steps: the override, or else the manifest's."""
        return config.total_outer_steps if self.outer_steps is None else self.outer_steps

    def beyond_schedules(self, config: RunConfig) -> Iterator[str]:
        """Yield a text for each learning-rate schedule that reaches 0 at least one outer step before the run ends."""
        steps, inner_steps = self.total_outer_steps(config), config.training.inner_steps
        inner, outer = config.schedule, config.outer_optimizer.schedule
        end = inner.total_steps if self.decay is None else self.decay.end * inner_steps
        if end is not None and inner.final_fraction == 0 and (steps - 1) * inner_steps >= end:
            yield f"schedule ends after {end:,} inner steps, and the run after {steps * inner_steps:,}"
        if outer and outer.total_steps is not None and outer.final_fraction == 0 and steps > outer.total_steps:
            yield f"outer_optimizer.schedule ends after {outer.total_steps:,} outer steps, and the run after {steps:,}"

    def values(self, config: RunConfig) -> dict[str, Any]:
        """Return each key that amendments can change with its value in force, as JSON types."""
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
    """Return the reason why this version cannot apply an amendment, with the remedy; empty if there is none."""
    try:
        Overrides.of(amendment, config)
    except AmendmentError as error:
        return str(error)
    return ""


NO_OVERRIDES = Overrides()
"""No overrides: the manifest's values are in force."""


def mixture_phases(amendments: Sequence[LoggedAmendment], config: RunConfig) -> tuple[MixturePhase, ...]:
    """Return the changes of the sources' shares that the amendments in a run's log make, in the log's order. The
    manifest's own shares are not included.

    Each mixture begins at the first sample that no lease had when its amendment entered the log. Raises:
    AmendmentError.
    """
    phases = [MixturePhase(0, config.data.shares)]
    for logged in amendments:
        weights = Overrides.of(logged.amendment, config).weights
        shares = config.data.shares if weights is None else shares_of(weights)
        if phases[-1].first == logged.cursor > 0:  # the preceding phase has no sample
            phases.pop()
        if shares != phases[-1].shares:
            phases.append(MixturePhase(logged.cursor, shares))
    return tuple(phases[1:])


def _wrong_weights(weights: Sequence[float], data: DataSection) -> str:
    """Return the reason why a run's sources cannot have these weights; empty if they can."""
    if len(weights) != len(data.all_sources):
        return f"{len(weights)} are given, but the run has {len(data.all_sources)} sources. Give one for each source"
    try:
        shares_of(weights)
    except ValueError as error:
        return str(error)
    return ""


def value_in_words(name: str, value: Any) -> str:
    """Return the name and value of one item of `Overrides.values`, as text for people."""
    return f"{name.replace('_', ' ')} {bare_in_words(name, value)}"


def bare_in_words(name: str, value: Any) -> str:
    """Return the value of one item of `Overrides.values`, without its name, as text for people."""
    if name == "decay":
        return "the schedule's" if value is None else f"of {value['outer_steps']} outer steps after {value['after']}"
    if name == "weights":
        return ":".join(f"{weight:g}" for weight in value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value


def _unreadable(amendment: Amendment, reason: str) -> AmendmentError:
    return AmendmentError(
        f"this version of diloco-peer cannot follow the organiser's amendment {amendment.number}: {reason}",
        "Upgrade diloco-peer to the organiser's version; `diloco-peer --version` shows yours.",
    )
