"""The tables of `run.toml` that say what is read: [tokenizer], [data] and [[data.sources]]. See docs/data.md."""

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
"""The source that every machine has: the source of Python's standard library."""

SOURCE_LIMIT = 64  # of one run: a manifest of a stranger must not open thousands of data sets
LONGEST_CYCLE = 10_000
"""Samples after which a mixture begins again; `Mixture` keeps a table of them."""

PART = r"\w[\w.-]*(\[[-\d%:]*\])?(\(\w+\))?"


def _check_split(value: str) -> str:
    if not re.fullmatch(rf"{PART}( *\+ *{PART})*", value):  # it can become a folder's name
        raise PydanticCustomError("split", 'not a split such as "train" or "train[:10%]"')
    return value


def _check_revision(value: str) -> str:
    if not re.fullmatch(r"\w[\w./-]*", value) or ".." in value:  # it becomes a file's name in the hub's cache
        raise PydanticCustomError("revision", "not a branch, a tag or a commit")
    return value


@lru_cache(maxsize=256)  # a run that was amended asks again and again
def shares_of(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return the smallest whole numbers with the proportions of these weights (of the decimals as written).

    Raises: ValueError when no source has any, or when the proportions come true after too many samples only.
    """
    if not any(weights):
        raise ValueError("all weights are 0, so nothing would be read; give one source more")
    exact = [Fraction(repr(weight)) for weight in weights]
    denominator = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * denominator) for weight in exact]
    divisor = math.gcd(*whole)
    shares = tuple(share // divisor for share in whole)
    if sum(shares) > LONGEST_CYCLE:
        raise ValueError(
            f"the weights' proportions come true only every {sum(shares)} samples, more than {LONGEST_CYCLE}; "
            "use rounder weights, such as whole numbers up to 100"
        )
    return shares


class MixturePhase(NamedTuple):
    """The shares that the sources have of the samples from a sample number on."""

    first: int
    shares: tuple[int, ...]


Weight = Annotated[float, Field(ge=0, le=1e9)]
Split = Annotated[str, AfterValidator(_check_split), WithJsonSchema({"type": "string", "minLength": 1})]
Revision = Annotated[str, AfterValidator(_check_revision), WithJsonSchema({"type": "string", "minLength": 1})]


class TokenizerSection(Section):
    """Bytes (256 values and three special tokens), a pretrained tokenizer's hub name or folder, or a `tokenizer.json`.

    A folder's `path` begins with a dot or slash; each volunteer names its own folder or file with --tokenizer.

    `end` is the special token that closes each document, where the tokenizer does not say which one that is. `digest`
    is that of `digest_of_tokenizer`; `diloco-peer run create` fills it in.
    """

    kind: Literal["bytes", "pretrained", "file"] = "bytes"
    path: Name | None = None
    end: Name | None = None
    digest: Digest | None = None

    @model_validator(mode="after")
    def check_path(self) -> Self:
        if self.kind == "bytes" and (self.path or self.end or self.digest):
            raise ValueError('path, end and digest go with kind = "pretrained" or "file", and only with these')
        if self.kind != "bytes" and self.path is None:
            raise ValueError(f'kind = "{self.kind}" needs a path')
        return self


class SourceSection(Section):
    """One source of a mixture: "stdlib", a folder, or a data set's name on the hub.

    `subset`, `split`, `revision` and `column` choose a data set's rows and their text. Samples are taken in proportion
    to the `weight`s. One of 0 is for a source that the organiser may amend the run to read later, as for a cool-down.
    A source with `streaming` is read without being downloaded first; one with `shards` is never read whole: its files,
    or parts of them, are dealt to so many shards, each shard gives `windows_per_shard` windows, and each peer reads
    the shards that its samples are in. `digest` is that of all tokens of a source without shards
    (`data.token_files.digest_of_tokens`): a peer with others is refused. `diloco-peer run create` fills it in where the
    source is a folder of tokens.
    """

    source: Name
    subset: Name | None = None
    split: Split = "train"
    revision: Revision | None = None
    column: Name = "text"
    weight: Weight = 1.0
    streaming: bool = False
    shards: Positive | None = None
    windows_per_shard: Annotated[int, Field(ge=1, le=10**9)] | None = None
    digest: Digest | None = None

    @model_validator(mode="after")
    def check_shards(self) -> Self:
        if self.digest is not None and self.shards is not None:
            raise ValueError(
                "a source with shards is never read whole, so it has no digest; remove the one or the other"
            )
        if (self.shards is None) != (self.windows_per_shard is None):
            raise ValueError("shards and windows_per_shard go together; give both or neither")
        if self.source == STANDARD_LIBRARY and (self.shards or self.streaming or self.subset or self.revision):
            raise ValueError('source = "stdlib" has no shards, stream, subset or revision; remove these keys')
        return self


class DataSection(Section):
    """Where the text comes from: [[data.sources]], or their short form for one: `source`, `split`, `column`, `digest`.

    `held_out` is the fraction of documents that are never trained on.
    """

    source: Name | None = None
    split: Split | None = None
    column: Name | None = None
    digest: Digest | None = None
    sources: Annotated[tuple[SourceSection, ...], Field(strict=False, max_length=SOURCE_LIMIT)] = ()
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.05
    shuffle_seed: Seed = 0

    @model_validator(mode="after")
    def check_sources(self) -> Self:
        if self.sources and self._short_form:
            key = next(iter(self._short_form))
            raise ValueError(
                f"both {key} and [[data.sources]] are given; write {key} into the tables, or leave them out"
            )
        shares_of(self.weights)
        return self

    @property
    def _short_form(self) -> dict[str, Any]:
        keys = {"source": self.source, "split": self.split, "column": self.column, "digest": self.digest}
        return {key: value for key, value in keys.items() if value is not None}

    @property
    def all_sources(self) -> tuple[SourceSection, ...]:
        """The sources, whichever form they have in the file: one or more."""
        return self.sources or (SourceSection(**{"source": STANDARD_LIBRARY} | self._short_form),)

    @property
    def weights(self) -> tuple[float, ...]:
        """The sources' weights."""
        return tuple(source.weight for source in self.all_sources)

    @property
    def shares(self) -> tuple[int, ...]:
        """The sources' weights as the smallest whole numbers with the same proportions."""
        return shares_of(self.weights)

    def with_sources(self, sources: tuple[SourceSection, ...]) -> DataSection:
        """The same with other sources, in the same order and proportions."""
        if self.sources:
            return self.model_copy(update={"sources": sources})
        return self.model_copy(update={"source": sources[0].source, "digest": sources[0].digest})
