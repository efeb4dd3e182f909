"""The export of a run's model: a folder that transformers loads, with a model card that names the run, the loss and the
commands to export the model again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_IMODE
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from opendiloco.config.data import STANDARD_LIBRARY, SourceSection
from opendiloco.config.run_config import AboutSection, RunConfig
from opendiloco.data.hub import CONFIG, is_local_path
from opendiloco.data.own_files import is_local
from opendiloco.data.tokenizer import Tokenizer
from opendiloco.errors import MachineError
from peers.values.wire import printable

Dtype = Literal["float32", "bfloat16"]
"""The type of an exported model's weights."""


def export_model(
    model: Any, tokenizer: Tokenizer, folder: Path, config: RunConfig, facts: RunFacts, dtype: Dtype = "float32"
) -> None:
    """Write a model's weights (safetensors), config, generation config, tokenizer and model card to a new or empty
    folder. Raises: MachineError if the folder is not empty or cannot be written."""
    remedy = "Give a new folder on a disk with space, e.g. --out model-2/."
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise MachineError(f"{folder} is not empty.", remedy)
        with _rounded_to(dtype, model):
            model.save_pretrained(folder)
        mode = S_IMODE((folder / CONFIG).stat().st_mode)  # safetensors makes its files readable only by their owner
        for path in folder.glob("*.safetensors"):
            path.chmod(mode)
        tokenizer.pretrained().save_pretrained(folder)
        (folder / CARD).write_text(_model_card(config, facts, dtype), encoding="utf-8")
    except OSError as error:
        raise MachineError(f"{folder} cannot be written ({error.strerror or error}).", remedy) from error


@contextmanager
def _rounded_to(dtype: Dtype, model: Any) -> Iterator[None]:
    """Round a model's parameters to `dtype` within the context, and restore them afterwards. Buffers do not change."""
    import torch

    parameters = [parameter for parameter in model.parameters() if parameter.dtype != getattr(torch, dtype)]
    own = [parameter.data for parameter in parameters]
    config_dtype = model.config.dtype
    try:
        for parameter in parameters:
            parameter.data = parameter.data.to(getattr(torch, dtype))
        yield
    finally:
        model.config.dtype = config_dtype  # `save_pretrained` has changed this setting
        for parameter, values in zip(parameters, own, strict=True):
            parameter.data = values


# The model card -------------------------------------------------------------------------------------------------------
CARD = "README.md"
ROWS = 100
"""Most rows of the curve's table in the card."""
STANDS_FOR = {
    "ADDRESS": "the address of one of the run's bootstrap nodes",
    "KEY": "the key file of the organiser or of a machine with a ticket",
    "FOLDER": "a volunteer's or an archive's folder of the run",
}
"""Placeholders in the card's commands, which must not name places on a machine."""
MARKS = "`|<>"
"""Characters that could end backticks or a table cell, or begin an HTML tag."""


class CurvePoint(BaseModel):
    """The held-out loss of theta after an outer step, in nats per token; `tokens` is the number trained by all peers up
    to that step, None if unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    outer_step: int
    loss: float
    tokens: int | None = None


class RunFacts(BaseModel):
    """The facts about a run that the card of its exported model states.

    `held_out_loss` is None where the text was not read. `peers` took part in the last outer step; `contributors` counts
    the peers that are known to have contributed, all of them if `knows_all`. `amendments` has a line of text for each.
    `sources` are those of the manifest (empty: those that are read here). The lines of `command` export the model
    again, and `versions` are those of the libraries that made it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    manifest_digest: str
    outer_steps: int
    tokens: int
    peers: int
    held_out_loss: float | None
    bits_per_byte: float | None = None
    contributors: int = 0
    knows_all: bool = False
    curve: tuple[CurvePoint, ...] = ()
    amendments: tuple[str, ...] = ()
    sources: tuple[SourceSection, ...] = ()
    command: str = ""
    versions: dict[str, str] = {}


def _model_card(config: RunConfig, facts: RunFacts, dtype: str = "float32") -> str:
    """Return the model card, the README.md of an exported model."""
    about = config.about
    loss = "not measured" if facts.held_out_loss is None else f"{facts.held_out_loss:.4f} nats per token"
    bits = "" if facts.bits_per_byte is None else f", {facts.bits_per_byte:.4f} bits per byte"
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
tags: [diloco, distributed-training]
{f"license: {_licence(about.licence)}" if about.licence else "# license: to be chosen by the run's organiser"}
---

# {_plain(about.title or config.name)}

