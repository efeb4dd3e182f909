"""The table [model] of `run.toml`, the checks on a model's config, and the check of a run's initial weights. See
docs/models.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias

from pydantic import Field, JsonValue, field_validator, model_validator

from opendiloco.config.section import Digest, Section, Seed
from opendiloco.errors import MachineError
from peers.errors import ManifestError
from peers.values.wire import printable

if TYPE_CHECKING:
    from opendiloco.shared_memory import Vector

LARGEST_COUNT = 1 << 24
"""Largest whole number allowed in a model's config: larger than any vocabulary, context or layer."""
REFUSED = (
    (True, r"_.*|name_or_path", "is set by transformers itself"),
    (True, r"(torch_)?dtype", "has no effect: weights are fp32, and training.precision is the precision of compute"),
    (
        False,
        r"auto_map|quantization_config|compression_config|configuration_files|.*implementation.*",
        "names code or kernels that come with the model, which are never run",
    ),
)
"""Refused keys: whether only manifests are refused, the keys as a pattern, and the reason. With a key of the last row
transformers would run code that comes with the model, load another library's kernels, or read another config."""

Place: TypeAlias = "tuple[Place, str | int] | None"
"""The place of a value: the place of its table or list, and its key or index there. None: the top level."""


def _check_model_values(values: JsonValue, in_manifest: bool = False) -> None:
    """Raise ValueError for a model's config with a key in `REFUSED` or an integer beyond ±`LARGEST_COUNT`."""
    for place, key, value in _walk(values):
        is_idle = isinstance(value, bool) or value is None
        for manifest_only, keys, why in REFUSED:
            is_meant = in_manifest if manifest_only else not is_idle
            if is_meant and re.fullmatch(keys, key, re.DOTALL):
                raise ValueError(f"{_path(place)} {why}; remove it")
        if is_idle:
            continue
        if isinstance(value, int) and abs(value) > LARGEST_COUNT:
            raise ValueError(
                f"{_path(place)} = {value} is too large; use {LARGEST_COUNT} or less, or write a number that is not a "
                "count as a decimal (1e8)"
            )


def _walk(values: JsonValue) -> Iterator[tuple[Place, str, JsonValue]]:
    """Yield each value nested in `values` with its place and the nearest key above the value.

    A place is a linked list and no string: a long key with many values below it would take gigabytes.
    """
    waiting: list[tuple[Place, str, JsonValue]] = [(None, "", values)]
    while waiting:  # a loop, no recursion, because a stranger chooses the depth of the nesting
        place, key, value = waiting.pop()
        yield place, key, value
        if isinstance(value, dict):
            waiting += [((place, name), name, inner) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [((place, number), key, inner) for number, inner in enumerate(value)]


def _path(place: Place) -> str:
    """Return the keys from the top of the config to `place`, joined by dots and safe to print."""
    keys: list[str] = []
    while place is not None:
        place, key = place
        keys.append(str(key))
    return printable(".".join(reversed(keys)))


class ModelSection(Section):
    """The model: a new one from `config`, or a pretrained one from `path`."""

    config: dict[str, JsonValue] | None = None
    """transformers config of a new model."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """Hub name, or a folder whose path begins with `.` or `/`. Volunteers name their own folder with `--model`."""
    init_seed: Seed = 0
    """Seed of its initial weights."""
    digest: Digest | None = None
    """Digest of the initial weights of a `path`."""

    @field_validator("config")
    @classmethod
    def check_config(cls, config: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
        for place, key, value in _walk(config):
            if not key.isprintable() or (isinstance(value, str) and not value.isprintable()):
                raise ValueError(f"{_path(place)} has control characters, which a terminal would obey; remove them")
        _check_model_values(config, in_manifest=True)
        return config

    @model_validator(mode="after")
    def check_source(self) -> Self:
        if (self.config is None) == (self.path is None):
            raise ValueError("needs either a table [model.config] or a path; give one of them")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError('[model.config] has no model_type; name the architecture, e.g. model_type = "llama"')
        return self


def read_model_values(text: str) -> dict[str, Any]:
    """Return the values in the text of a model's config.json. Raises: ValueError; see `_check_model_values`.

    `auto_map` is left out of the check: many published models name code of their own there for old versions of
    transformers. transformers never runs that code here, and refuses a model that needs it.
    """
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    _check_model_values({key: value for key, value in values.items() if key != "auto_map"})
    return values


def digest_of_weights(theta: Vector) -> str:
    """Return the digest, 64 hexadecimal digits, of `theta`: the weights as fp32 in the order of the parameters."""
    from peers.values.chunks import digest_of_state  # imports numpy, which a bootstrap node does not need

    return digest_of_state([theta.data.cast("B")]).hex()


def check_initial_weights(theta: Vector, section: ModelSection) -> None:
    """Check that `theta`, this machine's initial weights, has the digest in `section`, if there is a digest.

    Raises: MachineError when they differ; ManifestError when `section` names pretrained weights without a digest.
    """
    if section.digest is None and section.path is not None:
        raise ManifestError(
            f"model.path = {section.path!r} has no model.digest: peers could begin with different weights.",
            "Ask the organiser to create the run with `diloco-peer run create`, which fills the digest in.",
        )
    if section.digest is not None and (found := digest_of_weights(theta)) != section.digest:
        origin = repr(section.path) if section.path else f"init_seed = {section.init_seed}"
        raise MachineError(
            f"the run's initial weights have the digest {section.digest}; here {origin} gives the digest {found}.",
            "Get the organiser's version of the model."
            if section.path
            else "Install the versions in constraints.txt, with which the same seed gives the same weights.",
        )
