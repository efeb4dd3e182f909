"""`run.toml` as a whole: all values that define a run, strictly checked. The signed manifest contains the same values.

An inner step is one optimizer step of one peer. An outer step is `training.inner_steps` inner steps (the paper's H)
and one averaging round. The inner schedule counts the inner steps of the whole run (outer index * H + inner step), or
the run's tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, ValidationError, model_validator

from opendiloco.alignment import next_fragment
from opendiloco.config.data import BYTE_TOKENIZER_SIZE, DataSection, TokenizerSection
from opendiloco.config.model import ModelSection
from opendiloco.config.optimizers import InnerOptimizerSection, OuterOptimizerSection, ScheduleSection
from opendiloco.config.section import (
    VALUES_LIMIT,
    Digest,
    Link,
    NotNegativeFloat,
    PeerName,
    Positive,
    PositiveFloat,
    Seconds,
    Section,
    StepCount,
    ValueCount,
    Words,
    describe_validation_error,
    read_toml,
)
from opendiloco.quantities import FormatName
from peers.errors import ManifestError
from peers.log.settings import RunSettings, Timing
from peers.values.signed_heads import KEYS_LIMIT

SPARSE_ERROR_FEEDBACK = 0.95
"""Default error feedback of the sparse codec: SparseLoCo's (arXiv 2508.15706)."""
THINNER: dict[str, tuple[str, ...]] = {"fp16": ("int8", "e2m1"), "int8": ("e2m1",)}
"""Formats allowed by default for thin uplinks, by the run's codec. "sparse" is not among them: beside int8 it costs
loss in short runs (docs/convergence.md)."""
BITS: dict[str, float] = {
    "fp16": 16,
    "int8": 8.04,
    "e2m1-block32": 5,
    "uint4": 4.25,
    "e2m1": 4.04,
    "e3m0": 4.04,
    "sparse": 0.24,
}
"""Bits per value of each format; a test compares them with the kernels' formats."""