{_about(about)}A language model trained by volunteers over the internet with [DiLoCo](https://arxiv.org/abs/2311.08105).

| fact | value |
| --- | --- |
| run | `{facts.run_id}` |
| manifest digest (BLAKE3) | `{facts.manifest_digest}` |
| peers in the last outer step | {facts.peers} |
| peers that contributed | {_contributors(facts)} |
| outer steps, each of up to {config.training.inner_steps} inner steps a peer | {facts.outer_steps} |
| tokens trained | {facts.tokens:,} |
| held-out loss | {loss}{bits} |
| weights | {dtype} |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

{_curve(facts)}{_data(config, facts)}{_training(config, facts)}{_origin(facts)}"""


def _licence(licence: str) -> str:
    """Return a licence as a quoted YAML string without special characters, because a manifest is untrusted."""
    return json.dumps(_plain(licence))


def _about(about: AboutSection) -> str:
    """Return the organiser's description of the run, the contact and the link, as Markdown paragraphs."""
    paragraphs = [about.description, about.contact and f"Contact: {about.contact}", about.link]
    return "".join(f"{_plain(words)}\n\n" for words in paragraphs if words)


def _curve(facts: RunFacts) -> str:
    """Return the curve of held-out losses as a Markdown section with a table; an empty string for fewer than two
    points."""
    points = facts.curve
    if len(points) < 2:
        return ""
    shown = min(len(points), ROWS)  # rows in the table, which include the first and the last point
    rows = [
        f"| {point.outer_step} | {'' if point.tokens is None else f'{point.tokens:,}'} | {point.loss:.4f} |"
        for point in (points[place * (len(points) - 1) // (shown - 1)] for place in range(shown))
    ]
    table = "\n".join(["| outer step | tokens | held-out loss |", "| --- | --- | --- |", *rows])
    last = "" if facts.held_out_loss is None else "\nThe last point was measured at the export of this model."
    return f"""\
## Training curve

Loss on the run's held-out text, in nats per token, as its peers measured it.{last}

{table}

"""


def _data(config: RunConfig, facts: RunFacts) -> str:
    data, training = config.data, config.training
    total = sum(data.shares)
    rows = [
        f"| {_name(source)} | {share / total:.1%} |"
        for source, share in zip(facts.sources or data.all_sources, data.shares, strict=True)
    ]
    unamended = ", before amendments" * bool(facts.amendments)
    table = "\n".join([f"| source | share of the samples{unamended} |", "| --- | --- |", *rows])
    path = config.tokenizer.path
    is_local = config.tokenizer.kind == "file" or (path is not None and is_local_path(path))
    tokenizer = "bytes" if path is None else "in this folder" if is_local else f"`{path}`"
    apart = "; tokens attend only to their own document" if training.document_mask else ""
    return f"""\
## Data

{table}

Windows of {training.sequence_length} tokens{apart}. Tokenizer: {tokenizer}. Each document was held out
with probability {data.held_out:g} (`data.held_out`), or of a long one the end. Held-out text was not trained on.

"""


def _name(source: SourceSection) -> str:
    if source.source == STANDARD_LIBRARY:
        return "Python's standard library"
    if is_local(source.source):
        return "local text of each volunteer"
    details = [f"{key} `{_plain(value)}`" for key in ("subset", "split", "revision") if (value := getattr(source, key))]
    return f"`{_plain(source.source)}` ({', '.join(details)})"


def _plain(words: str) -> str:
    """Return untrusted text without characters that Markdown or HTML would interpret."""
    return printable(words).translate(dict.fromkeys(map(ord, MARKS)))


def _training(config: RunConfig, facts: RunFacts) -> str:
    training, inner, outer = config.training, config.inner_optimizer, config.outer_optimizer
    trainers = f"{_contributors(facts)} peer{'s' * (max(facts.contributors, facts.peers) != 1)}"
    amended = "\nThe organiser then changed these values:\n\n" * bool(facts.amendments)
    amended += "".join(f"- {line}\n" for line in facts.amendments)
    return f"""\
## How it was made

{trainers} trained {facts.tokens:,} tokens in {facts.outer_steps} outer steps. By the run's manifest,
each peer made up to {training.inner_steps} inner steps at a time with {inner.kind}, in batches of
{training.batch_size} windows, at a learning rate of up to {inner.learning_rate:g}. Pseudo-gradients were sent as
{config.codec.kind}; their average was applied at a learning rate of {outer.learning_rate:g}, with a momentum of
{outer.momentum:g}.
{amended}
"""


def _contributors(facts: RunFacts) -> str:
    return f"{'' if facts.knows_all else 'at least '}{max(facts.contributors, facts.peers)}"


def _origin(facts: RunFacts) -> str:
    if not facts.command:
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    meanings = " and ".join(f"`{word}` is {meaning}" for word, meaning in STANDS_FOR.items() if word in facts.command)
    return f"""\
## How to export it again

```sh
{facts.command}
```

with {versions}. Here {meanings}. Following the run's log gives the same weights, bit for bit, on every machine.
"""
