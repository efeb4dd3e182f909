"""`run.toml`: everything that defines a run, strictly checked. The signed manifest carries exactly these values.

Inner steps are optimizer steps of one peer; an outer step is `training.inner_steps` of them (the paper's H) followed
by one averaging round. The inner schedule counts the inner steps of the whole run: outer index * H + inner step; or
its tokens.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, ValidationError, model_validator

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
"""SparseLoCo's (arXiv 2508.15706)."""


THINNER: dict[str, tuple[str, ...]] = {"fp16": ("int8", "e2m1", "sparse"), "int8": ("e2m1", "sparse"), "sparse": ()}
"""By a run's codec, the formats that thin uplinks may use unless the manifest says otherwise; of others, the last."""
BITS: dict[str, float] = {
    "fp16": 16,
    "int8": 8.04,
    "e2m1-block32": 5,
    "uint4": 4.25,
    "e2m1": 4.04,
    "e3m0": 4.04,
    "sparse": 0.24,
}
"""Of a value; a test holds them against the formats."""


class CodecSection(Section):
    """How payloads are encoded on the wire: a name of `opendiloco.kernels.FORMATS`; docs/codecs.md helps to choose."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    kind: FormatName = "int8"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """To the nearest code, or by chance to one of the two beside it, so that nothing is lost on average."""
    error_feedback: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The share of what a payload has left out that its peer adds to its next one; for 4 bytes a parameter. With
    `kind = "sparse"` the default is 0.95, and 0 is refused."""
    contributions: Annotated[tuple[FormatName, ...], Field(strict=False, max_length=len(BITS))] = ()
    """The formats in which a peer may contribute: `kind`, then thinner ones for thin uplinks. A peer sends the first
    that its uplink carries in time, and makes up for what that leaves out; averages are always in `kind`. `["int8"]`
    allows none but int8; by default `e2m1` and `sparse` are allowed beside int8, and `sparse` beside four bits."""

    def number_of(self, kind: str) -> int:
        """Return the number of a format of contributions. Raises: ManifestError when the run does not allow it."""
        if kind not in self.contributions:
            allowed = ", ".join(self.contributions)
            raise ManifestError(
                f"this run takes no contributions in {kind}.", f"It takes {allowed}: choose one of them."
            )
        return self.contributions.index(kind)

    @model_validator(mode="before")
    @classmethod
    def add_defaults(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        kind = content.get("kind", "int8")
        if isinstance(kind, str) and kind in BITS and not content.get("contributions"):
            content = content | {"contributions": (kind, *THINNER.get(kind, ("sparse",)))}
        return {"error_feedback": SPARSE_ERROR_FEEDBACK} | content if kind == "sparse" else content

    @model_validator(mode="after")
    def check_kind(self) -> Self:
        if self.kind in ("fp16", "sparse") and self.rounding == "stochastic":
            raise ValueError(f'kind = "{self.kind}" rounds to nearest; remove rounding, or choose another kind')
        if self.kind == "sparse" and self.error_feedback == 0:
            raise ValueError(
                'kind = "sparse" leaves out 63 of 64 values, which without error_feedback are lost; '
                f"remove error_feedback, whose default is {SPARSE_ERROR_FEEDBACK}, or choose another kind"
            )
        bits = [BITS[kind] for kind in self.contributions]
        if self.contributions[:1] != (self.kind,) or sorted(set(bits), reverse=True) != bits:
            raise ValueError(
                f'contributions are {list(self.contributions)}; begin with kind, "{self.kind}", and let each format '
                f"have fewer bits than the one before: {', '.join(BITS)}"
            )
        return self


FRAGMENTS_LIMIT = 256
"""Fragments that a run may have: a cycle of them has to fit into messages that name all of its entries."""


class StreamingSection(Section):
    """How a run's parameters are cut into fragments, and when what peers learned of them comes back.

    `layers_per_fragment` is how many transformer blocks a fragment has; without it there is one fragment. `pattern` is
    which blocks these are: see model/parameters.py. `embeddings` is where embeddings, head and all else outside of the
    blocks belong: "apart", a fragment of their own, or "ends", the first and the last one of the blocks' fragments.

    `overlap` is the paper's τ: the inner steps that a peer takes while a fragment is averaged. 0: it waits. `alpha` is
    the weight of a peer's own values when the average comes back (line 21 of Algorithm 2).

    `sizes` are how many values each fragment has. `diloco-peer run create` fills them in, so that archives and
    followers need no model to know where fragments lie.
    """

    pattern: Literal["strided", "sequential", "balanced"] = "strided"
    layers_per_fragment: Positive | None = None
    embeddings: Literal["apart", "ends"] | None = None
    overlap: StepCount = 0
    alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    sizes: Annotated[tuple[ValueCount, ...], Field(strict=False, min_length=1, max_length=FRAGMENTS_LIMIT)] | None = (
        None
    )

    @model_validator(mode="after")
    def check_fragments(self) -> Self:
        if self.pattern == "balanced" and self.embeddings is not None:
            raise ValueError('pattern = "balanced" places embeddings by their size, too; remove embeddings')
        if self.sizes is not None and self.layers_per_fragment is None:
            raise ValueError("sizes are given without layers_per_fragment, so there is one fragment; remove sizes")
        if sum(self.sizes or ()) > VALUES_LIMIT:
            raise ValueError(f"sizes are {sum(self.sizes or ())} values in all; make them {VALUES_LIMIT} at most")
        return self

    @property
    def fragments(self) -> tuple[slice, ...] | None:
        """Return where each fragment lies in the flat vectors; None where `sizes` do not say."""
        places: list[slice] = []
        for size in self.sizes or ():
            start = next_fragment(places[-1].stop if places else 0)
            places.append(slice(start, start + size))
        return tuple(places) or None

    @property
    def mixing(self) -> float:
        """Return `alpha`; by default the paper's 0.5 with an overlap, 0 without: then nothing can get lost."""
        return self.alpha if self.alpha is not None else 0.5 if self.overlap else 0.0

    @property
    def is_plain(self) -> bool:
        """Whether it is DiLoCo without streaming: one fragment, for which everybody waits and which replaces all."""
        return self.layers_per_fragment is None and self.overlap == 0 and self.mixing == 0


BATCH_TOKENS = LONGEST_TEXT = 10**8
"""Tokens of a batch, and of held-out text, which peers have in memory: at 8 bytes each, a gigabyte."""
ROUND_TOKENS = 10**12
"""Tokens that one peer trains on between two outer steps."""
RUN_TOKENS = 10**15
"""Tokens that one peer trains on in a whole run, so that those of a thousand are a number that the log can carry."""


def _check_product(limit: int, **factors: int) -> None:
    """Raises: ValueError when the product of these values, by their keys, is above the limit."""
    if math.prod(factors.values()) > limit:
        given = " * ".join(f"{key.replace('__', '.')} = {value}" for key, value in factors.items())
        raise ValueError(f"{given} is {math.prod(factors.values()):.3g} tokens; make them {limit:.0e} at most")


class TrainingSection(Section):
    """One peer's inner loop. `inner_steps` is H; a batch is `batch_size` windows of `sequence_length` tokens.

    `z_loss` is the weight of the squared log of the softmax's denominator, added to the loss of each token (section 5
    of arXiv 2204.02311, where it is 1e-4); it keeps logits from drifting. With `document_mask` a token attends within
    its document only, and no document predicts the next one's beginning. `precision` is that of the forward and
    backward pass; weights and moments are fp32. `gradient_reduction` is that in which a machine's workers sum their
    gradients.

    `micro_batch` and `activation_checkpointing` are what the organiser recommends for the machines that are expected:
    how many windows a worker puts through the model at once, and whether it computes activations again. A CPU takes no
    more than these windows; a GPU begins with them, and takes more where they fit. Both change memory and speed, and no
    result but by rounding; a machine's owner may choose otherwise.
    """

    inner_steps: Positive
    batch_size: Positive
    sequence_length: Annotated[int, Field(ge=2, le=1_000_000)]
    document_mask: bool = False
    gradient_clip: PositiveFloat = 1.0
    z_loss: NotNegativeFloat = 0.0
    precision: Literal["fp32", "bf16"] = "fp32"
    gradient_reduction: Literal["fp32", "bf16"] = "fp32"
    micro_batch: Positive | None = None
    activation_checkpointing: bool = False

    @model_validator(mode="after")
    def check_tokens(self) -> Self:
        batch = {"batch_size": self.batch_size, "sequence_length": self.sequence_length}
        _check_product(BATCH_TOKENS, **batch)
        _check_product(ROUND_TOKENS, inner_steps=self.inner_steps, **batch)
        return self

    @property
    def round_tokens(self) -> int:
        """Return the tokens that a peer trains on between two outer steps, if it takes all inner steps."""
        return self.inner_steps * self.batch_size * self.sequence_length


class RoundsSection(Section):
    """Timing of membership and rounds, in seconds."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    heartbeat_seconds: Seconds = Timing.heartbeat
    """How often a peer says that it is there."""
    heartbeat_expiry_seconds: Annotated[float, Field(ge=0.1, le=300)] = Timing.heartbeat_expiry
    """Silence after which a peer counts as gone; more than twice `heartbeat_seconds`."""
    grace_seconds: Seconds = Timing.grace
    """How long a leader that is ready waits for live peers that are still training."""
    round_timeout_seconds: Seconds = Timing.round_timeout
    """How long the exchange of one round may take at most: blocks that have not come then are left out."""
    partition_grace_seconds: Seconds = Timing.partition_grace
    """How long a minority of the last roster waits for the rest before it goes on alone."""
    policy: Literal["synchronous", "asynchronous"] = "synchronous"
    """Whether an outer step waits for all who train until the grace is over, or for `contributions` of them."""
    contributions: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of those who train, the share whose work is enough for an asynchronous outer step; by default half."""
    minimum_peers: Positive = 1
    """Peers that must be there for an outer step."""
    quorum: Literal["majority", "two-thirds"] = "majority"
    """Voters that decide: more than half, or more than two thirds, so that liars below a third cannot split the run."""
    staleness: Annotated[int, Field(ge=0, le=16)] = 1
    """Outer steps that a peer may miss and still contribute what it trained meanwhile."""
    smallest_share: Annotated[float, Field(gt=0, le=1)] = RunSettings.smallest_share
    """Of `training.inner_steps`, that the slowest peers make at the least; 1: all make as many."""
    clip: Annotated[float, Field(ge=1, le=1000)] = RunSettings.clip
    """Times the median norm of an outer step's pseudo-gradients, that one of them counts with at most."""
    exclusion: Annotated[int, Field(ge=0, le=1_000_000)] = RunSettings.exclusion
    """Outer steps for which a peer is excluded that is proven to have lied; 0: none."""

    @property
    def enough(self) -> float | None:
        """Return the share of those who train whose work is enough for an outer step; None: all are waited for."""
        return None if self.policy == "synchronous" else self.contributions or 0.5

    @property
    def timing(self) -> Timing:
        """Return the times of these, as the protocol has them."""
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
                f"contributions = {self.contributions:g} is for asynchronous outer steps; remove it, or give "
                'policy = "asynchronous"'
            )
        if self.policy == "asynchronous" and self.staleness == 0:
            raise ValueError(
                "staleness = 0 would lose the work of whoever is late for an asynchronous outer step; make it 1 or more"
            )
        if self.heartbeat_expiry_seconds <= 2 * self.heartbeat_seconds:
            raise ValueError(
                f"heartbeat_expiry_seconds = {self.heartbeat_expiry_seconds:g} would bury a peer after one lost "
                f"heartbeat; make it more than twice heartbeat_seconds = {self.heartbeat_seconds:g}"
            )
        return self