class CodecSection(Section):
    """The encoding of payloads on the wire. docs/codecs.md helps to choose."""

    kind: FormatName = "int8"
    """Format of averages, and of contributions by default."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of payload values."""
    error_feedback: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of a payload's encoding error that is added to the next payload, for 4 bytes a parameter; 0.95 for
    `"sparse"`."""
    contributions: Annotated[tuple[FormatName, ...], Field(strict=False, max_length=len(BITS))] = ()
    """Formats of contributions: `kind`, then thinner ones. A peer sends the first that its uplink carries in time.
    Default: `kind`; for `"int8"` also `"e2m1"`, for `"fp16"` also `"int8"` and `"e2m1"`."""

    def number_of(self, kind: str) -> int:
        """Return the index of the format `kind` among the allowed formats of contributions, or raise ManifestError."""
        if kind not in self.contributions:
            allowed = ", ".join(self.contributions)
            raise ManifestError(
                f"this run does not allow contributions in {kind}.", f"Choose one of its formats: {allowed}."
            )
        return self.contributions.index(kind)

    @model_validator(mode="before")
    @classmethod
    def add_defaults(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        kind = content.get("kind", "int8")
        if isinstance(kind, str) and kind in BITS and not content.get("contributions"):
            content = content | {"contributions": (kind, *THINNER.get(kind, ()))}
        return {"error_feedback": SPARSE_ERROR_FEEDBACK} | content if kind == "sparse" else content

    @model_validator(mode="after")
    def check_kind(self) -> Self:
        if self.kind in ("fp16", "sparse") and self.rounding == "stochastic":
            raise ValueError(f'kind = "{self.kind}" always rounds to nearest; remove rounding, or choose another kind')
        if self.kind == "sparse" and self.error_feedback == 0:
            raise ValueError(
                'error_feedback = 0: kind = "sparse" leaves out 63 of 64 values, which would be lost; '
                f"remove error_feedback, whose default is {SPARSE_ERROR_FEEDBACK}, or choose another kind"
            )
        bits = [BITS[kind] for kind in self.contributions]
        if self.contributions[:1] != (self.kind,) or sorted(set(bits), reverse=True) != bits:
            raise ValueError(
                f'contributions = {list(self.contributions)}: wrong order. Begin with kind, "{self.kind}", and give '
                f"each format fewer bits than the one before: {', '.join(BITS)}"
            )
        return self


FRAGMENTS_LIMIT = 256
"""Most fragments in a run: some messages name all entries of a cycle, one for each fragment."""


class StreamingSection(Section):
    """Streaming DiLoCo (arXiv 2501.18512): fragments of the model are averaged in turn."""

    pattern: Literal["strided", "sequential", "balanced"] = "strided"
    """Content of a fragment: evenly spaced blocks, consecutive blocks, or whole tensors, dealt out by size."""
    layers_per_fragment: Positive | None = None
    """Transformer blocks in a fragment. Default: all."""
    embeddings: Literal["apart", "ends"] | None = None
    """Place of other parameters: a fragment of their own (default), or the first and last one."""
    overlap: StepCount = 0
    """Inner steps that a peer trains during a round, the paper's τ; 0: it waits."""
    alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    """Weight of a peer's own values when it merges an average. Default: 0.5 with an overlap, else 0."""
    sizes: Annotated[tuple[ValueCount, ...], Field(strict=False, min_length=1, max_length=FRAGMENTS_LIMIT)] | None = (
        None
    )
    """Values in each fragment."""

    @model_validator(mode="after")
    def check_fragments(self) -> Self:
        if self.pattern == "balanced" and self.embeddings is not None:
            raise ValueError('pattern = "balanced" places the embeddings itself, by their size; remove embeddings')
        if self.sizes is not None and self.layers_per_fragment is None:
            raise ValueError("sizes need layers_per_fragment, without which there is one fragment; remove sizes")
        if sum(self.sizes or ()) > VALUES_LIMIT:
            raise ValueError(f"sizes add up to {sum(self.sizes or ())} values; make them {VALUES_LIMIT} at most")
        return self

    @property
    def fragments(self) -> tuple[slice, ...] | None:
        """Each fragment's slice of the flat vectors; None if `sizes` is None."""
        places: list[slice] = []
        for size in self.sizes or ():
            start = next_fragment(places[-1].stop if places else 0)
            places.append(slice(start, start + size))
        return tuple(places) or None

    @property
    def mixing(self) -> float:
        """The weight of a peer's own values when it merges an average: `alpha` if given, else the paper's 0.5 with an
        overlap, and 0 without one."""
        return self.alpha if self.alpha is not None else 0.5 if self.overlap else 0.0

    @property
    def is_plain(self) -> bool:
        """True for DiLoCo without streaming: one fragment, no overlap, and the average replaces a peer's values."""
        return self.layers_per_fragment is None and self.overlap == 0 and self.mixing == 0


BATCH_TOKENS = LONGEST_TEXT = 10**8
"""Most tokens in a batch, and in the held-out text: peers keep them in memory, 8 bytes each."""
ROUND_TOKENS = 10**12
"""Most tokens that one peer trains on in an outer step."""
RUN_TOKENS = 10**15
"""Most tokens that one peer trains on in a whole run: the log can hold the sum for a thousand peers."""


def _check_product(limit: int, **factors: int) -> None:
    """Raise ValueError if the product of the factors is above `limit`. Each factor's name is its key in run.toml."""
    if math.prod(factors.values()) > limit:
        given = " * ".join(f"{key.replace('__', '.')} = {value}" for key, value in factors.items())
        raise ValueError(f"{given} is {math.prod(factors.values()):.3g} tokens; make them {limit:.0e} at most")


