"""The table `[codec]`: how pseudo-gradients are encoded."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from opendiloco.config.section import Section

SPARSE_ERROR_FEEDBACK = 0.95
"""SparseLoCo's (arXiv 2508.15706)."""


class CodecSection(Section):
    """How payloads are encoded on the wire: a name of `opendiloco.kernels.FORMATS`; docs/codecs.md helps to choose."""

    kind: Literal["int8", "uint4", "e2m1-block32", "e2m1", "e3m0", "fp16", "sparse"] = "int8"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """To the nearest code, or by chance to one of the two beside it, so that nothing is lost on average."""
    error_feedback: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The share of what a payload has left out that its peer adds to its next one; for 4 bytes a parameter. With
    `kind = "sparse"` the default is 0.95, and 0 is refused."""

    @model_validator(mode="before")
    @classmethod
    def add_error_feedback(cls, content: Any) -> Any:
        if isinstance(content, dict) and content.get("kind") == "sparse":
            return {"error_feedback": SPARSE_ERROR_FEEDBACK} | content
        return content

    @model_validator(mode="after")
    def check_rounding(self) -> Self:
        if self.kind in ("fp16", "sparse") and self.rounding == "stochastic":
            raise ValueError(f'kind = "{self.kind}" rounds to nearest; remove rounding, or choose another kind')
        return self

    @model_validator(mode="after")
    def check_error_feedback(self) -> Self:
        if self.kind == "sparse" and self.error_feedback == 0:
            raise ValueError(
                'kind = "sparse" leaves out 63 of 64 values, which without error_feedback are lost; '
                f"remove error_feedback, whose default is {SPARSE_ERROR_FEEDBACK}, or choose another kind"
            )
        return self