class _SnapshotsSection(Section):
    """How often the state is frozen for who joins, in outer steps. What came since is replayed."""

    every: Annotated[int, Field(ge=1, le=1000)] = RunSettings.snapshot_every


class _AdmissionSection(Section):
    """Who may join: everybody, or with `mode = "invite"` whoever has a ticket (`diloco-peer invite create`).

    A new peer neither counts nor votes in its first `probation` outer steps. The default is none: where identities cost
    nothing it is a delay for who makes up many of them, and for a volunteer it may be its first day.
    """

    mode: Literal["open", "invite"] = "open"
    probation: Annotated[int, Field(ge=0, le=1000)] = RunSettings.probation


class EvaluationSection(Section):
    """After every so many outer steps one of the peers evaluates theta on held-out text, each time another; 0: none.

    theta is better than what any peer makes of it alone (Table 3 of arXiv 2501.18512). `windows` is how many windows of
    `training.sequence_length` tokens are read. `digest` is that of their tokens (`HeldOutWindows.digest`), by which a
    peer knows whether its folders have the same text; `diloco-peer run create` fills it in.
    """

    every: Annotated[int, Field(ge=0, le=1_000_000)] = 8
    windows: Positive = 64
    digest: Digest | None = None


class AboutSection(Section):
    """What the run is for, in the organiser's words, for those who may join it and for the card of its model.

    `licence` is that of the model, by its SPDX name, such as "apache-2.0"; `contact` an address for questions.
    """

    title: Words | None = None
    description: Words | None = None
    licence: Words | None = None
    contact: Words | None = None
    link: Link | None = None

    def lines(self) -> list[str]:
        """Return the words that are given, in two lines at most."""
        licence = None if self.licence is None else f"licence {self.licence}"
        first, second = (self.title, self.description), (licence, self.contact, self.link)
        return [line for line in (": ".join(filter(None, first)), " · ".join(filter(None, second))) if line]


