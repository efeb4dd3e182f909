"""The table [streaming] of `run.toml`: Streaming DiLoCo (arXiv 2501.18512). Without it a run is plain DiLoCo."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from opendiloco.alignment import next_fragment
from opendiloco.config.section import VALUES_LIMIT, Positive, Section, StepCount, ValueCount

FRAGMENTS_LIMIT = 256
"""Fragments that a run may have: a cycle of them has to fit into messages that name all of its entries."""


class StreamingSection(Section):
    """How a run's parameters are cut into fragments, and when what peers learned of them comes back.

    `layers_per_fragment` is how many transformer blocks a fragment has; without it there is one fragment. `pattern` is
    which blocks these are: see model/fragments.py. `embeddings` is where embeddings, head and all else outside of the
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
    def check_embeddings(self) -> Self:
        if self.pattern == "balanced" and self.embeddings is not None:
            raise ValueError('pattern = "balanced" places embeddings by their size, too; remove embeddings')
        return self

    @model_validator(mode="after")
    def check_sizes(self) -> Self:
        if self.sizes is not None and self.layers_per_fragment is None:
            raise ValueError("sizes are given without layers_per_fragment, so there is one fragment; remove sizes")
        return self

    @model_validator(mode="after")
    def check_all_sizes(self) -> Self:
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
        """Return `alpha`; its default is the paper's 0.5 with an overlap, and 0 without, when nothing was learned in
        between that could get lost."""
        return self.alpha if self.alpha is not None else 0.5 if self.overlap else 0.0

    @property
    def is_plain(self) -> bool:
        """Whether it is DiLoCo without streaming: one fragment, for which everybody waits and which replaces all."""
        return self.layers_per_fragment is None and self.overlap == 0 and self.mixing == 0
