"""The tables of `run.toml` about the inner and outer optimizers and the schedules of their learning rates."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, model_validator

from opendiloco.config.section import (
    LARGEST_NUMBER,
    Fraction,
    NotNegativeFloat,
    PositiveFloat,
    Section,
    StepCount,
    TokenCount,
)
from peers.values.wire import printable

LEAST_MOMENTUM = 1e-3
"""Smallest outer momentum above 0: a delayed momentum divides by it."""


def _check_momentum(value: float) -> float:
    """Return the momentum, with -0.0 turned into 0.0 so that equal values have equal bytes. Raises: ValueError if it is
    above 0 and below LEAST_MOMENTUM."""
    if 0 < value < LEAST_MOMENTUM:
        raise ValueError(f"a momentum of {value:g} is too small; use 0, or {LEAST_MOMENTUM:g} or more")
    return value + 0.0


OuterLearningRate = Annotated[float, Field(gt=0, le=100)]
OuterMomentum = Annotated[Fraction, AfterValidator(_check_momentum)]


class AdamWSettings(Section):
    """AdamW's settings (arXiv 1711.05101)."""

    learning_rate: PositiveFloat
    """Peak learning rate."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    """Decay rates of the two moments."""
    epsilon: PositiveFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NotNegativeFloat = 0.1
    """Decoupled weight decay."""
    decays: Literal["matrices", "all"] = "matrices"
    """Parameters that decay: matrices only, or norms and biases, too."""


class _InnerOptimizer(Section):
    """The optimizer of the training between two outer steps."""

    learning_rate: PositiveFloat
    """Peak learning rate."""
    rewarmup_steps: StepCount = 10
    """Inner steps of warmup for a peer that joins without optimizer state."""


class AdamWSection(AdamWSettings, _InnerOptimizer):
    """AdamW for all parameters."""

    kind: Literal["adamw"] = "adamw"


class MuonSection(_InnerOptimizer):
    """torch.optim.Muon for the matrices of the hidden layers (arXiv 2505.23725). Embeddings, head and vectors get
    AdamW."""

    kind: Literal["muon"] = "muon"
    momentum: Fraction = 0.95
    """Momentum of the gradient."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    weight_decay: NotNegativeFloat = 0.1
    """Decoupled weight decay."""
    newton_schulz_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton-Schulz iterations in each step."""
    scale: Literal["original", "match_rms_adamw"] = "original"
    """Scaling by a matrix's shape; with `"match_rms_adamw"` AdamW's learning rates fit (arXiv 2502.16982)."""
    adamw: AdamWSettings


class AdafactorSection(_InnerOptimizer):
    """torch.optim.Adafactor (arXiv 1804.04235). Its learning rate is relative to the root mean square (RMS) of a
    parameter."""

    kind: Literal["adafactor"] = "adafactor"
    beta2_decay: Annotated[float, Field(le=0, ge=-10)] = -0.8
    """Exponent by which the second moment's decay rate nears 1."""
    epsilon: PositiveFloat = 1e-3
    """Smallest RMS that a parameter counts with."""
    clip_threshold: Annotated[float, Field(ge=1, le=LARGEST_NUMBER)] = 1.0
    """RMS above which an update is scaled down."""
    weight_decay: NotNegativeFloat = 0.0
    """Decoupled weight decay."""


class TorchSection(_InnerOptimizer):
    """Any optimizer of torch.optim that needs nothing but gradients."""

    kind: Literal["torch"] = "torch"
    name: Annotated[str, Field(min_length=1)]
    """Name of the class in torch.optim."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments, except those that choose an implementation, such as `foreach`."""

    @model_validator(mode="after")
    def check_options(self) -> Self:
        for key, value in self.options.items():
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int | float) and not abs(number) <= LARGEST_NUMBER:
                    raise ValueError(
                        f"options.{printable(key)} = {number!r:.60}: too large. Use {LARGEST_NUMBER:g} or less"
                    )
        return self


InnerOptimizerSection: TypeAlias = Annotated[
    AdamWSection | MuonSection | AdafactorSection | TorchSection,
    Field(discriminator="kind"),
    BeforeValidator(lambda value: {"kind": "adamw"} | value if isinstance(value, dict) else value),
]