class TrainingSection(Section):
    """The training of a peer between two outer steps."""

    inner_steps: Positive
    """Inner steps in an outer step: the paper's H."""
    batch_size: Positive
    """Windows in an inner step."""
    sequence_length: Annotated[int, Field(ge=2, le=1_000_000)]
    """Tokens in a window."""
    document_mask: bool = False
    """Let a token attend only to its own document."""
    gradient_clip: PositiveFloat = 1.0
    """Largest norm of a gradient; larger ones are scaled down."""
    z_loss: NotNegativeFloat = 0.0
    """Weight of the z-loss; PaLM's is 1e-4 (arXiv 2204.02311)."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of forward and backward pass. Weights and moments are fp32."""
    gradient_reduction: Literal["fp32", "bf16"] = "fp32"
    """Precision in which a machine's workers sum gradients."""
    micro_batch: Positive | None = None
    """Recommended windows that a worker computes at once: the most on a CPU, a start on a GPU."""
    activation_checkpointing: bool = False
    """Recommend to recompute activations."""

    @model_validator(mode="after")
    def check_tokens(self) -> Self:
        batch = {"batch_size": self.batch_size, "sequence_length": self.sequence_length}
        _check_product(BATCH_TOKENS, **batch)
        _check_product(ROUND_TOKENS, inner_steps=self.inner_steps, **batch)
        return self

    @property
    def round_tokens(self) -> int:
        """The tokens that a peer trains on in an outer step when it takes all inner steps."""
        return self.inner_steps * self.batch_size * self.sequence_length


