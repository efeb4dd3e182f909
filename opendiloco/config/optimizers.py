"""The tables of `run.toml` about optimizers, inner and outer, and about the schedules of their learning rates."""

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
"""But for none at all: a delayed momentum divides by it."""


def _check_momentum(value: float) -> float:
    """Return the momentum; 0 for -0, which is equal to it, and has other bytes. Raises: ValueError."""
    if 0 < value < LEAST_MOMENTUM:
        raise ValueError(f"a momentum of {value:g} is too small; use 0, or {LEAST_MOMENTUM:g} or more")
    return value + 0.0


OuterLearningRate = Annotated[float, Field(gt=0, le=100)]
OuterMomentum = Annotated[Fraction, AfterValidator(_check_momentum)]


class AdamWSettings(Section):
    """AdamW (arXiv 1711.05101). Weight decay applies to matrices, or with `decays` "all" to vectors (norms, biases),
    too, as where one optimizer is simply given all parameters."""

    learning_rate: PositiveFloat
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    epsilon: PositiveFloat = 1e-8
    weight_decay: NotNegativeFloat = 0.1
    decays: Literal["matrices", "all"] = "matrices"


class _InnerOptimizer(Section):
    """What every inner optimizer has.

    Who joins in the middle has a fresh state: its learning rate rises over `rewarmup_steps` inner steps.
    """

    learning_rate: PositiveFloat
    rewarmup_steps: StepCount = 10


class AdamWSection(AdamWSettings, _InnerOptimizer):
    """AdamW for all parameters."""

    kind: Literal["adamw"] = "adamw"


class MuonSection(_InnerOptimizer):
    """torch.optim.Muon for the matrices of the hidden layers; AdamW, at its own learning rate, for everything else:
    embeddings, head and vectors. As inner optimizer of DiLoCo: arXiv 2505.23725.

    `scale` is how the learning rate depends on a matrix's shape: as in Muon's first description ("original"), or so
    that steps are as long as AdamW's ("match_rms_adamw", arXiv 2502.16982), for which AdamW's learning rate fits.
    """

    kind: Literal["muon"] = "muon"
    momentum: Fraction = 0.95
    nesterov: bool = True
    weight_decay: NotNegativeFloat = 0.1
    newton_schulz_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    scale: Literal["original", "match_rms_adamw"] = "original"
    adamw: AdamWSettings


class AdafactorSection(_InnerOptimizer):
    """torch.optim.Adafactor (arXiv 1804.04235), which keeps two vectors for a matrix instead of AdamW's two matrices.

    `learning_rate` is the most that a step may be, relative to the root mean square of what it changes. `epsilon`:
    below it, that counts as this much. `clip_threshold`: root mean square above which an update is scaled down.
    """

    kind: Literal["adafactor"] = "adafactor"
    beta2_decay: Annotated[float, Field(le=0, ge=-10)] = -0.8
    epsilon: PositiveFloat = 1e-3
    clip_threshold: Annotated[float, Field(ge=1, le=LARGEST_NUMBER)] = 1.0
    weight_decay: NotNegativeFloat = 0.0


class TorchSection(_InnerOptimizer):
    """Any optimizer of torch.optim that steps from gradients alone, by its name there; never an import path.

    `options` are its keyword arguments, but for those that say how to compute instead of what.
    """

    kind: Literal["torch"] = "torch"
    name: Annotated[str, Field(min_length=1)]
    options: dict[str, JsonValue] = Field(default_factory=dict)

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
    """How a learning rate rises and falls, in steps. It is multiplied by a factor.

    "wsd": the factor rises to 1 over the warmup, stays there while stable, and falls to `final_fraction` over the decay
    (arXiv 2404.06395), in the shape of a line, of half a cosine, or of 1 - sqrt (arXiv 2405.18392). "cosine": a warmup,
    then a decay in the shape of half a cosine. "constant": a warmup, and then 1.
    """

    phases_of: ClassVar[dict[str, tuple[str, ...]]] = {
        "wsd": ("warmup", "stable", "decay"),
        "cosine": ("warmup", "decay"),
        "constant": ("warmup",),
    }

    kind: Literal["wsd", "cosine", "constant"] = "wsd"
    warmup_steps: StepCount | None = None
    stable_steps: StepCount | None = None
    decay_steps: StepCount | None = None
    decay_shape: Literal["linear", "cosine", "sqrt"] | None = None
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0

    @property
    def unit(self) -> Literal["steps", "tokens"]:
        return "steps"

    @property
    def shape(self) -> str:
        """Of the decay."""
        return self.decay_shape or ("cosine" if self.kind == "cosine" else "linear")

    @property
    def phases(self) -> tuple[int, int, int]:
        """Warmup, stable and decay, in `unit`."""
        warmup, stable, decay = (getattr(self, f"{phase}_{self.unit}") or 0 for phase in ("warmup", "stable", "decay"))
        return warmup, stable, decay

    @property
    def total_steps(self) -> int | None:
        """The length of what the schedule describes; None if it does not say how many steps that is."""
        return sum(self.phases) if self.unit == "steps" and self.kind != "constant" else None

    @model_validator(mode="after")
    def check_phases(self) -> Self:
        wanted = [f"{phase}_{self.unit}" for phase in self.phases_of[self.kind]]
        lengths = [name for name in type(self).model_fields if name.endswith(("_steps", "_tokens"))]
        given = [name for name in lengths if getattr(self, name) is not None]
        if set(given) != set(wanted):
            raise ValueError(
                f'kind = "{self.kind}" takes {", ".join(wanted)}, and here is {", ".join(given) or "none of them"}; '
                "give exactly those"
            )
        if self.kind != "wsd" and self.decay_shape is not None:
            raise ValueError(f'decay_shape goes with kind = "wsd", and not with "{self.kind}"; remove it')
        return self


class ScheduleSection(OuterScheduleSection):
    """The inner learning rate's, in inner steps of the whole run; or, if its keys say so, in tokens of the whole run.

    Steps are what one peer takes; tokens are those of all peers, as the log counts them, and of the outer step under
    way this peer's own.
    """

    warmup_tokens: TokenCount | None = None
    stable_tokens: TokenCount | None = None
    decay_tokens: TokenCount | None = None

    @property
    def unit(self) -> Literal["steps", "tokens"]:
        in_tokens = (self.warmup_tokens, self.stable_tokens, self.decay_tokens)
        return "tokens" if any(length is not None for length in in_tokens) else "steps"


class OuterOptimizerSection(Section):
    """Nesterov SGD on pseudo-gradients (DiLoCo's best outer optimizer, section 3.2 of arXiv 2311.08105).

    `schedule` is that of its learning rate, in outer steps; without one, it is constant. With `momentum_every` N above
    1 the momentum moves theta in each Nth outer step only, and each pseudo-gradient by an Nth of the learning rate:
    delayed Nesterov, for outer steps that late work is part of (Algorithm 3 of arXiv 2401.09135, with c = 0).
    """

    kind: Literal["nesterov"] = "nesterov"
    learning_rate: OuterLearningRate = 0.7
    momentum: OuterMomentum = 0.9
    momentum_every: Annotated[int, Field(ge=1, le=1000)] = 1
    schedule: OuterScheduleSection | None = None