class RunConfig(Section):
    """A whole `run.toml`. Frozen; two equal configurations have equal manifest contents.

    `archives` are the peer ids of archives whose signatures of the log's heads decide between its branches. The default
    is the organiser's alone: it costs nothing while that signs nothing. An empty list: nobody's.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]
    outer_steps: Positive | None = None
    archives: Annotated[tuple[PeerName, ...], Field(strict=False, max_length=KEYS_LIMIT)] | None = None
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
            raise ValueError("the schedule does not say how many steps the run has; give outer_steps at the top")
        if self.streaming.overlap >= self.training.inner_steps:
            raise ValueError(
                f"streaming.overlap = {self.streaming.overlap} is no less than training.inner_steps = "
                f"{self.training.inner_steps}: a fragment would come back after its next average; lower it"
            )
        if self.outer_steps is None and self.schedule.total_steps == 0:
            raise ValueError("the schedule is empty; give schedule.stable_steps, or outer_steps at the top")
        length = self.training.sequence_length
        _check_product(LONGEST_TEXT, evaluation__windows=self.evaluation.windows, training__sequence_length=length)
        if self.total_outer_steps * self.training.round_tokens > RUN_TOKENS:
            raise ValueError(
                f"{self.total_outer_steps} outer steps of {self.training.round_tokens} tokens are more than a run may "
                f"have, {RUN_TOKENS}; give fewer outer_steps, or a shorter schedule"
            )
        config = self.model.config or {}
        tokens = BYTE_TOKENIZER_SIZE if self.tokenizer.kind == "bytes" else 0
        problem = misfit(config.get("max_position_embeddings"), config.get("vocab_size"), self, tokens)
        if problem:
            raise ValueError(problem)
        return self

    @property
    def total_outer_steps(self) -> int:
        """Length of the run: `outer_steps` if given, else as many as the inner schedule fills."""
        return self.outer_steps or math.ceil((self.schedule.total_steps or 0) / self.training.inner_steps)

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """Read and check a file. Raises: ManifestError, with one line for each problem."""
        return cls.from_manifest_content(read_toml(path, "Give a run.toml that exists."), str(path))

    @classmethod
    def from_manifest_content(cls, content: dict[str, Any], origin: str = "manifest") -> Self:
        """Return the configuration in a manifest. `origin` is what errors are about. Raises: ManifestError."""
        try:
            config = cls.model_validate(content)
            json.dumps(config.to_manifest_content(), allow_nan=False)
        except ValidationError as error:
            raise ManifestError(describe_validation_error(origin, error, cls)) from None
        except ValueError as error:
            raise ManifestError(f"{origin}: model.config: {error}.", "Use finite numbers only.") from None
        return config

    def to_manifest_content(self) -> dict[str, Any]:
        """Return all values as plain JSON types, defaults included; `from_manifest_content` is the way back."""
        return self.model_dump(mode="json")


def misfit(positions: JsonValue, vocabulary: JsonValue, config: RunConfig, tokens: int) -> str | None:
    """Why this model cannot train on these windows and tokens, in one line; None when it can (or cannot be known)."""
    length = config.training.sequence_length
    if isinstance(positions, int) and length > positions:
        return (
            f"training.sequence_length = {length} is longer than model.config.max_position_embeddings = {positions}; "
            "shorten the one or raise the other"
        )
    if isinstance(vocabulary, int) and vocabulary < tokens:
        return f"model.config.vocab_size = {vocabulary} is smaller than the tokenizer's {tokens} tokens; raise it"
    return None