class RoundsSection(Section):
    """The timing and membership of rounds."""

    heartbeat_seconds: Seconds = Timing.heartbeat
    """Seconds between two heartbeats of a peer."""
    heartbeat_expiry_seconds: Annotated[float, Field(ge=0.1, le=300)] = Timing.heartbeat_expiry
    """Seconds of silence after which a peer is gone; more than two heartbeats."""
    grace_seconds: Seconds = Timing.grace
    """Seconds that a ready leader waits for peers that still train."""
    round_timeout_seconds: Seconds = Timing.round_timeout
    """Most seconds of a round's exchange; later blocks are left out."""
    partition_grace_seconds: Seconds = Timing.partition_grace
    """Seconds that a minority waits before it goes on alone."""
    policy: Literal["synchronous", "asynchronous"] = "synchronous"
    """Wait, within the grace, for all training peers, or only for the share `contributions`."""
    contributions: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the training peers that is enough for an asynchronous step. Default: half."""
    minimum_peers: Positive = 1
    """Fewest peers in an outer step."""
    quorum: Literal["majority", "two-thirds"] = "majority"
    """Voters that decide: more than half, or more than two thirds, which withstands liars below a third."""
    staleness: Annotated[int, Field(ge=0, le=16)] = 1
    """Outer steps that late work may miss and still count."""
    smallest_share: Annotated[float, Field(gt=0, le=1)] = RunSettings.smallest_share
    """Smallest share of `inner_steps` that a slow peer trains; 1: all train all steps."""
    clip: Annotated[float, Field(ge=1, le=1000)] = RunSettings.clip
    """Largest norm of a pseudo-gradient, in multiples of the median; larger ones are scaled down."""
    exclusion: Annotated[int, Field(ge=0, le=1_000_000)] = RunSettings.exclusion
    """Outer steps for which a proven lie excludes a peer; 0: none."""

    @property
    def enough(self) -> float | None:
        """The share of the training peers that is enough for an outer step; None in a synchronous run."""
        return None if self.policy == "synchronous" else self.contributions or 0.5

    @property
    def timing(self) -> Timing:
        """The section's times in seconds, as the protocol's type `Timing`."""
        return Timing(
            heartbeat=self.heartbeat_seconds,
            heartbeat_expiry=self.heartbeat_expiry_seconds,
            grace=self.grace_seconds,
            round_timeout=self.round_timeout_seconds,
            partition_grace=self.partition_grace_seconds,
        )

    @model_validator(mode="after")
    def check_rounds(self) -> Self:
        if self.policy == "synchronous" and self.contributions is not None:
            raise ValueError(
                f'contributions = {self.contributions:g} needs policy = "asynchronous"; set that, or remove '
                "contributions"
            )
        if self.policy == "asynchronous" and self.staleness == 0:
            raise ValueError(
                "staleness = 0 would lose the work of a peer that is late for an asynchronous outer step; use 1 or more"
            )
        if self.heartbeat_expiry_seconds <= 2 * self.heartbeat_seconds:
            raise ValueError(
                f"heartbeat_expiry_seconds = {self.heartbeat_expiry_seconds:g} would count a peer as gone after one "
                f"lost heartbeat; make it more than twice heartbeat_seconds = {self.heartbeat_seconds:g}"
            )
        return self


class _SnapshotsSection(Section):
    """The snapshots with which joining peers begin, before they replay newer entries."""

    every: Annotated[int, Field(ge=1, le=1000)] = RunSettings.snapshot_every
    """Outer steps between two snapshots."""


class _AdmissionSection(Section):
    """The admission of new peers, and their probation."""

    mode: Literal["open", "invite"] = "open"
    """`"open"` admits all peers; `"invite"` admits peers with a ticket (`diloco-peer invite create`)."""
    probation: Annotated[int, Field(ge=0, le=1000)] = RunSettings.probation
    """Outer steps in which a new peer trains but neither counts nor votes."""


class EvaluationSection(Section):
    """The evaluation of the outer parameters on held-out text, by peers in turn."""

    every: Annotated[int, Field(ge=0, le=1_000_000)] = 8
    """Outer steps between two evaluations; 0: none."""
    windows: Positive = 64
    """Held-out windows of `training.sequence_length` tokens."""
    digest: Digest | None = None
    """Digest of these windows; a peer with another text publishes no loss."""


class AboutSection(Section):
    """Words for volunteers and for the model card: `title`, `description`, `licence` (the model's, ideally its SPDX
    name), `contact` and `link` (of a web page), each of up to 500 characters."""

    title: Words | None = None
    description: Words | None = None
    licence: Words | None = None
    contact: Words | None = None
    link: Link | None = None

    def lines(self) -> list[str]:
        """Return the texts of this section in at most two lines, without the texts that are None."""
        licence = None if self.licence is None else f"licence {self.licence}"
        first, second = (self.title, self.description), (licence, self.contact, self.link)
        return [line for line in (": ".join(filter(None, first)), " · ".join(filter(None, second))) if line]


class RunConfig(Section):
    """The settings in `run.toml`. Keys outside tables come first."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]
    """Beginning of the run's id."""
    outer_steps: Positive | None = None
    """Length of the run. Default: that of the schedule."""
    archives: Annotated[tuple[PeerName, ...], Field(strict=False, max_length=KEYS_LIMIT)] | None = None
    """Archives whose signature decides between two branches of the log. Default: the organiser's key."""
    about: AboutSection = AboutSection()
    model: ModelSection
    tokenizer: TokenizerSection = TokenizerSection()
    data: DataSection = DataSection()
    training: TrainingSection
    inner_optimizer: InnerOptimizerSection
    schedule: ScheduleSection
    outer_optimizer: OuterOptimizerSection = OuterOptimizerSection()
    codec: CodecSection = CodecSection()
    streaming: StreamingSection = StreamingSection()
    rounds: RoundsSection = RoundsSection()
    snapshots: _SnapshotsSection = _SnapshotsSection()
    evaluation: EvaluationSection = EvaluationSection()
    admission: _AdmissionSection = _AdmissionSection()

    @model_validator(mode="after")
    def check_across_sections(self) -> Self:
        twice = next((peer for peer in self.archives or () if (self.archives or ()).count(peer) > 1), None)
        if twice is not None:
            raise ValueError(f"archives names {twice} twice; name it once")
        if self.outer_steps is None and self.schedule.total_steps is None:
            raise ValueError("this schedule has no length in steps; give outer_steps at the top")
        if self.streaming.overlap >= self.training.inner_steps:
            raise ValueError(
                f"streaming.overlap = {self.streaming.overlap}: an average would be merged after the next one of its "
                f"fragment has begun; make it less than training.inner_steps = {self.training.inner_steps}"
            )
        if self.outer_steps is None and self.schedule.total_steps == 0:
            raise ValueError("the schedule has 0 steps; give schedule.stable_steps, or outer_steps at the top")
        length = self.training.sequence_length
        _check_product(LONGEST_TEXT, evaluation__windows=self.evaluation.windows, training__sequence_length=length)
        if self.total_outer_steps * self.training.round_tokens > RUN_TOKENS:
            raise ValueError(
                f"{self.total_outer_steps} outer steps of {self.training.round_tokens} tokens are more than the "
                f"{RUN_TOKENS} tokens that a run may have; give fewer outer_steps, or a shorter schedule"
            )
        config = self.model.config or {}
        tokens = BYTE_TOKENIZER_SIZE if self.tokenizer.kind == "bytes" else 0
        problem = misfit(config.get("max_position_embeddings"), config.get("vocab_size"), self, tokens)
        if problem:
            raise ValueError(problem)
        return self

    @property
    def total_outer_steps(self) -> int:
        """The length of the run in outer steps: `outer_steps` if given, else the length of the inner schedule, rounded
        up."""
        return self.outer_steps or math.ceil((self.schedule.total_steps or 0) / self.training.inner_steps)

    def undecayed_schedules(self) -> Iterator[str]:
        """Yield a text for each learning-rate schedule whose decay would begin only after the run."""
        outer_steps = self.total_outer_steps
        for name, section, steps, unit in (
            ("schedule", self.schedule, outer_steps * self.training.inner_steps, "inner"),
            ("outer_optimizer.schedule", self.outer_optimizer.schedule, outer_steps, "outer"),
        ):
            if section is None or section.total_steps is None or section.final_fraction == 1:
                continue
            warmup, stable, decay = section.phases
            if decay and steps <= warmup + stable:
                yield f"{name} decays only after {warmup + stable:,} {unit} steps, and the run ends after {steps:,}"

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """Return the checked configuration in a file. Raises: ManifestError, with one line for each problem."""
        return cls.from_manifest_content(read_toml(path, "Give a run.toml that exists."), str(path))

    @classmethod
    def from_manifest_content(cls, content: dict[str, Any], origin: str = "manifest") -> Self:
        """Return the checked configuration from a manifest's values. Raises: ManifestError, which names `origin` as
        their source."""
        try:
            config = cls.model_validate(content)
            json.dumps(config.to_manifest_content(), allow_nan=False)
        except ValidationError as error:
            raise ManifestError(describe_validation_error(origin, error, cls)) from None
        except ValueError as error:
            raise ManifestError(f"{origin}: model.config: {error}.", "Use finite numbers only.") from None
        return config

    def to_manifest_content(self) -> dict[str, Any]:
        """Return all values, defaults included, as plain JSON types. `from_manifest_content` is the inverse."""
        return self.model_dump(mode="json")

    def changed(self, values: dict[str, Any]) -> Self:
        """Return the configuration with other values, nested as in run.toml: `{"codec": {"kind": "e2m1"}}`. A table
        whose `kind` changes is replaced whole. Raises: ManifestError."""
        return self.from_manifest_content(_merged(self.to_manifest_content(), values), "changed")


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)) or new.get("kind", old.get("kind")) != old.get("kind"):
        return new
    return old | {key: _merged(old.get(key), value) for key, value in new.items()}


def misfit(max_positions: JsonValue, vocabulary_size: JsonValue, config: RunConfig, tokenizer_size: int) -> str | None:
    """Return the reason, in one line, why a model with these limits cannot train on a run's windows or with its
    tokenizer; None if it can. A limit of the model that is not an integer is not checked."""
    length = config.training.sequence_length
    if isinstance(max_positions, int) and length > max_positions:
        return (
            f"training.sequence_length = {length} is longer than model.config.max_position_embeddings = "
            f"{max_positions}; lower the first or raise the second"
        )
    if isinstance(vocabulary_size, int) and vocabulary_size < tokenizer_size:
        return (
            f"model.config.vocab_size = {vocabulary_size} is smaller than the tokenizer's {tokenizer_size} tokens; "
            "raise it"
        )
    return None
