"""The table [model] of `run.toml`, what the config of any model may say, and whether a machine begins with the weights
that a run means. See docs/models.md."""

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
"""Of all whole numbers in a model's config: more than any vocabulary, context or layer has."""
REFUSED = (
    (True, r"_.*|name_or_path", "is transformers' own affair"),
    (True, r"(torch_)?dtype", "has no say: weights are in fp32, and training.precision is what they are computed in"),
    (
        False,
        r"auto_map|quantization_config|compression_config|configuration_files|.*implementation.*",
        "names code or kernels of its own, which are not run",
    ),
)
"""Keys that no config may have, or only none in a manifest, as patterns, and why. With the last, transformers would run
code that comes with the model, load another library's kernels, or read another config."""

Place: TypeAlias = "tuple[Place, str | int] | None"
"""Where a value is: where its table or list is, and its key or number there; None: at the top."""


def _check_model_values(values: JsonValue, in_manifest: bool = False) -> None:
    """Raises: ValueError for a config that has refused keys, or numbers beyond those of any model."""
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
                f"{_path(place)} = {value} is too large; use {LARGEST_COUNT} or less, and decimals where nothing is "
                "counted (1e8)"
            )


def _walk(values: JsonValue) -> Iterator[tuple[Place, str, JsonValue]]:
    """Yield each value with its place and the nearest key above it.

    A place is not written out: a long key with many values below it would take gigabytes.
    """
    waiting: list[tuple[Place, str, JsonValue]] = [(None, "", values)]
    while waiting:  # no recursion: how deep values are nested is not ours to say
        place, key, value = waiting.pop()
        yield place, key, value
        if isinstance(value, dict):
            waiting += [((place, name), name, inner) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [((place, number), key, inner) for number, inner in enumerate(value)]


def _path(place: Place) -> str:
    """Return a place's keys, from the top, as a message can have them."""
    keys: list[str] = []
    while place is not None:
        place, key = place
        keys.append(str(key))
    return printable(".".join(reversed(keys)))


class ModelSection(Section):
    """The model: an inline transformers config (initialised from `init_seed`), or a hub name or local folder to load.

    A folder's `path` begins with a dot or slash; each volunteer names its own with --model. `digest` is that of the
    weights that the run begins with (see `digest_of_weights`). With a path it is needed, and `diloco-peer run
    create` fills it in.
    """

    config: dict[str, JsonValue] | None = None
    path: Annotated[str, Field(min_length=1)] | None = None
    init_seed: Seed = 0
    digest: Digest | None = None

    @field_validator("config")
    @classmethod
    def check_config(cls, config: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
        for place, key, value in _walk(config):
            if not key.isprintable() or (isinstance(value, str) and not value.isprintable()):
                raise ValueError(f"{_path(place)} has control characters, which libraries would print; remove them")
        _check_model_values(config, in_manifest=True)
        return config

    @model_validator(mode="after")
    def check_source(self) -> Self:
        if (self.config is None) == (self.path is None):
            raise ValueError("needs either a table [model.config] or a path, and not both")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError('[model.config] has no model_type; name the architecture, e.g. model_type = "llama"')
        return self


def read_model_values(text: str) -> dict[str, Any]:
    """Return what a model's config.json says. Raises: ValueError; see `_check_model_values`.

    Many a published model that transformers knows names code of its own besides, for older versions: transformers is
    told to pass that over, and refuses a model that needs it.
    """
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    _check_model_values({key: value for key, value in values.items() if key != "auto_map"})
    return values


def digest_of_weights(theta: Vector) -> str:
    """Return 64 hexadecimal digits, of the values as fp32 in the model's order, however files hold them."""
    from peers.values.chunks import digest_of_state  # imports numpy, which a bootstrap node does without

    return digest_of_state([theta.data.cast("B")]).hex()


def check_initial_weights(theta: Vector, section: ModelSection) -> None:
    """Compare the weights that a run begins with, as they are on this machine, with those that `section` names.

    Raises: MachineError when they differ; ManifestError when weights from elsewhere have no digest to compare with.
    """
    if section.digest is None and section.path is not None:
        raise ManifestError(
            f"model.path = {section.path!r} comes without model.digest: peers could begin with different weights.",
            "The organiser makes the run with `diloco-peer run create`, which fills it in.",
        )
    if section.digest is not None and (found := digest_of_weights(theta)) != section.digest:
        origin = repr(section.path) if section.path else f"init_seed = {section.init_seed}"
        raise MachineError(
            f"the run begins with weights of digest {section.digest}; those of {origin} have {found} here.",
            "Get the model that the organiser means."
            if section.path
            else "Install the versions in constraints.txt, with which the same seed gives the same weights.",
        )