class OuterScheduleSection(Section):
    """The outer learning rate's schedule, with phases in outer steps. Without it the rate is constant."""

    phases_of: ClassVar[dict[str, tuple[str, ...]]] = {
        "wsd": ("warmup", "stable", "decay"),
        "cosine": ("warmup", "decay"),
        "constant": ("warmup",),
    }

    kind: Literal["wsd", "cosine", "constant"] = "wsd"
    """`"wsd"`: warmup, stable, decay (arXiv 2404.06395); `"cosine"`: warmup, decay; `"constant"`: warmup."""
    warmup_steps: StepCount | None = None
    """Length of the warmup."""
    stable_steps: StepCount | None = None
    """Length of the stable phase."""
    decay_steps: StepCount | None = None
    """Length of the decay."""
    decay_shape: Literal["linear", "cosine", "sqrt"] | None = None
    """Shape of the decay of `"wsd"`. Default: `"linear"`. `"sqrt"` is 1 - sqrt (arXiv 2405.18392)."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the peak after the decay."""

    @property
    def unit(self) -> Literal["steps", "tokens"]:
        return "steps"

    @property
    def shape(self) -> str:
        """The shape of the decay: `decay_shape`, or if this is None, "cosine" for a schedule of that kind, else
        "linear"."""
        return self.decay_shape or ("cosine" if self.kind == "cosine" else "linear")

    @property
    def phases(self) -> tuple[int, int, int]:
        """The lengths of warmup, stable phase and decay, in `unit`."""
        warmup, stable, decay = (getattr(self, f"{phase}_{self.unit}") or 0 for phase in ("warmup", "stable", "decay"))
        return warmup, stable, decay

    @property
    def total_steps(self) -> int | None:
        """The length of the schedule in steps; None for a constant schedule, and for a schedule in tokens."""
        return sum(self.phases) if self.unit == "steps" and self.kind != "constant" else None

    @model_validator(mode="after")
    def check_phases(self) -> Self:
        wanted = [f"{phase}_{self.unit}" for phase in self.phases_of[self.kind]]
        lengths = [name for name in type(self).model_fields if name.endswith(("_steps", "_tokens"))]
        given = [name for name in lengths if getattr(self, name) is not None]
        if set(given) != set(wanted):
            raise ValueError(
                f'kind = "{self.kind}" needs {", ".join(wanted)}, but the keys given are {", ".join(given) or "none"}; '
                "give exactly the keys that it needs"
            )
        if self.kind != "wsd" and self.decay_shape is not None:
            raise ValueError(f'decay_shape needs kind = "wsd", but kind is "{self.kind}"; remove decay_shape')
        return self


class ScheduleSection(OuterScheduleSection):
    """The schedule of the inner learning rate over the whole run. Give the length of each of its phases in inner steps
    of one peer, or as `warmup_tokens`, `stable_tokens` and `decay_tokens` in tokens of all peers."""

    warmup_tokens: TokenCount | None = None
    stable_tokens: TokenCount | None = None
    decay_tokens: TokenCount | None = None

    @property
    def unit(self) -> Literal["steps", "tokens"]:
        in_tokens = (self.warmup_tokens, self.stable_tokens, self.decay_tokens)
        return "tokens" if any(length is not None for length in in_tokens) else "steps"


class OuterOptimizerSection(Section):
    """The outer optimizer of `kind = "nesterov"`: Nesterov SGD on averaged pseudo-gradients (section 3.2 of arXiv
    2311.08105)."""

    kind: Literal["nesterov"] = "nesterov"
    learning_rate: OuterLearningRate = 0.7
    """Outer learning rate."""
    momentum: OuterMomentum = 0.9
    """Outer momentum: 0, or at least 0.001."""
    momentum_every: Annotated[int, Field(ge=1, le=1000)] = 1
    """Apply the momentum in every N-th outer step only: delayed Nesterov, for asynchronous runs (arXiv 2401.09135,
    Algorithm 3, c = 0)."""
    schedule: OuterScheduleSection | None = None
