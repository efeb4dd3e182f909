"""The tables of `run.toml` about the training text: [tokenizer], [data] and [[data.sources]]. See docs/data.md."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from opendiloco.config.section import Digest, Name, Positive, Section, Seed

BYTE_TOKENIZER_SIZE = 259
"""Token ids of the tokenizer "bytes": 256 bytes and three special tokens."""

STANDARD_LIBRARY = "stdlib"
"""The name of the source that every machine has: the code of Python's standard library."""

SOURCE_LIMIT = 64  # most sources in one run, because a stranger's manifest must not open thousands of data sets
LONGEST_CYCLE = 10_000
"""Most samples in one cycle of a mixture; `Mixture` keeps a table with an element for each."""

PART = r"\w[\w.-]*(\[[-\d%:]*\])?(\(\w+\))?"


def _check_split(value: str) -> str:
    if not re.fullmatch(rf"{PART}( *\+ *{PART})*", value):  # strict, because a split can become the name of a folder
        raise PydanticCustomError("split", 'not a split such as "train" or "train[:10%]"')
    return value


def _check_revision(value: str) -> str:
    if not re.fullmatch(r"\w[\w./-]*", value) or ".." in value:  # a revision becomes a file name in the hub's cache
        raise PydanticCustomError("revision", "not a branch, a tag or a commit")
    return value


@lru_cache(maxsize=256)  # a run with amendments calls shares_of often
def shares_of(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return the smallest whole numbers that have the exact proportions of these decimal weights.

    Raises: ValueError when all weights are 0, or when the numbers add up to more than `LONGEST_CYCLE`.
    """
    if not any(weights):
        raise ValueError("all weights are 0, so no source would be read; give one source a weight above 0")
    exact = [Fraction(repr(weight)) for weight in weights]
    denominator = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * denominator) for weight in exact]
    divisor = math.gcd(*whole)
    shares = tuple(share // divisor for share in whole)
    if sum(shares) > LONGEST_CYCLE:
        raise ValueError(
            f"these weights need a cycle of {sum(shares)} samples, and at most {LONGEST_CYCLE} are allowed; "
            "use rounder weights, such as whole numbers up to 100"
        )
    return shares


class MixturePhase(NamedTuple):
    """Each source's share of the samples, in force from sample number `first` on."""

    first: int
    shares: tuple[int, ...]


Weight = Annotated[float, Field(ge=0, le=1e9)]
Split = Annotated[str, AfterValidator(_check_split), WithJsonSchema({"type": "string", "minLength": 1})]
Revision = Annotated[str, AfterValidator(_check_revision), WithJsonSchema({"type": "string", "minLength": 1})]


class TokenizerSection(Section):
    """The tokenizer that turns text into token ids."""

    kind: Literal["bytes", "pretrained", "file"] = "bytes"
    """Bytes and 3 special tokens, a transformers tokenizer, or a `tokenizer.json`."""
    path: Name | None = None
    """Hub name, or a path that begins with `.` or `/`. Volunteers name their own path with `--tokenizer`."""
    end: Name | None = None
    """Special token that closes a document, if the tokenizer defines none."""
    digest: Digest | None = None
    """Digest of the tokenizer."""

    @model_validator(mode="after")
    def check_path(self) -> Self:
        if self.kind == "bytes" and (self.path or self.end or self.digest):
            raise ValueError('path, end and digest need kind = "pretrained" or "file"; remove them, or set kind')
        if self.kind != "bytes" and self.path is None:
            raise ValueError(f'kind = "{self.kind}" needs a path')
        return self


class SourceSection(Section):
    """One of at most 64 text sources."""

    source: Name
    """`"stdlib"`, a folder, file or pattern, or a data set on the hub."""
    subset: Name | None = None
    """Subset of the data set."""
    split: Split = "train"
    """Split of the data set, such as `"train[:10%]"`."""
    revision: Revision | None = None
    """Branch, tag or commit of the data set."""
    column: Name = "text"
    """Column that holds the text or the token ids."""
    weight: Weight = 1.0
    """Share of the samples, relative to other sources; an amendment can raise 0."""
    streaming: bool = False
    """Do not download the source first."""
    shards: Positive | None = None
    """Number of parts; a peer reads only the parts of its own samples."""
    windows_per_shard: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """Windows in each shard; required with `shards`."""
    digest: Digest | None = None
    """Digest of a folder of tokens."""

    @model_validator(mode="after")
    def check_shards(self) -> Self:
        if self.digest is not None and self.shards is not None:
            raise ValueError(
                "a source with shards is never read as a whole, so it cannot have a digest; remove shards or digest"
            )
        if (self.shards is None) != (self.windows_per_shard is None):
            raise ValueError("shards and windows_per_shard go together; give both or neither")
        if self.source == STANDARD_LIBRARY and (self.shards or self.streaming or self.subset or self.revision):
            raise ValueError('source = "stdlib" has no shards, stream, subset or revision; remove these keys')
        return self


class DataSection(Section):
    """The text to train on; docs/data.md describes the sources. A run with one source may give its `source`, `split`,
    `column` and `digest` here instead of in `[[data.sources]]`. Without a source it reads `"stdlib"`."""

    source: Name | None = None
    split: Split | None = None
    column: Name | None = None
    digest: Digest | None = None
    sources: Annotated[tuple[SourceSection, ...], Field(strict=False, max_length=SOURCE_LIMIT)] = ()
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Fraction of the documents that is only used for evaluation."""
    shuffle_seed: Seed = 0
    """Seed of the order of samples."""

    @model_validator(mode="after")
    def check_sources(self) -> Self:
        if self.sources and self._short_form:
            key = next(iter(self._short_form))
            raise ValueError(
                f"both {key} and [[data.sources]] are given; move {key} into a [[data.sources]] table, or remove them"
            )
        shares_of(self.weights)
        return self

    @property
    def _short_form(self) -> dict[str, Any]:
        keys = {"source": self.source, "split": self.split, "column": self.column, "digest": self.digest}
        return {key: value for key, value in keys.items() if value is not None}

    @property
    def all_sources(self) -> tuple[SourceSection, ...]:
        """The sources, at least one, from `[[data.sources]]` or else from the keys of `[data]`."""
        return self.sources or (SourceSection(**{"source": STANDARD_LIBRARY} | self._short_form),)

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(source.weight for source in self.all_sources)

    @property
    def shares(self) -> tuple[int, ...]:
        """The sources' weights as the smallest whole numbers with the same proportions."""
        return shares_of(self.weights)

    def with_sources(self, sources: tuple[SourceSection, ...]) -> DataSection:
        """Return a copy of the section with `sources`, which must have the old sources' order and weights."""
        if self.sources:
            return self.model_copy(update={"sources": sources})
        return self.model_copy(update={"source": sources[0].source, "digest": sources[0].digest})
